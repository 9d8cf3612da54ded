"""Decides which slots of which nodes take part: strikes, drops, returns. Pure: no clock, no I/O.

A slot gets a strike if it is the only root cause of an incident: if two or more slots failed by themselves, the script
is to blame, and if a worker only reports a lost peer, the peer is. At ``--slot-strikes`` strikes it is dropped. A slot
that has trained ``AFRESH_S`` seconds since its last strike starts afresh.

If its UUID is known, it is the device that is dropped: it is recognised under another node name or in another slot, and
a new device in the old place starts clean. Otherwise the slot of that node is dropped.

A rank that fails in several slots exonerates them: the fault follows the rank, so its script or its data are to blame.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edl.config import Replicas
from edl.rendezvous.phrases import count, listed, one_line
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Failure, NodeInfo

AFRESH_S = 3600.0
"""Seconds of training without an own failure after which a slot's strikes are forgotten."""
KEPT = 256
"""Maximum number of strikes and of drops kept, the newest; those of nodes that never return must not accumulate."""
LONGEST_CAUSE = 160
"""Maximum characters of a failure's message repeated in the reason of a drop."""


@dataclass(frozen=True, slots=True)
class Strike:
    """The number of times that a slot has failed by itself."""

    node: NodeId
    slot: int
    device: str
    count: int
    trained_s: float = 0.0
    """Seconds of training since the last strike."""
    ranks: tuple[Rank, ...] = ()
    """The ranks with which it failed, each once."""


class DroppedBy(enum.Enum):
    """Who has dropped a slot."""

    JOB = "job"
    """The job, for its failures or a failed check."""
    HAND = "hand"
    """A request: it does not come back by itself."""
    DENYLIST = "denylist"
    """The denylist: it comes back when it is on it no longer."""
    STRAGGLER = "straggler"
    """The job, because the others waited for its rank, which need not be the fault of its hardware."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A slot that no longer gets a worker."""

    node: NodeId
    host: str
    slot: int
    device: str
    why: str
    round: Round
    """The last round before the drop."""
    by: DroppedBy = DroppedBy.JOB
    strike: Strike | None = None
    """The failures for which it was dropped; None: for another reason."""
    host_id: str = ""
    """``NodeInfo.host_id``."""

    @property
    def by_itself(self) -> bool:
        """Whether this job dropped it without a request."""
        return self.by in (DroppedBy.JOB, DroppedBy.STRAGGLER)

    @property
    def denied(self) -> bool:
        """Whether it is on the denylist."""
        return self.by is DroppedBy.DENYLIST


def slots_of(info: NodeInfo) -> int:
    """Number of slots of a node, spare ones included."""
    return info.slots + info.spare_slots


def device_of(info: NodeInfo, slot: int) -> str:
    """The device in a slot; empty if unknown."""
    return info.devices[slot] if slot < len(info.devices) else ""


def is_same(one: Strike | Dropped, info: NodeInfo, slot: int) -> bool:
    """Whether an entry is about that slot of that node: the same device, or if one is unknown the same place."""
    device = device_of(info, slot)
    if one.device and device:
        return one.device == device
    return one.node == info.node and one.slot == slot


def drop_of(info: NodeInfo, slot: int, why: str, round: Round, by: DroppedBy, strike: Strike | None = None) -> Dropped:
    """The entry with which a slot of that node is dropped."""
    return Dropped(info.node, info.host, slot, device_of(info, slot), why, round, by, strike, info.host_id)


def newest(dropped: Sequence[Dropped], present: Collection[NodeId]) -> tuple[Dropped, ...]:
    """The drops that may be kept: the newest ones of this job, the newest ones of absent nodes that are on the
    denylist, and all of ``present`` nodes that are."""
    own = [one for one in dropped if not one.denied]
    absent = [one for one in dropped if one.denied and one.node not in present]
    forgotten = {id(one) for one in (*own[:-KEPT], *absent[:-KEPT])}
    return tuple(one for one in dropped if id(one) not in forgotten)


class KnownDrops:
    """Drops with an index: a Master looks for those of each node at each event, and there may be a thousand nodes."""

    def __init__(self, dropped: Sequence[Dropped]) -> None:
        self.dropped = dropped
        self._found: dict[str, list[Dropped]] = {}
        self._places: dict[tuple[NodeId, Incarnation], tuple[int, ...]] = {}
        """Answers so far: one decision asks about each node several times."""
        for one in dropped:
            for name in {one.node, one.device} - {""}:
                self._found.setdefault(name, []).append(one)

    def places(self, info: NodeInfo, replicas: Replicas) -> tuple[int, ...]:
        """See the function ``places``."""
        if not self.dropped:
            return first(info.slots)
        known = self._places.get((info.node, info.incarnation))
        if known is None:
            found = [one for name in (info.node, *info.devices) for one in self._found.get(name, ())]
            known = self._places[info.node, info.incarnation] = places(found, info, replicas)
        return known


def dropped_here(dropped: Sequence[Dropped], info: NodeInfo, slot: int) -> Dropped | None:
    """The drop that concerns a slot; None if the slot may take part."""
    return next((one for one in dropped if is_same(one, info, slot)), None)


def usable(dropped: Sequence[Dropped], info: NodeInfo) -> tuple[int, ...]:
    """Slots that may be used, ascending."""
    everything = range(slots_of(info))
    if not dropped:
        return tuple(everything)
    return tuple(slot for slot in everything if dropped_here(dropped, info, slot) is None)


