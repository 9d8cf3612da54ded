"""What reading and writing of a client share: whom it knows, how it goes about it, what it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from edl.errors import PsError, SettingError
from edl.job_records import Mode
from ps.client.fanout import FanOut, PserverRequest
from ps.client.master_session import FixedMasterSession, LiveMasterSession
from ps.client.pool import ConnectionPool
from ps.client.routing import Route, SubRequest
from ps.protocol import half_precision
from ps.spec import TableSpec
from ps.wait import BoundedWait

PULL, PUSH, AHEAD, INTENT = "pull", "push", "ahead", "intent"
"""A connection to each pserver for each of these."""
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """How a client goes about it."""

    deadline_s: float = DEADLINE_S
    """A call fails after so long without any progress. Other trainers may take as long as they want."""
    wire: str = "f4"
    """How rows and gradients travel: ``f4``, ``f2`` (half precision), ``bf16``."""
    cache_rows: int = 0
    """Rows kept for later pulls, for each table; 0: none. Those served from here are not counted by pservers."""
    cache_steps: int = 0
    """Such a row is at most so many steps old. One that this trainer has written is fetched anew."""

    def __post_init__(self) -> None:
        half_precision.accept(self.wire)
        if not self.deadline_s > 0:
            raise SettingError("deadline_s", self.deadline_s, "must be more than 0")
        for name in ("cache_rows", "cache_steps"):
            if not 0 <= getattr(self, name) <= 1 << 27:
                raise SettingError(name, getattr(self, name), f"must be from 0 to {1 << 27}")


@dataclass
class Tally:
    """Counts since the beginning."""

    pulls: int = 0
    """Tables pulled, one by one."""
    pushes: int = 0
    keys: int = 0
    """Asked for by the script."""
    distinct: int = 0
    """Of these, duplicates of a batch taken together."""
    fetched: int = 0
    """Of these, asked of pservers."""
    cached: int = 0
    """Of these, found in the cache."""
    prefetched: int = 0
    """Keys whose rows had been fetched ahead."""
    again: int = 0
    """Keys pushed that had been applied before: their acknowledgement was lost."""
    damaged: int = 0
    """Rows or values of gradients that pservers skipped or clipped."""
    cuts: int = 0
    """Stops for a checkpoint."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        """Any thread."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def shown(self) -> dict[str, int]:
        """By name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "lock"}


@dataclass
class Core:
    """One a client."""

    session: LiveMasterSession | FixedMasterSession
    pool: ConnectionPool
    options: Options
    tally: Tally = field(default_factory=Tally)
    step: int = 0
    """Steps that have ended."""
    applied: dict[int, int] = field(default_factory=dict)
    """By pserver: pushes applied there when it was last pulled from."""
    stand: Callable[[], None] = lambda: None
    """Stops this trainer for a cut, on a thread of the script's."""

    @property
    def mode(self) -> Mode:
        """How trainers go together."""
        return self.session.joined.training.mode

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """As the job knows them."""
        return {one.name: one for one in self.session.joined.tables}

    def spec(self, table: str) -> TableSpec:
        """Raises ``PsError`` when there is no such table."""
        for one in self.session.joined.tables:
            if one.name == table:
                return one
        known = ", ".join(sorted(self.tables)) or "none"
        raise PsError(f"there is no table {table!r}; those defined are: {known}. Define it before it is used")

    def fan_out(
        self,
        request: PserverRequest,
        sub_requests: Sequence[SubRequest],
        route: Route,
        purpose: str,
        what: str,
        *,
        stands: bool,
    ) -> None:
        """Have something done. ``stands``: this trainer may be stopped for a cut meanwhile."""
        patience = BoundedWait(f"{what} (step {self.step})", deadline_s=self.options.deadline_s)
        stand = self.stand if stands else None
        FanOut(self.pool, self.session, request, purpose, patience, stand).run(sub_requests, route)
