"""Schedulers that edl does not know: a command of the user's, asked or polled.

``exec:COMMAND`` is called as

    COMMAND current                      prints a number, or {"nodes": 3, "there": 2, "detail": "…"}
    COMMAND request N REASON             have N nodes
    COMMAND release N REASON NAME…       take these away, so that N are left

``discovery:COMMAND`` is polled, as by Horovod: it prints a line ``HOST`` or ``HOST:SLOTS`` for each host there is.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from edl.errors import SchedulerError, SettingError
from edl.job_records import SchedulerChoice
from edl.schedulers.commands import CommandFailed, call
from edl.schedulers.order import Order, seconds
from edl.schedulers.port import Doomed, Observation, Size, Sized

TIMEOUT_S = 30.0
POLL_S = 1.0
LEAST = {"timeout": 0.1, "poll": 0.01}
"""Seconds."""
SHOWN = 300
"""Characters of it in a message."""
FINAL = {64: "usage", 77: "no permission", 78: "configuration", 126: "not executable", 127: "not found"}
"""Exit statuses after which trying again is of no use (sysexits.h, and those of a shell)."""


def check(wanted: SchedulerChoice) -> None:
    """The command is there. Raises ``SettingError``."""
    _words(wanted)
    for key, least in LEAST.items():
        seconds(wanted.conf, key, TIMEOUT_S, least)


def make(order: Order) -> ExecScheduler | DiscoveryScheduler:
    """For one rule."""
    wanted = order.wanted
    program = Program(
        tuple(_words(wanted)),
        {**order.environment, "EDL_JOB_ID": order.job, "EDL_NODE_ID": order.node},
        seconds(wanted.conf, "timeout", TIMEOUT_S, LEAST["timeout"]),
    )
    if wanted.kind == "exec":
        return ExecScheduler(program, wanted.text)
    return DiscoveryScheduler(program, wanted.text, seconds(wanted.conf, "poll", POLL_S, LEAST["poll"]), order)


def _words(wanted: SchedulerChoice) -> list[str]:
    try:
        words = shlex.split(wanted.target)
    except ValueError as error:
        raise SettingError("--scheduler", wanted.text, f"cannot be split into words: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise SettingError(
            *("--scheduler", wanted.text, f"no such program on the PATH, or not executable: {(words or [''])[0]!r}"),
            "It is called on the node that rules, which may be any: have it on all of them",
        )
    return words


@dataclass(frozen=True, slots=True)
class Program:
    """A command that is run again and again."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    timeout_s: float

    async def run(self, *arguments: str) -> str:
        """What it prints. Raises ``SchedulerError``."""
        try:
            return await call([*self.words, *arguments], self.timeout_s, environment=self.environment)
        except CommandFailed as error:
            raise SchedulerError(
                f"{error}" + (f" ({' '.join(arguments[:2])})" if arguments else ""), retry=error.status not in FINAL
            ) from error


class ExecScheduler:
    """See ``port.Scheduler``."""

    indexed = False
    ask_none_at_end = False

    def __init__(self, program: Program, name: str) -> None:
        self._program = program
        self.name = name

    async def current(self) -> Size:
        """What the command says. Raises ``SchedulerError``."""
        return read_size(await self._program.run("current"), self.name)

    async def request(self, nodes: int, reason: str) -> None:
        """Have it see to it. Raises ``SchedulerError``."""
        await self._program.run("request", str(nodes), reason)

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Have it take these away. Raises ``SchedulerError``."""
        await self._program.run("release", str(nodes), reason, *names)

    async def watch(self) -> AsyncIterator[Observation]:
        """It cannot tell."""
        return
        yield  # an iterator without elements

    async def close(self) -> None:
        """Nothing is held."""


def read_size(text: str, name: str) -> Size:
    """``3`` or ``{"nodes": 3}``. Raises ``SchedulerError``."""
    try:
        told = json.loads(text)
        told = {"nodes": told} if isinstance(told, int) else told
        nodes, there = told["nodes"], told.get("there", -1)
        if type(nodes) is not int or type(there) is not int or nodes < 0:
            raise ValueError
        return Size(nodes, there, str(told.get("detail", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        shown = text.strip()[:SHOWN]
        raise SchedulerError(
            f"{name} current: printed {shown!r}, which is neither a number nor JSON with nodes", retry=True
        ) from None


class DiscoveryScheduler:
    """See ``port.Scheduler``. It cannot be asked for anything."""

    indexed = False
    ask_none_at_end = False

    def __init__(self, program: Program, name: str, poll_s: float, order: Order) -> None:
        self._program = program
        self._poll_s = poll_s
        self._log = order.log
        self.name = name

    async def current(self) -> Size:
        """As many as there are hosts. Raises ``SchedulerError``."""
        return Size(len(await self._hosts()))

    async def request(self, nodes: int, reason: str) -> None:
        """Raises ``SchedulerError``."""
        raise SchedulerError(f"{self.name} only tells which hosts there are", retry=False)

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Raises ``SchedulerError``."""
        await self.request(nodes, reason)

    async def watch(self) -> AsyncIterator[Observation]:
        """Polls. Hosts that are no longer named are doomed; while the command fails, those of before are there."""
        before: tuple[str, ...] | None = None
        failing = False
        while True:
            try:
                hosts = await self._hosts()
            except SchedulerError as error:
                if not failing:
                    self._log(f"{error} (the hosts of before are kept, polling goes on)")
                failing = True
            else:
                failing = False
                for host in before or ():
                    if host not in hosts:
                        yield Doomed(host, f"{self.name} does not name {host} any more")
                if before is None or len(before) != len(hosts):
                    yield Sized(Size(len(hosts)))
                before = hosts
            await asyncio.sleep(self._poll_s)

    async def close(self) -> None:
        """Nothing is held."""

    async def _hosts(self) -> tuple[str, ...]:
        return read_hosts(await self._program.run(), self.name)


def read_hosts(text: str, name: str) -> tuple[str, ...]:
    """``host`` or ``host:slots`` in each line; hosts without slots are not there. Raises ``SchedulerError``."""
    hosts: list[str] = []
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d+))?", line)
        if match is None:
            raise SchedulerError(f"{name}: printed {line[:SHOWN]!r}, which is no HOST or HOST:SLOTS", retry=True)
        host = match[1].strip("[]")
        if host not in hosts and match[2] != "0":
            hosts.append(host)
    if not hosts:  # rather a flaw of the command than the end of all hosts
        raise SchedulerError(f"{name}: printed no host", retry=True)
    return tuple(hosts)
