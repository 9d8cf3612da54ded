"""Finds stragglers in the Master: collects the windows of all ranks, and raises alarms about those that the others wait
for (``edl.stragglers``).

The windows are in memory only. A new Master measures again, and the alarms in the record tell it which ranks are named.
Slots are named rather than ranks, because a slot keeps its number when the world changes. Windows of different worlds
are never compared: a message belongs to a round, and what was measured in another one is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from edl.job_records import StragglerMode
from edl.master import alarms, dropping
from edl.master.state import NodeEntry, Phase
from edl.master.turn import MasterTurn
from edl.stragglers.memory import Place, StragglerMemory
from edl.stragglers.streaks import StragglerVerdict, Streak, judge
from edl.stragglers.windows import compare
from edl.types import NodeId
from edl.wire.alarm import Alarm
from edl.wire.messages import Pace
from edl.wire.records import Member, World
from edl.wire.severity import Severity

NAME = "straggler"


def measured(turn: MasterTurn, entry: NodeEntry, message: Pace) -> None:
    """Handle the windows of a node's workers. Once there is one of each rank of the world, compare them."""
    world, member = turn.record.world, turn.member(entry)
    if world is None or member is None or message.round != world.round or turn.record.phase is not Phase.RUNNING:
        return
    used = set(member.used)
    windows = {one.slot: one for one in message.ranks if one.slot in used}
    if not windows:
        return
    shown = {one.slot: one for one in entry.ranks} if entry.paced_round == message.round else {}
    shown |= windows
    turn.update(entry, ranks=tuple(shown[slot] for slot in member.used if slot in shown))
    if turn.spec.stragglers.mode is StragglerMode.OFF:
        return
    memory = turn.straggling if turn.straggling.round == world.round else StragglerMemory(world.round)
    turn.straggling = memory.add(entry.info.node, windows)
    if turn.straggling.count == world.size:
        _compare(turn, world)


def _compare(turn: MasterTurn, world: World) -> None:
    rules, named = turn.spec.stragglers, {_place(alarm): alarm for alarm in _alarms(turn)}
    windows = dict(turn.straggling.windows())
    found = judge(turn.straggling.streaks, compare(windows, rules.share), named, rules.windows)
    turn.straggling = StragglerMemory(world.round, streaks=found.streaks)
    new = [_alarm(world, place, verdict) for place, verdict in found.named.items()]
    if new or found.cleared:
        _change(turn, [*(alarm for place, alarm in named.items() if place not in found.cleared), *new])
    if rules.mode is StragglerMode.EXCLUDE:
        _exclude(turn, {**named, **{_place(alarm): alarm for alarm in new}}, found.named, found.streaks)


def _exclude(
    turn: MasterTurn,
    named: Mapping[Place, Alarm],
    new: Mapping[Place, StragglerVerdict],
    streaks: Mapping[Place, Streak],
) -> None:
    """Drop the slots of stragglers as if they had failed too often. What the job cannot do without now, it can perhaps
    later, when it has a spare."""
    for (node, slot), alarm in named.items():
        entry, streak = turn.nodes.get(node), streaks.get((node, slot))
        if entry is None or streak is None or not streak.slow:
            continue
        if (node, slot) in new or not dropping.missed(turn, entry, slot):
            dropping.exclude(turn, entry, slot, f"is a straggler: {alarm.text}")


def settle(turn: MasterTurn) -> None:
    """Withdraw alarms about slots that train no more. During a change of the world they stay."""
    known = _alarms(turn)
    if not known:
        return
    off = turn.spec.stragglers.mode is StragglerMode.OFF
    running = turn.record.world if turn.record.phase is Phase.RUNNING else None
    kept = [one for one in known if not off and _trains(turn, running, *_place(one))]
    if len(kept) < len(known):
        _change(turn, kept)


def _trains(turn: MasterTurn, running: World | None, node: NodeId, slot: int) -> bool:
    if running is None:
        return node in turn.nodes
    member = running.member(node)
    return member is not None and slot in member.used


def _alarms(turn: MasterTurn) -> list[Alarm]:
    return [alarm for alarm in turn.record.alarms if alarm.name == NAME]


def _change(turn: MasterTurn, now: list[Alarm]) -> None:
    others = [alarm for alarm in turn.record.alarms if alarm.name != NAME]
    alarms.change(turn, _alarms(turn), now, others)


def _place(alarm: Alarm) -> Place:
    return NodeId(alarm.node), int(alarm.about.rpartition(" ")[2])


def _alarm(world: World, place: Place, verdict: StragglerVerdict) -> Alarm:
    node, slot = place
    text = (
        f"the others wait for rank {rank_of(world, place)} for {verdict.excess:.0%} of each step, "
        f"cause {verdict.cause.value}: it {verdict.evidence.text}. See docs/stragglers.md"
    )
    return Alarm(NAME, f"slot {slot}", Severity.WARNING.value, text, str(node))


def rank_of(world: World, place: Place) -> int:
    """The rank of a slot; -1 if it is not in the world."""
    node, slot = place
    member: Member | None = world.member(node)
    return member.first_rank + member.used.index(slot) if member is not None and slot in member.used else -1
