"""Adds up what the slots of a job spend their time on, as the Master's state changes.

All times are integers, in nanoseconds: the parts add up to the whole exactly. What is only known later, such as that a
node had been silent since some time, moves time from one use to another and never changes the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edl.master import events as ev
from edl.master.goodput.slot_use import NO_COST, TRAINING, SlotUse, taking_part, use_of
from edl.master.goodput.training_clock import NO_TRAINING, TrainingClock, TrainingWaits
from edl.master.state import MasterState, NodeEntry, Phase
from edl.master.turn import MasterTurn
from edl.types import Incarnation, NodeId
from edl.wire.messages import Hanging, Pace, Preparing, Ready, Underway
from edl.wire.records import NO_STATE, Holding, World

NS = 1_000_000_000
Amounts = Mapping[SlotUse, int]
"""Slot-nanoseconds by use."""


class Stint(NamedTuple):
    """The current use of a node's slots, which is not in ``SlotTimes.spent`` yet. A ``NamedTuple`` like ``NodeEntry``,
    because a new world replaces each several times."""

    incarnation: Incarnation
    slots: int
    """Slots that take part, and have this use."""
    idle: int
    """The other slots of the node."""
    use: SlotUse
    since_ns: int
    silent_ns: int | None = None
    """Time since which the node has not been attached; None: it is, or never was."""


@dataclass(frozen=True, slots=True)
class WorldChange:
    """A change of the world in training."""

    since_ns: int
    before: Amounts
    """All amounts at that time."""
    slots: int
    """Slots of the world that ended."""
    hung_ns: int = 0
    """Duration of the hang with which its training ended."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a change of the world has cost."""

    took_s: float
    """Seconds from the end of one world's training to the beginning of the next one's."""
    slots: int
    """Slots of the world that ended."""
    amounts: Amounts
    """Slot-nanoseconds by use, except training and idleness. Work that is repeated is part of it."""


@dataclass(frozen=True, slots=True)
class SlotTimes:
    """The slot times of a job until ``at_ns`` of the Master's clock."""

    at_ns: int = 0
    spent: Amounts = field(default_factory=dict)
    stints: Mapping[NodeId, Stint] = field(default_factory=dict)
    training: TrainingClock = NO_TRAINING
    trains: bool = False
    """Whether all members of the running world train."""
    planned: bool = False
    """Whether the last change of the world was planned."""
    change: WorldChange | None = None
    spoilt: int = 0
    """Slot-nanoseconds of the last world's training that were found to be something else."""

    def amounts(self) -> dict[SlotUse, int]:
        """Slot-nanoseconds by use, of all slots until now."""
        found = {use: self.spent.get(use, 0) for use in SlotUse}
        for stint in self.stints.values():
            found[stint.use] += (self.at_ns - stint.since_ns) * stint.slots
            found[SlotUse.IDLE] += (self.at_ns - stint.since_ns) * stint.idle
        return found


def follow(
    times: SlotTimes, before: MasterState | None, events: Sequence[ev.Event], state: MasterState, now_s: float
) -> tuple[SlotTimes, Cost | None]:
    """The slot times after one decision of the Master, and the cost of a change of the world that it completes.

    ``before``: the state that was followed so far; None: this Master has just taken over."""
    if before is not None and before.record.phase is Phase.ENDED:
        return times, None
    book = _Book(times, before, state, max(times.at_ns, round(now_s * NS)))
    for event in events:
        if isinstance(event, ev.NodeSaid):
            book.hear(event)
    book.end_world()
    book.follow_nodes()
    return book.begin_world()