def places(dropped: Sequence[Dropped], info: NodeInfo, replicas: Replicas) -> tuple[int, ...]:
    """Slots that the next world's workers use, ascending, enough for whole replicas; spare slots only replace dropped
    ones. Empty: the node cannot take part."""
    if not dropped:
        return first(info.slots)
    able = usable(dropped, info)[: info.slots]
    return able[: replicas.whole(len(able))]


@functools.cache
def first(count: int) -> tuple[int, ...]:
    """The first ``count`` slots. Cached, since a Master compares them at each event."""
    return tuple(range(count))


def slot_in(failure: Failure) -> int:
    """The slot in which a failure happened."""
    return failure.slot if failure.slot >= 0 else failure.local_rank


def culprit(failures: Sequence[Failure]) -> Failure | None:
    """The failure if a single slot is to blame; None if none or several are, or if workers were hanging: the one that
    waits is not to blame."""
    own = [failure for failure in failures if not failure.peer_loss and failure.exit_code]
    if len({(failure.node, slot_in(failure)) for failure in own}) != 1:
        return None
    return own[0]


def struck(strikes: Sequence[Strike], info: NodeInfo, slot: int, rank: Rank) -> tuple[tuple[Strike, ...], Strike]:
    """Add a strike to a slot in which the worker with this rank failed; returns all strikes, and the new one."""
    before = next((one for one in strikes if is_same(one, info, slot)), None)
    if before is None or before.trained_s >= AFRESH_S:
        before = Strike(info.node, slot, device_of(info, slot), 0)
    ranks = before.ranks if rank in before.ranks else (*before.ranks, rank)
    now = Strike(info.node, slot, before.device, before.count + 1, ranks=ranks)
    return (*without(strikes, info, slot), now)[-KEPT:], now


def against(strike: Strike, others: Sequence[Strike]) -> int:
    """How many failures speak against a slot: each failure in another slot with one of the same ranks excuses one."""
    excused = sum(
        one.count for one in others if _place(one) != _place(strike) and not set(strike.ranks).isdisjoint(one.ranks)
    )
    return max(0, strike.count - excused)


def counted(strikes: Sequence[Strike], dropped: Sequence[Dropped]) -> list[Strike]:
    """The strikes of all slots that count, also those of the dropped ones."""
    known = [*strikes, *(one.strike for one in dropped if one.by_itself and one.strike is not None)]
    return [one for one in known if one.trained_s < AFRESH_S]


def _place(one: Strike) -> tuple[str, int]:
    """Tells slots apart, by their devices if these are known."""
    return (one.device, -1) if one.device else (one.node, one.slot)


def trained(
    strikes: Sequence[Strike], infos: Sequence[tuple[NodeInfo, Sequence[int]]], for_s: float
) -> tuple[Strike, ...]:
    """The strikes after these nodes have trained in these slots for ``for_s`` seconds."""

    def took_part(one: Strike) -> bool:
        return any(is_same(one, info, slot) for info, used in infos for slot in used)

    return tuple(
        dataclasses.replace(one, trained_s=one.trained_s + for_s) if took_part(one) else one for one in strikes
    )


def without(strikes: Sequence[Strike], info: NodeInfo, slot: int) -> tuple[Strike, ...]:
    """The strikes of all other slots."""
    return tuple(one for one in strikes if not is_same(one, info, slot))


def named(info: NodeInfo, device: str) -> int | None:
    """The slot named by its number or by the UUID of its device; None if there is none."""
    if device.isdecimal():
        return int(device) if int(device) < slots_of(info) else None
    wanted = device.casefold()
    for slot, text in enumerate(info.devices):
        if wanted in {part.casefold() for part in text.split(",") if part}:
            return slot
    return None


def meant(dropped: Sequence[Dropped], info: NodeInfo | None, node: str, device: str) -> tuple[Dropped, ...]:
    """The drops that a request wants to undo, even if the node is absent (``info`` None). An empty ``device`` means all
    of the node."""
    if info is not None:
        wanted = range(slots_of(info)) if not device else [named(info, device)]
        found = [dropped_here(dropped, info, slot) for slot in wanted if slot is not None]
        here = tuple(one for one in found if one is not None)
        if here:
            return here
    return tuple(one for one in dropped if one.node == node and (not device or _is_called(one, device)))


def _is_called(one: Dropped, device: str) -> bool:
    return str(one.slot) == device or device.casefold() in {part.casefold() for part in one.device.split(",") if part}


def known_slots(info: NodeInfo) -> str:
    """The slots of a node as text: ``slots 0 to 3 (GPU-…, GPU-…)``."""
    last = slots_of(info) - 1
    numbers = f"slots 0 to {last}" if last else "slot 0"
    devices = [text for text in info.devices if text]
    return f"{numbers} ({listed(devices)})" if devices else numbers


def because(strike: Strike, failure: Failure) -> str:
    """The reason why a slot is dropped automatically."""
    cause = one_line(failure.exception)
    cause = f": {cause[:LONGEST_CAUSE]}{'…' if len(cause) > LONGEST_CAUSE else ''}" if cause else ""
    what = f"{failure.what}{cause}"
    return f"failed by itself {count(strike.count, 'time')}, last: {what}"


def excused(failure: Failure) -> str:
    """The reason why a slot that was dropped for its failures comes back, after this failure elsewhere."""
    also = f"slot {slot_in(failure)} of {failure.node}"
    return f"rank {failure.rank}, which failed there, has failed in {also} too: suspect the script or its data"
