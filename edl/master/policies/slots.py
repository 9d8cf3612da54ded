"""Which slots of which nodes take part: strikes, drops, returns. Pure: no clock, no IO.

A slot gets a strike when it alone failed of its own in an incident: where two slots or more did, it is the script, and
where a worker only complains of a lost peer, it is the peer. With ``--slot-strikes`` of them it is dropped. A slot that
has trained ``AFRESH_S`` seconds since its last strike starts afresh.

What is dropped is the device, as far as it can be told by its UUID: it is found again under another name of the node or
in another slot, and a new device in the old place starts clean. Where nothing can be told it is the slot of that node.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from edl.rendezvous.phrases import count, listed, one_line
from edl.types import NodeId, Round
from edl.wire.messages import Failure, NodeInfo

AFRESH_S = 3600.0
"""After so much training without a failure of its own, strikes of a slot are forgotten."""
KEPT = 256
"""Strikes and drops that are remembered, the newest; those of nodes that never come back must not pile up."""
LONGEST_CAUSE = 160
"""Characters of a failure's last words that are repeated in the reason of a drop."""


@dataclass(frozen=True, slots=True)
class Strike:
    """How often a slot has failed by itself."""

    node: NodeId
    slot: int
    device: str
    count: int
    trained_s: float = 0.0
    """How long it has trained since the last time."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A slot in which no worker is started any more."""

    node: NodeId
    host: str
    slot: int
    device: str
    why: str
    round: Round
    """The last round before."""
    by_hand: bool = False
    """It was named by somebody: it does not come back by itself."""


def slots_of(info: NodeInfo) -> int:
    """All slots of a node, spare ones included."""
    return info.slots + info.spare_slots


def device_of(info: NodeInfo, slot: int) -> str:
    """What is in a slot, as far as that is known."""
    return info.devices[slot] if slot < len(info.devices) else ""


def is_same(one: Strike | Dropped, info: NodeInfo, slot: int) -> bool:
    """Whether this is about that slot of that node: the same device, or where one is not known the same place."""
    device = device_of(info, slot)
    if one.device and device:
        return one.device == device
    return one.node == info.node and one.slot == slot


def dropped_here(dropped: Sequence[Dropped], info: NodeInfo, slot: int) -> Dropped | None:
    """What is remembered of a slot that takes no part; None: it may."""
    return next((one for one in dropped if is_same(one, info, slot)), None)


def usable(dropped: Sequence[Dropped], info: NodeInfo) -> tuple[int, ...]:
    """Slots that may be used, ascending."""
    everything = range(slots_of(info))
    if not dropped:
        return tuple(everything)
    return tuple(slot for slot in everything if dropped_here(dropped, info, slot) is None)


def places(dropped: Sequence[Dropped], info: NodeInfo) -> tuple[int, ...]:
    """Slots that workers of the next world are in, ascending: spare ones only for those that are dropped. Empty: the
    node can take no part."""
    return usable(dropped, info)[: info.slots] if dropped else first(info.slots)


@functools.cache
def first(count: int) -> tuple[int, ...]:
    """So many slots from the first one on; one object for all nodes, since a Master compares them at each event."""
    return tuple(range(count))


def slot_in(failure: Failure) -> int:
    """The slot that a failure happened in."""
    return failure.slot if failure.slot >= 0 else failure.local_rank


def culprit(failures: Sequence[Failure]) -> Failure | None:
    """The failure for which one slot alone is to blame; None: nobody, or more than one."""
    own = [failure for failure in failures if not failure.peer_loss]
    if len({(failure.node, slot_in(failure)) for failure in own}) != 1:
        return None
    return own[0]


def struck(strikes: Sequence[Strike], info: NodeInfo, slot: int) -> tuple[tuple[Strike, ...], Strike]:
    """One strike more for a slot: all strikes, and the one it has now."""
    before = next((one for one in strikes if is_same(one, info, slot)), None)
    fresh = before is None or before.trained_s >= AFRESH_S
    number = 1 if before is None or fresh else before.count + 1
    now = Strike(info.node, slot, device_of(info, slot), number)
    return (*without(strikes, info, slot), now)[-KEPT:], now


def trained(
    strikes: Sequence[Strike], infos: Sequence[tuple[NodeInfo, Sequence[int]]], for_s: float
) -> tuple[Strike, ...]:
    """The same after these nodes have trained in these slots for a time."""

    def took_part(one: Strike) -> bool:
        return any(is_same(one, info, slot) for info, used in infos for slot in used)

    return tuple(
        dataclasses.replace(one, trained_s=one.trained_s + for_s) if took_part(one) else one for one in strikes
    )


def without(strikes: Sequence[Strike], info: NodeInfo, slot: int) -> tuple[Strike, ...]:
    """Strikes of all other slots."""
    return tuple(one for one in strikes if not is_same(one, info, slot))


def named(info: NodeInfo, device: str) -> int | None:
    """The slot that somebody names by its number or by the UUID of a device in it; None: there is none."""
    if device.isdecimal():
        return int(device) if int(device) < slots_of(info) else None
    wanted = device.casefold()
    for slot, text in enumerate(info.devices):
        if wanted in {part.casefold() for part in text.split(",") if part}:
            return slot
    return None


def meant(dropped: Sequence[Dropped], info: NodeInfo | None, node: str, device: str) -> tuple[Dropped, ...]:
    """The drops that somebody wants to undo, also if the node is not there (``info`` is None). An empty ``device``:
    all of the node."""
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
    """What a node has, in words: ``slots 0 to 3 (GPU-…, GPU-…)``."""
    last = slots_of(info) - 1
    numbers = f"slots 0 to {last}" if last else "slot 0"
    devices = [text for text in info.devices if text]
    return f"{numbers} ({listed(devices)})" if devices else numbers


def because(strike: Strike, failure: Failure) -> str:
    """Why a slot is dropped by itself."""
    cause = one_line(failure.exception)
    cause = f": {cause[:LONGEST_CAUSE]}{'…' if len(cause) > LONGEST_CAUSE else ''}" if cause else ""
    what = f"{failure.what}{cause}"
    return f"failed by itself {count(strike.count, 'time')}, last: {what}"
