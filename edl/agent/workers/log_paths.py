"""Names of everything that a launcher keeps of its workers' output. Pure: it makes and opens nothing.

Each worker has a folder of its own for each round, the same as under torchrun: ``attempt_<round - 1>/<local rank>``
below the launcher's folder. A round's folder is never used again, so nothing in it is ever overwritten: where a second
process takes the same place in the same round, and where the same job is started again, a number is added.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from string import Template

from edl.config import LogLayout
from edl.types import Round
from edl.wire.address import address
from edl.wire.messages import World

LATEST = "latest"
"""Link in the launcher's folder that leads to the newest round."""
REPORT = "error.json"
"""In the launcher's folder: how the job has failed."""
HISTORY = "events.jsonl"
"""In the folder of the launcher that was Master at the end of the job: its history."""
PADDLE_FOLDER = "log"
"""Where Paddle's launcher writes when nothing else is said."""
PREFIX_ALONE = "[${role_name}${rank}]:"
PREFIX_AMONG_NODES = "[${role_name}${rank}@${node}]:"
PREFIX_AHEAD = "[${node}/${local_rank}]:"
"""Before each line on the console of a stream with ``--tee``: in a world of one node, in one of several, and of a
worker that has no world yet. torchrun's is the first, but with the local rank."""
UNKNOWN = "-"
"""In a prefix, for what a worker has not been told yet."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One worker's part in one round."""

    round: Round
    """The round; with ``ahead`` the one after which the worker was started, without a world."""
    local_rank: int
    rank: int = -1
    nodes: int = 1
    """Nodes of its world."""
    ahead: bool = False

    @property
    def folder(self) -> str:
        """Of all workers of this launcher in that round; torchrun counts from 0."""
        return f"attempt_{self.round}_ahead" if self.ahead else f"attempt_{self.round - 1}"


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """Paths of one worker in one round. ``root``: the launcher's folder; empty: there are no files."""

    root: str
    attempt: Attempt
    again: int = 1
    """The how manieth process at this place in this round."""
    layout: LogLayout = LogLayout.TORCHRUN
    servers: int = 0
    """The first local ranks that are pservers."""

    @property
    def of_server(self) -> bool:
        """Whether the worker is a pserver."""
        return self.attempt.local_rank < self.servers

    @property
    def folder(self) -> str:
        """Of this worker alone; empty for none."""
        number = "" if self.again == 1 else f".{self.again}"
        return f"{self.root}/{self.attempt.folder}/{self.attempt.local_rank}{number}" if self.root else ""

    @property
    def stdout(self) -> str:
        """File of its stdout."""
        return self._in_folder("stdout.log" if self.layout is LogLayout.TORCHRUN else "workerlog")

    @property
    def stderr(self) -> str:
        """File of its stderr; Paddle's launcher has both streams in one."""
        return self._in_folder("stderr.log" if self.layout is LogLayout.TORCHRUN else "workerlog")

    @property
    def error_file(self) -> str:
        """Where an uncaught exception is described (``TORCHELASTIC_ERROR_FILE``)."""
        return self._in_folder("error.json")

    @property
    def environment(self) -> str:
        """Paddle's ``envlog.N``."""
        return self._in_folder("envlog")

    @property
    def backup_environment(self) -> str:
        """Paddle's ``backup_env.N.json``."""
        return self._in_folder("backup_env.json")

    def filtered(self, stream: str) -> str:
        """Of all workers of the round: the lines that a filter has let through. ``stream``: stdout or stderr."""
        return f"{self.root}/{self.attempt.folder}/filtered_{stream}.log" if self.root else ""

    def links(self) -> dict[str, str]:
        """Paddle's names in the folder that was asked for, and where they lead."""
        if not self.root or self.attempt.ahead:
            return {}
        rank = self.attempt.local_rank
        links = {f"envlog.{rank}": self.environment}
        if self.of_server:
            return {**links, f"serverlog.{rank}": self.stdout}
        number = rank - self.servers
        return {**links, f"workerlog.{number}": self.stdout, f"backup_env.{number}.json": self.backup_environment}

    def _in_folder(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.root else ""


def launch_folder(name: str, taken: Collection[str]) -> str:
    """Name of the folder of a launch, below ``--log-dir``: ``name``, or with the number after the highest one.

    ``taken``: names that exist there already, of earlier launches of the same job on the same node. Numbers that are
    free again are not used, so that they tell which launch was before which.
    """
    highest = max((number_of(name, folder) for folder in taken), default=0)
    return f"{name}.{highest + 1}" if highest else name


def number_of(name: str, folder: str) -> int:
    """Which launch of this name a folder is, by ``launch_folder``; 0 for none of them."""
    if folder == name:
        return 1
    digits = folder.removeprefix(f"{name}.")
    return int(digits) if digits != folder and digits.isdecimal() and digits.isascii() else 0


def server_log(folder: str, index: int) -> str:
    """File of a pserver of this launcher under Paddle's name; empty where there is no folder for it."""
    return f"{folder}/serverlog.{index}" if folder else ""


def pod_log(folder: str, job: str, node: str) -> str:
    """File in which Paddle's launcher notes the nodes of each round, named after job and pod."""
    return f"{folder}/{job}.{node}.log"


def peers(world: World) -> str:
    """Its line about a round: the nodes by rank, in JSON."""
    nodes = [
        {
            "round": world.round,
            "name": member.node,
            "rank": position,
            "replicas": member.slots,
            "endpoints": [address(member.host, port) for port in member.ports[1 : 1 + member.slots]],
        }
        for position, member in enumerate(world.members)
    ]
    return json.dumps(nodes) + "\n"


def prefix(template: str, attempt: Attempt, node: str, role: str = "default", host: str = "") -> str:
    """What stands before a line on the console. ``template``: with ``${role_name}``, ``${rank}``, ``${local_rank}`` and
    ``${hostname}`` as torchrun's, and ``${node}``, ``${round}``; empty for the one that fits. What it names else stays
    as it is."""
    if not template:
        among = PREFIX_AMONG_NODES if attempt.nodes > 1 else PREFIX_ALONE
        template = PREFIX_AHEAD if attempt.ahead else among
    fields: Mapping[str, object] = {
        "role_name": role,
        "rank": UNKNOWN if attempt.ahead else attempt.rank,
        "local_rank": attempt.local_rank,
        "node": node,
        "hostname": host or node,
        "round": UNKNOWN if attempt.ahead else attempt.round,
    }
    return Template(template).safe_substitute(fields)


def selected(lines: Sequence[bytes], filters: Sequence[bytes]) -> list[bytes]:
    """Lines that hold at least one of the texts."""
    return [line for line in lines if any(text in line for text in filters)]


def told(environment: Mapping[str, str], base: Mapping[str, str]) -> str:
    """Text of ``envlog.N``: what a worker is told beyond the launcher's own environment, sorted, a line each.

    Paddle's launcher writes all of it; the launcher's own may hold secrets, and is no news.
    """
    news = sorted((name, value) for name, value in environment.items() if base.get(name) != value)
    return "".join(f"{name}={value}\n" for name, value in news)