class _Book:
    """Slot times while they follow one decision."""

    def __init__(self, times: SlotTimes, before: MasterState | None, state: MasterState, now_ns: int) -> None:
        duration_ns = now_ns - times.at_ns if times.trains else 0
        self.state, self.before, self.now_ns = state, before, now_ns
        self.times = dataclasses.replace(times, at_ns=now_ns, training=times.training.advance(duration_ns))
        self.spent = dict(times.spent)
        self.stints = dict(times.stints)
        self.hung_ns = 0
        self.joined: dict[NodeId, Underway] = {}
        self.paced: dict[NodeId, Pace] = {}

    def hear(self, event: ev.NodeSaid) -> None:
        """Take in what a node reports about its workers' time."""
        message, record = event.message, self.state.record
        if isinstance(message, Underway):
            self.joined[event.node] = message
        elif isinstance(message, Pace) and self.times.trains and message.round == record.round:
            self.paced[event.node] = message
            self._mark(message.commit, message.age_s, message.step_s)
        elif isinstance(message, Hanging) and message.round == record.round:
            self.hung_ns = round(message.for_s * NS)
        elif isinstance(message, Ready | Preparing) and message.commit_age_s > 0:
            self._mark(_newest(message.holdings), message.commit_age_s)

    def _mark(self, commit: int, age_s: float, step_s: float = 0.0) -> None:
        """The clock of training may have stopped since the commit was made."""
        change = self.times.change
        stopped_ns = self.now_ns - change.since_ns + change.hung_ns if change is not None else 0
        age_ns = max(0, round(age_s * NS) - stopped_ns)
        training = self.times.training.mark(commit, age_ns, round(step_s * NS))
        self.times = dataclasses.replace(self.times, training=training)

    def end_world(self) -> None:
        """Notice that the world has ended or was replaced, and what the next one makes of its work."""
        record = self.state.record
        before = self.before.record if self.before is not None else None
        over = record.phase is not Phase.RUNNING or (before and before.round != record.round)
        if self.times.trains and over:
            self._stop()
            self.times = dataclasses.replace(self.times, trains=False, planned=self.state.planned)
        elif over and before and before.world is not None and self.hung_ns:
            self._close_hung(before.world, self.hung_ns)  # scripts that do not report that they train
            self.times = dataclasses.replace(self.times, planned=False)
        elif over:
            self.times = dataclasses.replace(self.times, planned=self.times.planned and self.state.planned)
        if before is not None and before.round != record.round and record.world is not None:
            self._roll_back(record.world)

    def _stop(self) -> None:
        world = self.before.record.world if self.before is not None else self.state.record.world
        before = self._totals()
        before[SlotUse.LOST] -= self.times.spoilt  # it belongs to this change
        before[SlotUse.USEFUL] += self.times.spoilt
        change = WorldChange(self.now_ns, before, world.size if world is not None else 0)
        self.times = dataclasses.replace(self.times, change=change)
        if self.hung_ns:
            self._hung(world)

    def _hung(self, world: World | None) -> None:
        """The last part of the world's training was a hang."""
        training = self.times.training
        began_ns = training.stretches[-1].from_ns if training.stretches else 0
        hung_ns = min(self.hung_ns, training.clock_ns - began_ns)
        change = self.times.change and dataclasses.replace(self.times.change, hung_ns=hung_ns)
        self.times = dataclasses.replace(self.times, training=training.advance(-hung_ns), change=change)
        if world is not None:
            self._close_hung(world, hung_ns)

    def _close_hung(self, world: World, hung_ns: int) -> None:
        """Enter the end of what counted as training of this world as a hang."""
        for member in world.members:
            stint = self.stints.get(member.node)
            if stint is not None and stint.use in TRAINING:
                self._close(member.node, stint, {SlotUse.HANG: hung_ns})

    def _roll_back(self, world: World) -> None:
        """A world was formed: what its predecessor trained since the commit that it begins from is to be repeated."""
        training, lost, waits = self.times.training.roll_back(world.restore.commit)
        if self.times.planned or self.state.spec.independent:
            return
        left = max(0, lost - self.times.spoilt)
        parts = {SlotUse.COMMIT: waits.commit_ns, SlotUse.DATA_WAIT: waits.data_ns, SlotUse.USEFUL: left}
        for use, amount in parts.items():
            moved = min(max(0, amount), left, self.spent.get(use, 0))
            self._add(use, -moved)
            self._add(SlotUse.REDONE, moved)
            left -= moved
        self.times = dataclasses.replace(self.times, training=training, spoilt=0)

    def follow_nodes(self) -> None:
        """Bring the stint of each node in line with the state."""
        ended = self.state.record.phase is Phase.ENDED
        before = self.before
        same = before is not None and before.record is self.state.record
        for node, stint in list(self.stints.items()):
            entry = self.state.nodes.get(node)
            if ended or entry is None or not _counts(entry, stint):
                self._leave(node, stint)
        for node, entry in self.state.nodes.items() if not ended else ():
            if same and before is not None and before.nodes.get(node) is entry and node not in self.paced:
                continue
            if entry.registered:
                self._follow(node, entry)

    def _follow(self, node: NodeId, entry: NodeEntry) -> None:
        stint = self.stints.get(node)
        use = use_of(self.state, entry, planned=self.times.planned)
        slots = taking_part(self.state, entry)
        idle = entry.info.slots - slots
        if stint is None:
            self.stints[node] = Stint(entry.info.incarnation, slots, idle, use, self.now_ns)
            return
        if not entry.attached:  # what it does is not known until it attaches, or is lost
            if stint.silent_ns is None:
                self.stints[node] = stint._replace(silent_ns=self.now_ns)
            return
        if stint.silent_ns is not None:
            stint = self.stints[node] = stint._replace(silent_ns=None)
        if self._was_starting(stint):
            stint = self.stints[node] = stint._replace(use=SlotUse.STARTING)
        joined, paced = self.joined.get(node), self.paced.get(node)
        if joined is not None and stint.use is SlotUse.STARTING:
            change = SlotUse.RESIZE if self.times.planned else SlotUse.RENDEZVOUS
            parts = {SlotUse.RESTORE: round(joined.restore_s * NS), change: round(joined.connect_s * NS)}
            self._close(node, stint, parts)
        elif paced is not None and stint.use is SlotUse.USEFUL:
            self._pace(node, stint, paced)
        elif use is not stint.use or slots != stint.slots:
            self._close(node, stint, {})
        if use is not stint.use or slots != stint.slots:  # a new stint begins now
            self.stints[node] = self.stints[node]._replace(use=use, slots=slots, idle=idle)

    def _pace(self, node: NodeId, stint: Stint, paced: Pace) -> None:
        """Enter the waits among the training of a node."""
        took_ns = self.now_ns - stint.since_ns
        shares = {SlotUse.COMMIT: paced.commit_share, SlotUse.DATA_WAIT: paced.data_share}
        before = {use: self.spent.get(use, 0) for use in shares}
        self._close(node, stint, {one: round(share * took_ns) for one, share in shares.items()})
        commit_ns, data_ns = (self.spent.get(use, 0) - amount for use, amount in before.items())
        training = self.times.training.wait(took_ns, TrainingWaits(commit_ns, data_ns))
        self.times = dataclasses.replace(self.times, training=training)

    def _was_starting(self, stint: Stint) -> bool:
        """Whether what counted as training was the start of a script, as the first report of training now shows."""
        knew = self.before is not None and self.before.record.rejoins
        return stint.use is SlotUse.USEFUL and not knew and self.state.record.rejoins

    def _leave(self, node: NodeId, stint: Stint) -> None:
        """The node is gone."""
        change = self.times.change
        since_ns = self.now_ns if stint.silent_ns is None else max(stint.silent_ns, stint.since_ns)
        until_ns = self.now_ns if change is None else change.since_ns  # of the training that its silence belongs to
        if stint.use in TRAINING:
            spoilt = max(0, until_ns - since_ns) * stint.slots
            self.times = dataclasses.replace(self.times, spoilt=self.times.spoilt + spoilt)
        self._close(node, stint, {SlotUse.LOST: self.now_ns - since_ns})
        del self.stints[node]

    def _close(self, node: NodeId, stint: Stint, parts: Mapping[SlotUse, int]) -> None:
        """Enter the time of a stint, and begin a new one. ``parts``: nanoseconds of it that went into other uses, as
        far as there is that much time."""
        left_ns = self.now_ns - stint.since_ns
        for use, part_ns in parts.items():
            taken_ns = min(max(0, part_ns), left_ns)
            self._add(use, taken_ns * stint.slots)
            left_ns -= taken_ns
        self._add(stint.use, left_ns * stint.slots)
        self._add(SlotUse.IDLE, (self.now_ns - stint.since_ns) * stint.idle)
        self.stints[node] = stint._replace(since_ns=self.now_ns)

    def begin_world(self) -> tuple[SlotTimes, Cost | None]:
        """Notice that all members of the world train; returns the result."""
        record, cost = self.state.record, None
        begins = not self.times.trains and MasterTurn(self.state, 0.0).underway
        times = self.times
        if begins and record.world is not None:
            training = times.training.begin(record.world.restore.commit, record.world.size)
            if times.change is not None:
                cost = _cost(times.change, self._totals(), self.now_ns)
            times = dataclasses.replace(times, trains=True, change=None, training=training, spoilt=0)
        return dataclasses.replace(times, spent=self.spent, stints=self.stints), cost

    def _totals(self) -> dict[SlotUse, int]:
        return dataclasses.replace(self.times, spent=self.spent, stints=self.stints).amounts()

    def _add(self, use: SlotUse, amount: int) -> None:
        self.spent[use] = self.spent.get(use, 0) + amount


def _counts(entry: NodeEntry, stint: Stint) -> bool:
    return entry.registered and entry.info.incarnation == stint.incarnation


def _newest(holdings: Sequence[Holding]) -> int:
    return max((holding.version for holding in holdings), default=NO_STATE).commit


def _cost(change: WorldChange, now: Amounts, now_ns: int) -> Cost:
    amounts = {use: now[use] - change.before.get(use, 0) for use in SlotUse if use not in NO_COST}
    return Cost((now_ns - change.since_ns) / NS, change.slots, amounts)
