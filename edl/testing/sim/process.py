"""A simulated process with its clock and event loop, and the state that the processes of a world share."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from edl.config import JobSpec
from edl.testing.sim.alarming import SimWatchdogs
from edl.testing.sim.checks import Checks
from edl.testing.sim.loop import SimLoop
from edl.testing.sim.memory_checkpoints import StateNet
from edl.testing.sim.network import Network
from edl.testing.sim.plugins import Plugin
from edl.testing.sim.store import SimStore
from edl.testing.sim.timeline import ScheduledCall, Timeline
from edl.testing.sim.workers import Job
from edl.wire.keys import JobKeys

MOST_REQUESTS = 100


@dataclass(slots=True)
class SimDeps:
    """What all processes of a world share."""

    spec: JobSpec
    timeline: Timeline
    rng: random.Random
    network: Network
    store: SimStore
    training: Job
    checks: Checks
    states: StateNet
    listening: dict[tuple[str, int], SimProcess] = field(default_factory=dict)
    """Living processes by address."""
    kill_on_write: bool = False
    """Whether the next Master to write its record is killed before it sends anything."""
    kill_on_hold: bool = False
    """Whether the next Master to hold its workers is killed before it receives the answers."""
    kill_on_switch: bool = False
    """Whether the next Master to record a change at an agreed boundary is killed before it tells the workers."""
    trace: Callable[[str], None] | None = None
    plugin: Plugin = field(default_factory=Plugin)
    watchdogs: SimWatchdogs | None = None
    healed: bool = False
    """Whether all faults have been undone."""

    @property
    def keys(self) -> JobKeys:
        """The job's keys in the store."""
        return JobKeys(self.spec.job)

    def fail(self, text: str) -> None:
        """Report a violated invariant and raise it."""
        self.checks.fail(text)

    def note(self, text: str) -> None:
        """Report a violation without raising it."""
        self.checks.note(text)


class BareDeps(Protocol):
    """What the processes of any world share."""

    @property
    def timeline(self) -> Timeline:
        """The virtual time that all simulated processes share."""
        ...

    @property
    def rng(self) -> random.Random:
        """The seeded random generator that all draws of a run share."""
        ...

    @property
    def network(self) -> Network:
        """Paths between the hosts."""
        ...

    def fail(self, text: str) -> None:
        """Report a violation, raise it and stop the simulated time."""
        ...

    def note(self, text: str) -> None:
        """Report a violation without raising it."""
        ...


Deps = TypeVar("Deps", bound=BareDeps)


class BareProcess(Generic[Deps]):
    """A process. Runs nothing while it is stopped, and never again once it is dead."""

    def __init__(self, deps: Deps, host: str) -> None:
        self.deps = deps
        self.host = host
        self.alive = True
        self.paused_s = 0.0
        """When it was last stopped."""
        self._clock_offset_s = deps.rng.uniform(0.0, 1e5)
        drift = deps.network.biases.drift
        self._clock_rate = 1.0 + (deps.rng.uniform(-drift, drift) if drift else 0.0)
        self._requests: deque[float] = deque()
        self.loop = SimLoop(deps.timeline, deps.rng, self._clock_offset_s, self._loop_failed, self._clock_rate)

    def now_s(self) -> float:
        """Seconds on this host's own clock."""
        return self.deps.timeline.now_s * self._clock_rate + self._clock_offset_s

    @property
    def paused(self) -> bool:
        """Whether it is stopped by SIGSTOP."""
        return self.loop.stopped

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Call soon; once the process continues if it is stopped; never if it is dead."""
        self.loop.call_soon(call, *args)

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> ScheduledCall:
        """Call after ``delay_s`` seconds, subject to the rules of ``run``."""
        return self.deps.timeline.after(delay_s, self.run, call, *args)

    def asks(self) -> None:
        """Count a request to another process or the store. More than ``MOST_REQUESTS`` in a second are a violation."""
        now_s, requests = self.deps.timeline.now_s, self._requests
        requests.append(now_s)
        while requests[0] < now_s - 1.0:
            requests.popleft()
        if len(requests) > MOST_REQUESTS:
            self.deps.fail(f"{self.host} makes more than {MOST_REQUESTS} requests in a second")

    def pause(self) -> None:
        """Stop the process as SIGSTOP does. Its sockets stay open."""
        self.paused_s = self.deps.timeline.now_s
        self.loop.stop_process()
        self.deps.network.tell()

    def resume(self) -> None:
        """Continue as SIGCONT does. The process is not notified of the gap."""
        if self.paused:
            self.loop.continue_process()
            self.deps.network.tell()

    def end(self) -> None:
        """The process ends: it runs nothing any more."""
        self.alive = False
        self.loop.kill()
        self.loop.stopped = False
        self.deps.network.tell()

    def _loop_failed(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.deps.note(f"{self.host}: {context.get('message')}: {error!r}")


class SimProcess(BareProcess[SimDeps]):
    """A process of the simulated job, with an address."""

    def __init__(self, deps: SimDeps, host: str, port: int) -> None:
        super().__init__(deps, host)
        self.port = port
        deps.listening[host, port] = self

    def end(self) -> None:
        """The process ends and no longer listens."""
        if self.deps.listening.get((self.host, self.port)) is self:
            del self.deps.listening[self.host, self.port]
        super().end()

    def say(self, text: str) -> None:
        """Add a line to the trace, if there is one."""
        if self.deps.trace is not None:
            self.deps.trace(f"{self.host:>8}  {text}")
