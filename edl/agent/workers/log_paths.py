"""Names of all log files and folders of a launcher. Pure: creates and opens nothing.

Each worker has its own folder for each round, as under torchrun: ``attempt_<round - 1>/<local rank>`` below the
launcher's folder. Folders are never used again, so nothing is overwritten: if a second process takes the same place in
the same round, or the same job is started again, a number is appended.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from string import Template

from edl.config import LogLayout
from edl.types import Round
from edl.wire.address import address
from edl.wire.records import World

LATEST = "latest"
"""Link in the launcher's folder to the newest round."""
REPORT = "error.json"
"""In the launcher's folder: the report on a failed job."""
HISTORY = "events.jsonl"
"""In the folder of the last Master's launcher: the job's history."""
PADDLE_FOLDER = "log"
"""Default log folder of Paddle's launcher."""
PREFIX_ALONE = "[${role_name}${rank}]:"
PREFIX_AMONG_NODES = "[${role_name}${rank}@${node}]:"
PREFIX_AHEAD = "[${node}/${local_rank}]:"
"""Console prefixes with ``--tee``: in a world of one node, in one of several, and of a worker that has no world yet.
torchrun's prefix is the first one, but with the local rank."""
UNKNOWN = "-"
"""Placeholder in a prefix for unknown values."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One worker's part in one round."""

    round: Round
    """The round; with ``ahead`` the round after which the worker was started, without a world."""
    local_rank: int
    rank: int = -1
    nodes: int = 1
    """Number of nodes in its world."""
    ahead: bool = False

    @property
    def folder(self) -> str:
        """Folder of all workers of this launcher in that round; torchrun counts from 0."""
        return f"attempt_{self.round}_ahead" if self.ahead else f"attempt_{self.round - 1}"


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """Paths of one worker in one round. ``root``: the launcher's folder; empty: there are no files."""

    root: str
    attempt: Attempt
    again: int = 1
    """Counts the processes at this place in this round, from 1."""
    layout: LogLayout = LogLayout.TORCHRUN
    servers: int = 0
    """Number of pservers, which have the first local ranks."""

    @property
    def of_server(self) -> bool:
        """Whether the worker is a pserver."""
        return self.attempt.local_rank < self.servers

    @property
    def folder(self) -> str:
        """Folder of this worker; empty for none."""
        number = "" if self.again == 1 else f".{self.again}"
        return f"{self.root}/{self.attempt.folder}/{self.attempt.local_rank}{number}" if self.root else ""

    @property
    def stdout(self) -> str:
        """Path of its stdout file."""
        return self._in_folder("stdout.log" if self.layout is LogLayout.TORCHRUN else "workerlog")

    @property
    def stderr(self) -> str:
        """Path of its stderr file; Paddle's launcher writes both streams to one file."""
        return self._in_folder("stderr.log" if self.layout is LogLayout.TORCHRUN else "workerlog")

    @property
    def error_file(self) -> str:
        """Path for the description of an uncaught exception (``TORCHELASTIC_ERROR_FILE``)."""
        return self._in_folder("error.json")

    @property
    def flight_recorder(self) -> str:
        """Path for the collectives that torch's flight recorder holds when the worker hangs."""
        return self._in_folder("flight-recorder.json")

    @property
    def environment(self) -> str:
        """Path of Paddle's ``envlog.N``."""
        return self._in_folder("envlog")

    @property
    def backup_environment(self) -> str:
        """Path of Paddle's ``backup_env.N.json``."""
        return self._in_folder("backup_env.json")

    def filtered(self, stream: str) -> str:
        """Path for the filtered lines of all workers of the round. ``stream``: stdout or stderr."""
        return f"{self.root}/{self.attempt.folder}/filtered_{stream}.log" if self.root else ""

    def links(self) -> dict[str, str]:
        """Paddle's file names in the requested folder, with the targets of the links."""
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
    """Folder name of a launch below ``--log-dir``: ``name``, or ``name.N`` with N one above the highest existing
    number.

    ``taken``: existing names, of earlier launches of the same job on the same node. Free lower numbers are not reused,
    so that the numbers show the order of the launches.
    """
    highest = max((number_of(name, folder) for folder in taken), default=0)
    return f"{name}.{highest + 1}" if highest else name


def number_of(name: str, folder: str) -> int:
    """The number of the launch with this folder, as assigned by ``launch_folder``; 0 for other folders."""
    if folder == name:
        return 1
    digits = folder.removeprefix(f"{name}.")
    return int(digits) if digits != folder and digits.isdecimal() and digits.isascii() else 0


def server_log(folder: str, index: int) -> str:
    """Paddle's file name for a pserver of this launcher; empty without a folder."""
    return f"{folder}/serverlog.{index}" if folder else ""


def pod_log(folder: str, job: str, node: str) -> str:
    """File in which Paddle's launcher lists the nodes of each round, named after job and pod."""
    return f"{folder}/{job}.{node}.log"


def peers(world: World) -> str:
    """A line of that file: the nodes by rank, as JSON."""
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
    """The console prefix of a line. ``template`` may contain torchrun's ``${role_name}``, ``${rank}``,
    ``${local_rank}`` and ``${hostname}``, and ``${node}`` and ``${round}``; other names are kept as they are. Empty
    selects the default."""
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
    """The lines that contain at least one of the texts."""
    return [line for line in lines if any(text in line for text in filters)]


def changed_environment(environment: Mapping[str, str], base: Mapping[str, str]) -> str:
    """Content of ``envlog.N``: the worker's variables that differ from the launcher's environment, sorted, one per
    line.

    Paddle's launcher writes all variables; the launcher's own may contain secrets.
    """
    changed = sorted((name, value) for name, value in environment.items() if base.get(name) != value)
    return "".join(f"{name}={value}\n" for name, value in changed)
