"""What a slot does at one moment, as far as the Master's state shows."""

from __future__ import annotations

import enum

from edl.master.policies.slots import places
from edl.master.state import MasterState, NodeEntry, NodeStatus, Phase


class SlotUse(enum.Enum):
    """Uses of a slot's time. Each slot has exactly one at any moment."""

    USEFUL = "useful"
    """Training whose result counts. Of a script without ``edl.State``: all the time that its workers run."""
    REDONE = "redone"
    """Training that was lost with a failure: the next world repeats it."""
    STARTING = "starting"
    """Importing the framework, starting worker processes, running the script up to its training."""
    RENDEZVOUS = "rendezvous"
    """Stopping the workers after a failure, and forming the next world and its communicators."""
    RESTORE = "restore"
    """Reading the state of a commit from memory or from storage."""
    COMMIT = "commit"
    """Training waits for ``commit()`` or ``save()``."""
    DATA_WAIT = "data_wait"
    """Training waits for edl's data loader."""
    RESIZE = "resize"
    """As ``RENDEZVOUS``, for a planned change: training had ended at a step boundary."""
    HANG = "hang"
    """Workers made no training, until the hang was noticed."""
    IDLE = "idle"
    """A spare or cordoned node, a dropped slot, a suspended job, a node whose workers are done before the others'."""
    LOST = "lost"
    """A node was silent before it was removed as lost."""


TRAINING = (SlotUse.USEFUL, SlotUse.COMMIT, SlotUse.DATA_WAIT)
"""Uses of a world in training."""
NO_COST = frozenset((*TRAINING, SlotUse.IDLE))
"""Uses that are not the cost of a change of the world."""

_S = NodeStatus
_ANYWHERE = {
    _S.WARMING: SlotUse.STARTING,
    _S.PREPARING: SlotUse.STARTING,
    _S.LOADING: SlotUse.RESTORE,
    _S.LEAVING: SlotUse.RESIZE,
}
"""Uses by status, in any phase."""
_OUTSIDE = {_S.READY: SlotUse.IDLE, _S.DONE: SlotUse.IDLE}
"""Further ones while a world runs. The rest depends on the change of the world."""


def use_of(state: MasterState, entry: NodeEntry, *, planned: bool) -> SlotUse:
    """The use of the slots of a node that is attached. ``planned``: the last change of the world was."""
    record = state.record
    running = record.phase is Phase.RUNNING
    if not running and record.sizing.suspended:
        return SlotUse.IDLE
    if entry.status is NodeStatus.RUNNING and running:
        # Whether a script reports that it trains is not known before it has done so once.
        return SlotUse.USEFUL if entry.underway or not record.rejoins else SlotUse.STARTING
    if entry.status is NodeStatus.READY and record.sizing.excludes(entry.info.node):
        return SlotUse.IDLE
    found = _ANYWHERE.get(entry.status) or (_OUTSIDE.get(entry.status) if running else None)
    return found or (SlotUse.RESIZE if planned else SlotUse.RENDEZVOUS)


def taking_part(state: MasterState, entry: NodeEntry) -> int:
    """Number of slots of a node that have a place in the world that runs, or else in the next one. The others are
    idle, because they have been dropped or would not make a whole replica."""
    record = state.record
    world = record.world if record.phase is Phase.RUNNING and entry.status is NodeStatus.RUNNING else None
    member = world.member(entry.info.node) if world is not None else None
    return member.slots if member is not None else len(places(record.dropped, entry.info, state.spec.replicas))
