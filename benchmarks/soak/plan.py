"""Decides which fault comes next, and when it is undone: only one that every job in its way is promised to survive.

Pure: no clock, no I/O, and no randomness but that of the seed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.soak.faults import FAULTS, Fault, Need, Target

NEVER_S = -math.inf
MOST_AT_ONCE = 2
"""Faults on one job that are not over yet."""
TRIES = 8
"""Victims that are drawn for one kind of fault before another kind has its turn."""


@dataclass(frozen=True, slots=True)
class JobView:
    """What can be seen of a job. Times are in seconds on the clock of the course; ``NEVER_S``: not yet."""

    name: str
    trainers: tuple[str, ...]
    """Nodes with a worker."""
    pservers: tuple[str, ...] = ()
    """Nodes with a pserver."""
    members: tuple[str, ...] = ()
    """Nodes with a member of the store."""
    spared: str = ""
    """Its launcher is never killed, so that one process lives as long as the job, and any leak in it shows."""
    clock: str = ""
    """The node with a clock of its own."""
    master: str = ""
    """The Master's node; empty while it is unknown."""
    allowed: frozenset[Need] = frozenset()
    whole_at_s: float = NEVER_S
    """When all its nodes were last seen training together."""
    store_whole: bool = False
    copied_at_s: float = NEVER_S
    """When there was last a second copy of everything: replicas of all rows, a complete checkpoint of sharded state. A
    job that has the same state everywhere is always copied."""
    ending: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.trainers, *self.pservers)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault on one target. ``node`` is empty for the disk and the machine. ``strength``: from 0 to 1."""

    number: int
    fault: str
    job: str
    node: str
    begin_s: float
    end_s: float
    strength: float

    @property
    def kind(self) -> Fault:
        return FAULTS[self.fault]


@dataclass(frozen=True, slots=True)
class Begin:
    """Inject a fault now."""

    strike: Strike


@dataclass(frozen=True, slots=True)
class End:
    """Undo a fault now."""

    strike: Strike


Order = Begin | End
Rule = Callable[[Fault, str, JobView, Sequence[Strike]], bool]


def _no_majority(fault: Fault, node: str, view: JobView, open_: Sequence[Strike]) -> bool:
    takes = fault.takes_member and node in view.members
    gone = {one.node for one in open_ if one.kind.takes_member and one.node in view.members} | {node}
    return takes and (not view.store_whole or 2 * (len(view.members) - len(gone)) <= len(view.members))


def _no_copy(fault: Fault, node: str, view: JobView, open_: Sequence[Strike]) -> bool:
    """Losing a node that holds state needs a copy that is newer than every fault that may have cost one."""
    holds = view.pservers or view.trainers
    takes = node in holds and (fault.takes_rows if view.pservers else fault.takes_node)
    costs = [one for one in open_ if one.kind.target is Target.DISK or (one.kind.takes_rows and one.node in holds)]
    return takes and (view.copied_at_s == NEVER_S or bool(costs))


def _nobody_left(fault: Fault, node: str, view: JobView, open_: Sequence[Strike]) -> bool:
    group = view.pservers if node in view.pservers else view.trainers
    away = {one.node for one in open_ if one.kind.takes_node} | {node}
    return (fault.takes_node or fault.target is Target.PSERVER) and away >= set(group)


def _under_fault(fault: Fault, node: str, view: JobView, open_: Sequence[Strike]) -> bool:
    return any(one.node == node and (node or one.kind.target is fault.target) for one in open_)


RULES: tuple[tuple[str, Rule], ...] = (
    ("the job does not train yet", lambda fault, node, view, open_: view.whole_at_s == NEVER_S),
    ("the job is ending", lambda fault, node, view, open_: view.ending),
    ("the machine does not allow it", lambda fault, node, view, open_: fault.needs not in {None, *view.allowed}),
    ("enough happens to this job", lambda fault, node, view, open_: len(open_) >= MOST_AT_ONCE),
    ("the target is under a fault", _under_fault),
    ("the launcher is spared", lambda fault, node, view, open_: fault.takes_process and node == view.spared),
    ("the store would lose its majority", _no_majority),
    (
        "a second node would be away",
        lambda f, node, view, open_: f.takes_node and any(o.kind.takes_node for o in open_),
    ),
    ("nobody would be left", _nobody_left),
    ("state would be lost with its last copy", _no_copy),
)
"""Why a fault may not happen now. The first that holds is the reason."""


def refusal(fault: Fault, node: str, view: JobView, open_: Sequence[Strike]) -> str:
    """Why this fault may not strike this node of this job now; empty if it may. ``open_``: faults on this job that are
    not undone, or after which it has not been whole yet."""
    return next((reason for reason, holds in RULES if holds(fault, node, view, open_)), "")


def targets(fault: Fault, view: JobView) -> tuple[str, ...]:
    """Nodes of a job that a fault can strike."""
    by_target = {
        Target.WORKER: view.trainers,
        Target.NODE: view.nodes,
        Target.MASTER: (view.master,) if view.master in view.nodes else (),
        Target.MEMBER: view.members,
        Target.PSERVER: view.pservers,
        Target.CLOCK: (view.clock,) if view.clock else (),
        Target.DISK: ("",),
        Target.MACHINE: ("",),
    }
    return by_target[fault.target]


@dataclass(slots=True)
class Course:
    """The course of the faults. ``step`` says what to do now; call it often."""

    seed: int
    faults: tuple[str, ...]
    every_s: float
    """Mean time between two faults."""
    open: list[Strike] = field(default_factory=list, kw_only=True)
    """Faults that are not undone, or after which the job has not been whole yet."""
    undone: set[int] = field(default_factory=set)
    """Numbers of those that are undone."""
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By fault and reason, for a report of faults that never came."""
    _draw: random.Random = field(init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _kinds: list[str] = field(default_factory=list)
    _next_s: float = NEVER_S

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def step(self, now_s: float, views: Mapping[str, JobView]) -> list[Order]:
        """Advance to a time. Faults that are over come first, then at most one new one."""
        orders: list[Order] = [End(one) for one in self.open if self._is_due(one, now_s)]
        self.undone.update(order.strike.number for order in orders)
        self.open = [one for one in self.open if not self._is_over(one, views)]
        if now_s >= self._next_s:
            strike = self._another(now_s, views)
            if strike is not None:
                self.open.append(strike)
                self.counts[strike.fault] += 1
                self._next_s = now_s + self.every_s * self._draw.uniform(0.5, 1.5)
                orders.append(Begin(strike))
        return orders

    def on(self, job: str) -> list[Strike]:
        """Faults on a job that are not over."""
        return [one for one in self.open if one.job == job]

    def pending(self, job: str) -> bool:
        """Whether a fault on a job is still to be undone."""
        return any(one.number not in self.undone for one in self.on(job))

    def drop(self, job: str) -> list[End]:
        """Forget a job that has ended. Returns what is to be undone still."""
        ends = [End(one) for one in self.on(job) if one.number not in self.undone]
        self.open = [one for one in self.open if one.job != job]
        return ends

    def withdraw(self, strike: Strike) -> None:
        """A fault could not be injected after all, because its target had just gone."""
        self.open.remove(strike)
        self.counts[strike.fault] -= 1

    def _is_due(self, strike: Strike, now_s: float) -> bool:
        return strike.number not in self.undone and now_s >= strike.end_s

    def _is_over(self, strike: Strike, views: Mapping[str, JobView]) -> bool:
        """Undone, and the job has trained with all nodes since, with all copies."""
        view = views.get(strike.job)
        if view is None:
            return True
        costs = strike.kind.takes_node or strike.kind.takes_rows or strike.kind.target is Target.DISK
        copied = not costs or view.copied_at_s > strike.end_s
        stores = not strike.kind.takes_member or view.store_whole
        return strike.number in self.undone and view.whole_at_s > strike.end_s and copied and stores

    def _another(self, now_s: float, views: Mapping[str, JobView]) -> Strike | None:
        """Each kind of fault has its turn before any has a second one, unless no job may suffer it now."""
        views = {
            job: view
            for job, view in views.items()
            if view.whole_at_s != NEVER_S and not view.ending and len(self.on(job)) < MOST_AT_ONCE
        }
        if not views:
            return None
        self._kinds = self._kinds or self._draw.sample(self.faults, len(self.faults))
        for at, name in enumerate(self._kinds):
            chosen = self._victim(FAULTS[name], views)
            if chosen is not None:
                del self._kinds[at]
                job, node = chosen
                lasts_s = self._draw.uniform(*FAULTS[name].lasts_s)
                return Strike(
                    next(self._numbers), name, job, node, now_s, now_s + lasts_s, round(self._draw.random(), 3)
                )
        # A kind that no job can suffer at all must not keep the others from a second turn.
        if len(self._kinds) < len(self.faults):
            self._kinds += [
                name for name in self._draw.sample(self.faults, len(self.faults)) if name not in self._kinds
            ]
        return None

    def _victim(self, fault: Fault, views: Mapping[str, JobView]) -> tuple[str, str] | None:
        if fault.target is Target.MACHINE and any(one.fault == fault.name for one in self.open):
            return None
        choices = [(job, node) for job, view in sorted(views.items()) for node in targets(fault, view)]
        for job, node in self._draw.sample(choices, min(TRIES, len(choices))):
            reason = refusal(fault, node, views[job], self.on(job))
            if not reason:
                return job, node
            self.refusals[fault.name, reason] += 1
        return None


@dataclass(slots=True)
class Replay(Course):
    """The faults that an earlier job of this kind had, at the same times after its beginning. ``begin_s`` and ``end_s``
    of what is left count from there; their job is the only one there is."""

    left: list[Strike] = field(default_factory=list)
    _began_s: float = math.inf

    def _another(self, now_s: float, views: Mapping[str, JobView]) -> Strike | None:
        view = next(iter(views.values()), None)
        if view is None or view.whole_at_s == NEVER_S or not self.left:
            return None
        self._began_s = min(self._began_s, now_s)
        if now_s < self._began_s + self.left[0].begin_s:
            return None
        old = self.left.pop(0)
        return replace(old, job=view.name, begin_s=now_s, end_s=now_s + old.end_s - old.begin_s)
