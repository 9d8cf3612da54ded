"""Alarms of watchdogs: which of them are new, and which have been cleared.

The record contains the alarms that are in the history, so that the next Master neither reports them again nor forgets
to report that they are over. Nodes report all their alarms when they attach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from edl.master.events import JobAlarms, Kind
from edl.master.state import NodeEntry, Phase
from edl.master.turn import MasterTurn
from edl.wire.alarm import Alarm
from edl.wire.messages import Alarms

OF_MASTER = frozenset({"straggler"})
"""Watchdogs that are part of the Master's machine: their alarms are about nodes that do not report them."""
MOST_ALARMS = 64
"""Limit on the alarms of nodes in the record. Further ones are reported when others have been cleared. Those of the job
have no limit: there are few, and their watchdogs report them once."""


def watched(turn: MasterTurn, event: JobAlarms) -> None:
    """Handle the alarms of the watchdogs for the whole job."""
    if turn.record.phase is not Phase.ENDED:
        of_nodes = [alarm for alarm in turn.record.alarms if not _is_of_job(alarm)]
        before = [alarm for alarm in turn.record.alarms if _is_of_job(alarm)]
        change(turn, before, [dataclasses.replace(one, node="", shared=False) for one in event.alarms], of_nodes)


def reported(turn: MasterTurn, entry: NodeEntry, message: Alarms) -> None:
    """Handle a node's report of its alarms; ``settle`` compares them with those of the other nodes."""
    turn.update(entry, alarms=message.alarms)


def settle(turn: MasterTurn) -> None:
    """Bring the record in line with what the nodes have reported."""
    if not turn.record.alarms and not any(entry.alarms for entry in turn.nodes.values()):
        return
    before = [one for one in turn.record.alarms if not _is_of_job(one) and one.name not in OF_MASTER]
    others = [one for one in turn.record.alarms if one not in before]
    now = list(_of_nodes(turn))
    keys = {alarm.key for alarm in now}
    now += [alarm for alarm in before if alarm.key not in keys and _unconfirmed(turn, alarm)]
    change(turn, before, now, others)


def _of_nodes(turn: MasterTurn) -> Iterator[Alarm]:
    """The alarms that the nodes have reported, one for all nodes if it is shared."""
    seen = set()
    for name, entry in sorted(turn.nodes.items()):
        for reported_one in entry.alarms or ():
            alarm = dataclasses.replace(reported_one, node="" if reported_one.shared else name)
            if alarm.key not in seen:
                seen.add(alarm.key)
                yield alarm


def _unconfirmed(turn: MasterTurn, alarm: Alarm) -> bool:
    """Whether a node that may have this alarm has not reported to this Master yet."""
    asked = turn.nodes.values() if alarm.shared else [turn.nodes[node] for node in turn.nodes if node == alarm.node]
    return any(entry.alarms is None for entry in asked)


def change(turn: MasterTurn, before: Sequence[Alarm], now: Sequence[Alarm], others: Sequence[Alarm]) -> None:
    """Replace the alarms ``before`` by ``now``, with an entry in the history for each difference. ``others``: those
    that stay."""
    old, new = {alarm.key: alarm for alarm in before}, {alarm.key: alarm for alarm in now}
    kept = [alarm for alarm in before if alarm.key in new and alarm.severity == new[alarm.key].severity]
    known = {alarm.key for alarm in kept}
    room = max(0, MOST_ALARMS - sum(not _is_of_job(alarm) for alarm in (*kept, *others)))
    fresh = [alarm for alarm in new.values() if alarm.key not in known]
    of_nodes = [alarm for alarm in fresh if not _is_of_job(alarm)]
    added = [alarm for alarm in fresh if _is_of_job(alarm) or alarm in of_nodes[:room]]
    if not added and len(kept) == len(before):
        return
    for alarm in added:
        turn.mention(Kind.ALARM, described(alarm, alarm.text), alarm.node, alarm.severity)
    for key, alarm in old.items():
        if key not in new and (not alarm.node or alarm.node in turn.nodes):  # a lost node has its own entry
            turn.mention(Kind.ALARM_CLEARED, described(alarm, "no longer"), alarm.node, alarm.severity)
    turn.write(alarms=tuple(sorted((*others, *kept, *added), key=lambda alarm: alarm.key)))


def _is_of_job(alarm: Alarm) -> bool:
    return not (alarm.node or alarm.shared)


def described(alarm: Alarm, text: str) -> str:
    """An alarm for people. ``text``: its own, or another one about it."""
    where = f" on {alarm.node}" if alarm.node else ""
    about = f" ({alarm.about})" if alarm.about else ""
    return f"{alarm.name}{about}{where}: {text}"
