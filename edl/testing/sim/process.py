"""A process of the simulated world: its clock, its scheduling, and its way to the store."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edl.config import JobSpec
from edl.errors import StoreError, StoreUnavailable
from edl.testing.sim.checks import Checks
from edl.testing.sim.keepers import StateNet
from edl.testing.sim.network import STORE, Network
from edl.testing.sim.store import SimStore, StoreChange, Watch
from edl.testing.sim.timeline import ScheduledCall, Timeline
from edl.testing.sim.workers import Job

T = TypeVar("T")

MASTER_KEY, RECORD_KEY, SCALE_KEY, NODES, FAREWELL_KEY = "master", "record", "scale", "nodes/", "farewell"


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
    """The next Master to have written its record dies before it sends anything."""
    kill_on_hold: bool = False
    """The next Master to ask workers to hold dies before it hears the answers."""
    kill_on_switch: bool = False
    """The next Master to have recorded that an agreed boundary changes the world dies before it tells."""
    trace: Callable[[str], None] | None = None


class SimProcess:
    """Runs nothing while paused, and never again once dead."""

    def __init__(self, deps: SimDeps, host: str, port: int) -> None:
        self.deps = deps
        self.host = host
        self.port = port
        self.alive = True
        self.paused = False
        self._clock_offset_s = deps.rng.uniform(0.0, 1e5)
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._watches: list[Watch] = []
        deps.listening[host, port] = self

    @property
    def now_s(self) -> float:
        """This host's own clock."""
        return self.deps.timeline.now_s + self._clock_offset_s

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Call now, or when the process goes on, or never when it is dead."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((call, args))
        else:
            call(*args)

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> ScheduledCall:
        """Call later, on this process's own terms."""
        return self.deps.timeline.after(delay_s, self.run, call, *args)

    def at_local(self, at_s: float, call: Callable[..., None], *args: Any) -> ScheduledCall:
        """Call at a moment of this host's clock."""
        return self.deps.timeline.at(at_s - self._clock_offset_s, self.run, call, *args)

    def pause(self) -> None:
        """SIGSTOP: the process does nothing; its sockets stay open."""
        self.paused = True
        self.deps.network.tell()

    def resume(self) -> None:
        """SIGCONT: what came meanwhile is worked off, in order, by a process that knows nothing of the gap."""
        if not self.paused:
            return
        self.paused = False
        backlog, self._backlog = self._backlog, deque()
        for call, args in backlog:
            self.run(call, *args)
        self.deps.network.tell()

    def end(self) -> None:
        """The process is gone."""
        self.alive = False
        self.paused = False
        self._watches.clear()
        if self.deps.listening.get((self.host, self.port)) is self:
            del self.deps.listening[self.host, self.port]
        self.deps.network.tell()

    def say(self, text: str) -> None:
        """One line of the trace, when somebody wants it."""
        if self.deps.trace is not None:
            self.deps.trace(f"{self.host:>8}  {text}")

    # --- the store ---------------------------------------------------------------------------------------------------

    def ask(self, do: Callable[[SimStore], T], done: Callable[[T], None], failed: Callable[[StoreError], None]) -> None:
        """Have the store do something. When no answer comes, it may have happened all the same."""
        self.deps.timeline.after(self.deps.network.delay_s(), self._request_arrives, do, done, failed)

    def _request_arrives(
        self, do: Callable[[SimStore], T], done: Callable[[T], None], failed: Callable[[StoreError], None]
    ) -> None:
        deps = self.deps
        if deps.store.away or not deps.network.open(self.host, STORE):
            self._unanswered(failed)
            return
        try:
            answer = do(deps.store)
        except StoreError as error:
            deps.timeline.after(deps.network.delay_s(), self._answer_arrives, failed, error, failed)
            return
        deps.timeline.after(deps.network.delay_s(), self._answer_arrives, done, answer, failed)

    def _answer_arrives(self, call: Callable[..., None], answer: Any, failed: Callable[[StoreError], None]) -> None:
        if self.deps.network.open(STORE, self.host):
            self.run(call, answer)
        else:
            self._unanswered(failed)

    def _unanswered(self, failed: Callable[[StoreError], None]) -> None:
        self.after(self.deps.rng.uniform(0.1, 0.6), failed, StoreUnavailable("no answer"))

    # --- watches -----------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, position: int, show: Callable[[StoreChange], None]) -> Watch:
        """Follow a prefix from a place in the history on."""
        watch = Watch(prefix, position, show)
        self._watches.append(watch)
        self.look_at_store()
        return watch

    def look_at_store(self) -> None:
        """There may be news for the watches, or a way for old news."""
        store = self.deps.store
        if not self.alive or store.away or not self.deps.network.both(STORE, self.host):
            return
        for watch in self._watches:
            if watch.position < len(store.history) and not watch.under_way and not watch.closed:
                watch.under_way = True
                delay_s = self.deps.network.delay_s()
                if self.deps.rng.random() < 0.03:
                    delay_s += self.deps.rng.uniform(0.02, 0.5)
                self.deps.timeline.after(delay_s, self._news_arrive, watch)

    def _news_arrive(self, watch: Watch) -> None:
        watch.under_way = False
        store = self.deps.store
        if store.away or not self.deps.network.open(STORE, self.host):
            return
        news = store.history[watch.position :]
        watch.position = len(store.history)
        for change in news:
            if change.key.startswith(watch.prefix):
                self.run(self._show, watch, change)

    @staticmethod
    def _show(watch: Watch, change: StoreChange) -> None:
        if not watch.closed:
            watch.show(change)
