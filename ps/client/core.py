"""State shared by the reading and the writing half of a client: session, connections, options, counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from edl.errors import PsError, SettingError
from edl.job_records import Mode
from ps.client.fanout import ClockSeen, FanOut, PserverRequest
from ps.client.master_session import FixedMasterSession, LiveMasterSession
from ps.client.pool import ConnectionPool
from ps.client.pull_bases import PullBases
from ps.client.routing import RoutingTable, SubRequest
from ps.protocol import half_precision
from ps.spec import TableSpec
from ps.wait import BoundedWait

PULL, PUSH, AHEAD, INTENT = "pull", "push", "ahead", "intent"
"""Purposes; each has its own connection to each pserver."""
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options that a trainer's script may set for its client."""

    deadline_s: float = DEADLINE_S
    """Seconds without any progress after which a call fails. Time spent waiting for other trainers does not count."""
    wire: str = "f4"
    """Number format of rows and gradients on the network: ``f4``, ``f2`` (half precision) or ``bf16``."""
    cache_rows: int = 0
    """Size of the cache per table, in rows; 0: no cache. The pservers do not count rows served from it."""
    cache_steps: int = 0
    """Most steps that a cached row may be old. A row written by this trainer is fetched again."""

    def __post_init__(self) -> None:
        half_precision.accept(self.wire)
        if not self.deadline_s > 0:
            raise SettingError("deadline_s", self.deadline_s, "must be more than 0")
        for name in ("cache_rows", "cache_steps"):
            if not 0 <= getattr(self, name) <= 1 << 27:
                raise SettingError(name, getattr(self, name), f"must be from 0 to {1 << 27}")


@dataclass
class Tally:
    """Counters since the client was created."""

    pulls: int = 0
    """Tables pulled; a pull of several tables counts each."""
    pushes: int = 0
    keys: int = 0
    """Keys requested by the script."""
    distinct: int = 0
    """Of these, after removing duplicates within a batch."""
    fetched: int = 0
    """Of these, requested from pservers."""
    cached: int = 0
    """Of these, found in the cache."""
    prefetched: int = 0
    """Keys whose rows had been prefetched."""
    again: int = 0
    """Keys pushed that had already been applied, because an acknowledgement was lost."""
    damaged: int = 0
    """Gradient rows or values that pservers skipped or clipped."""
    checkpoints: int = 0
    """Stops for a checkpoint."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        """Add to some counters. Thread-safe."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def shown(self) -> dict[str, int]:
        """The counters by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "lock"}


@dataclass
class Core:
    """State shared by the parts of one client."""

    session: LiveMasterSession | FixedMasterSession
    pool: ConnectionPool
    options: ClientOptions
    tally: Tally = field(default_factory=Tally)
    step: int = 0
    """Number of completed steps."""
    bases: PullBases = field(default_factory=PullBases)
    clock: ClockSeen = field(default_factory=ClockSeen)
    stand: Callable[[], None] = lambda: None
    """Stops this trainer for a checkpoint; called on a thread of the script's."""

    @property
    def mode(self) -> Mode:
        """How the job's trainers synchronise: ``sync``, ``async`` or ``geo``."""
        return self.session.joined.training.mode

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """The job's tables by name."""
        return {one.name: one for one in self.session.joined.tables}

    def spec(self, table: str) -> TableSpec:
        """The definition of a table. Raises ``PsError`` if there is no such table."""
        for one in self.session.joined.tables:
            if one.name == table:
                return one
        known = ", ".join(sorted(self.tables)) or "none"
        raise PsError(f"there is no table {table!r}; the defined tables are: {known}. Define it before use")

    def fan_out(
        self,
        request: PserverRequest,
        sub_requests: Sequence[SubRequest],
        route: RoutingTable,
        purpose: str,
        what: str,
        *,
        stands: bool,
    ) -> None:
        """Send a request to pservers and wait for all answers. ``stands``: this trainer may stop for a checkpoint
        meanwhile."""
        wait = BoundedWait(f"{what} (step {self.step})", deadline_s=self.options.deadline_s)
        stand = self.stand if stands else None
        FanOut(self.pool, self.session, request, purpose, wait, stand, self.clock).run(sub_requests, route)
