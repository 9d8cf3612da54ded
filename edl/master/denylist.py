"""Slots on the denylist, in the Master: other jobs, or people, have found their device or host bad.

They are dropped as long as the entry counts, even if the job then waits for other nodes: whoever asked for the
denylist does not want to find out once more that the hardware is bad. A companion reports all entries that count
(``edl.denylist``); the record holds the slots that they concern, so a new Master need not wait for its companion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edl.master.events import DenylistChanged, Kind
from edl.master.policies import slots as rules
from edl.master.policies.slots import Dropped, DroppedBy
from edl.master.state import Phase
from edl.master.turn import MasterTurn
from edl.rendezvous.phrases import cut, day, one_line
from edl.wire.denylist import DenylistEntry
from edl.wire.records import NodeInfo

LONGEST_WHY = 400
"""Most characters of a reason, so that the record stays small."""


def changed(turn: MasterTurn, event: DenylistChanged) -> None:
    """Handle the entries that count now; these are all of them."""
    if turn.record.phase is Phase.ENDED:
        return
    turn.denylist = event.entries
    _release(turn)
    apply(turn, (entry.info for entry in turn.nodes.values()))


def apply(turn: MasterTurn, infos: Iterable[NodeInfo]) -> Sequence[Dropped]:
    """Drop the slots of these nodes that are on the denylist and not dropped yet. Returns the new drops."""
    if turn.record.phase is Phase.ENDED:
        return ()  # the record of an ended job does not change
    here = tuple(infos)
    _forget_moved(turn, here)
    if not turn.denylist:
        return ()
    added: list[Dropped] = []
    for info in here:
        found = [one for one in _drops(turn, info) if rules.dropped_here(turn.record.dropped, info, one.slot) is None]
        added += found
        if found and len(rules.usable((*turn.record.dropped, *found), info)) == 0:
            turn.note(Kind.SLOT, f"{info.node} takes no part: {found[0].why}", info.node)
        else:
            for one in found:
                turn.note(Kind.SLOT, f"slot {one.slot} of {info.node} takes no part: {one.why}", info.node)
    if added:
        turn.write(dropped=rules.newest((*turn.record.dropped, *added), turn.nodes))
    return added


def _forget_moved(turn: MasterTurn, infos: Sequence[NodeInfo]) -> None:
    """Forget drops on other hosts that have the names of these nodes: a slot without a known device is recognised by
    the name of its node."""
    hosts = {info.node: info.host_id for info in infos}
    kept = tuple(
        one for one in turn.record.dropped if not one.denied or hosts.get(one.node, one.host_id) == one.host_id
    )
    if len(kept) < len(turn.record.dropped):
        turn.write(dropped=kept)


def _drops(turn: MasterTurn, info: NodeInfo) -> Iterator[Dropped]:
    for slot in range(rules.slots_of(info)):
        entry = next((one for one in turn.denylist if one.applies(info, slot)), None)
        if entry is not None:
            yield rules.drop_of(info, slot, because(entry), turn.record.round, DroppedBy.DENYLIST)


def _release(turn: MasterTurn) -> None:
    """Let the slots take part again that are on the denylist no longer."""
    over = [
        one
        for one in turn.record.dropped
        if one.denied and not any(entry.covers(one.host_id, one.device) for entry in turn.denylist)
    ]
    if over:
        turn.write(dropped=tuple(one for one in turn.record.dropped if one not in over))
    for one in over:
        turn.note(
            Kind.SLOT, f"slot {one.slot} of {one.node} may take part again: it is no longer on the denylist", one.node
        )


def isolated(turn: MasterTurn, info: NodeInfo) -> bool:
    """Whether a node cannot take part because of the denylist alone."""
    return not turn.places(turn.nodes[info.node]) and any(
        one.denied and one.node == info.node for one in turn.record.dropped
    )


def because(entry: DenylistEntry) -> str:
    """The reason why a slot is dropped."""
    what = f"device {entry.device}" if entry.device else f"host {entry.host}"
    until = f" until {day(entry.until_s)}" if entry.until_s else ""
    text = f"{what} is on the denylist{until}, added by {entry.by or 'somebody'}: {entry.reason or 'no reason given'}"
    return cut(one_line(text), LONGEST_WHY)
