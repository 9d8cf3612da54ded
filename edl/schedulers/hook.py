"""Adapters that call or poll the user's own command, for schedulers without an adapter in edl.

``exec:COMMAND`` is called as

    COMMAND current                      prints a number, or {"nodes": 3, "there": 2, "detail": "…"}
    COMMAND request N REASON             provide N nodes
    COMMAND release N REASON NAME…       remove these nodes, so that N are left

``discovery:COMMAND`` is polled, as in Horovod: it prints a line ``HOST`` or ``HOST:SLOTS`` for each available host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from edl.errors import SchedulerError, SettingError, StoreError
from edl.job_records import SchedulerChoice
from edl.schedulers.commands import CommandFailed, call
from edl.schedulers.deps import SchedulerDeps, seconds
from edl.schedulers.port import Disruption, Observation, SchedulerSize, Sized

TIMEOUT_S = 30.0
POLL_S = 1.0
LEAST = {"timeout": 0.1, "poll": 0.01}
"""Smallest allowed values of these keys, in seconds."""
SHOWN = 300
"""Limit on the characters of the command's output in a message."""
SEEN = "discovery"
"""Name of the value in the store that lists the hosts, one a line."""
MOST_GONE = 200
"""Limit on the hosts in it that are no longer listed."""
FINAL = {64: "usage", 77: "no permission", 78: "configuration", 126: "not executable", 127: "not found"}
"""Exit statuses after which a retry is useless: those of sysexits.h, and those of a shell."""


def check(wanted: SchedulerChoice) -> None:
    """Check the settings and that the command exists. Raises ``SettingError``."""
    _words(wanted)
    for key, least in LEAST.items():
        seconds(wanted.conf, key, TIMEOUT_S, least)


def make(deps: SchedulerDeps) -> ExecScheduler | DiscoveryScheduler:
    """Create the adapter for one Master's term."""
    wanted = deps.wanted
    program = Program(
        tuple(_words(wanted)),
        {**deps.environment, "EDL_JOB_ID": deps.job, "EDL_MASTER_NODE": deps.node},
        seconds(wanted.conf, "timeout", TIMEOUT_S, LEAST["timeout"]),
    )
    if wanted.kind == "exec":
        return ExecScheduler(program, wanted.text)
    return DiscoveryScheduler(program, wanted.text, seconds(wanted.conf, "poll", POLL_S, LEAST["poll"]), deps)


def _words(wanted: SchedulerChoice) -> list[str]:
    try:
        words = shlex.split(wanted.target)
    except ValueError as error:
        raise SettingError("--scheduler", wanted.text, f"cannot be split into words: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise SettingError(
            *("--scheduler", wanted.text, f"no such program on the PATH, or not executable: {(words or [''])[0]!r}"),
            "Install it on all nodes: the node of the elected Master runs it, and that may be any node",
        )
    return words


@dataclass(frozen=True, slots=True)
class Program:
    """A command that is run repeatedly."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    timeout_s: float

    async def run(self, *arguments: str) -> str:
        """Run the command with these arguments; returns its standard output. Raises ``SchedulerError``."""
        try:
            return await call([*self.words, *arguments], self.timeout_s, environment=self.environment)
        except CommandFailed as error:
            raise SchedulerError(
                f"{error}" + (f" ({' '.join(arguments[:2])})" if arguments else ""), retry=error.status not in FINAL
            ) from error


class ExecScheduler:
    """Implements ``port.Scheduler`` by calling the user's command for each operation."""

    indexed = False
    ask_none_at_end = False

    def __init__(self, program: Program, name: str) -> None:
        self._program = program
        self.name = name

    async def current(self) -> SchedulerSize:
        """The size that the command prints. Raises ``SchedulerError``."""
        return read_size(await self._program.run("current"), self.name)

    async def request(self, nodes: int, reason: str) -> None:
        """Call the command to provide ``nodes`` nodes. Raises ``SchedulerError``."""
        await self._program.run("request", str(nodes), reason)

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Call the command to remove these nodes. Raises ``SchedulerError``."""
        await self._program.run("release", str(nodes), reason, *names)

    async def watch(self) -> AsyncIterator[Observation]:
        """Yields nothing, since the command cannot report changes by itself."""
        return
        yield  # makes this function a generator

    async def close(self) -> None:
        """Does nothing: no connection is open."""


def read_size(text: str, name: str) -> SchedulerSize:
    """Parse ``3`` or ``{"nodes": 3, "there": 2, "detail": "…"}``. ``name``: of the scheduler, for errors. Raises
    ``SchedulerError``."""
    try:
        answer = json.loads(text)
        answer = {"nodes": answer} if isinstance(answer, int) else answer
        nodes, there = answer["nodes"], answer.get("there", -1)
        if type(nodes) is not int or type(there) is not int or nodes < 0:
            raise ValueError
        return SchedulerSize(nodes, there, str(answer.get("detail", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        shown = text.strip()[:SHOWN]
        raise SchedulerError(
            f'{name} current: printed {shown!r}, which is neither a number nor JSON such as {{"nodes": 3}}', retry=True
        ) from None


class DiscoveryScheduler:
    """Implements ``port.Scheduler`` for a command that lists hosts. It cannot be asked for nodes."""

    indexed = False
    ask_none_at_end = False

    def __init__(self, program: Program, name: str, poll_s: float, deps: SchedulerDeps) -> None:
        self._program = program
        self._poll_s = poll_s
        self._log = deps.log
        self._memory = deps.memory
        self.name = name

    async def current(self) -> SchedulerSize:
        """The number of hosts listed. Raises ``SchedulerError``."""
        return SchedulerSize(len(await self._hosts()))

    async def request(self, nodes: int, reason: str) -> None:
        """Always raises ``SchedulerError``, since the command only lists hosts."""
        raise SchedulerError(f"{self.name} only lists hosts and cannot provide nodes", retry=False)

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Always raises ``SchedulerError``, like ``request``."""
        await self.request(nodes, reason)

    async def watch(self) -> AsyncIterator[Observation]:
        """Polls the command. Each host that is no longer listed yields a ``Disruption``, at the first poll also each
        one that an earlier Master has seen on the list; while the command fails, the last list is kept."""
        before: tuple[str, ...] | None = None
        failing = False
        while True:
            try:
                hosts = await self._hosts()
            except SchedulerError as error:
                if not failing:
                    self._log(f"{error} (keeping the last list of hosts; polling continues)")
                failing = True
            else:
                failing = False
                seen = self._seen()
                for host in seen if before is None else before:
                    if host not in hosts:
                        yield Disruption(host, f"{self.name} no longer lists {host}")
                if before is None or len(before) != len(hosts):
                    yield Sized(SchedulerSize(len(hosts)))
                await self._remember(hosts, (*seen, *(before or ())))
                before = hosts
            await asyncio.sleep(self._poll_s)

    async def close(self) -> None:
        """Does nothing: no connection is open."""

    def _seen(self) -> tuple[str, ...]:
        """All hosts that were listed when a Master of this job last stored them, and those before it."""
        return tuple(filter(None, self._memory.kept(SEEN).split("\n")))

    async def _remember(self, hosts: Sequence[str], before: Sequence[str]) -> None:
        """Store which hosts are listed, and which ones were: the next Master may have to drain their nodes."""
        gone = [host for host in dict.fromkeys(before) if host not in hosts]
        text = "\n".join((*gone[-MOST_GONE:], *sorted(hosts)))
        if text != self._memory.kept(SEEN):
            with contextlib.suppress(StoreError):  # tried again at the next poll
                await self._memory.keep(SEEN, text)

    async def _hosts(self) -> tuple[str, ...]:
        return read_hosts(await self._program.run(), self.name)


def read_hosts(text: str, name: str) -> tuple[str, ...]:
    """Parse one ``host`` or ``host:slots`` per line; hosts with 0 slots are left out. Raises ``SchedulerError``, also
    if no host is left."""
    hosts: list[str] = []
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d+))?", line)
        if match is None:
            raise SchedulerError(f"{name}: printed {line[:SHOWN]!r}, which is not HOST or HOST:SLOTS", retry=True)
        host = match[1].strip("[]")
        if host not in hosts and match[2] != "0":
            hosts.append(host)
    if not hosts:  # more likely a bug in the command than the loss of all hosts
        raise SchedulerError(f"{name}: printed no host", retry=True)
    return tuple(hosts)
