"""A suspended job: its waiting workers end, and what only the launchers' memory has is written before nodes leave."""

from __future__ import annotations

import dataclasses

from edl.master import away
from edl.master.awaiting import awaited
from edl.master.restoring import Restore, newest_in_memory
from edl.master.state import FailedWrites, NodeEntry, NodeStatus, Phase
from edl.master.turn import MasterTurn
from edl.types import NodeId
from edl.wire.messages import Idle
from edl.wire.records import NO_STATE, Version

FIRST_WRITE_PAUSE_S, LONGEST_WRITE_PAUSE_S = 10.0, 120.0
"""Bounds of the pause in seconds before a suspended job writes its newest commit again; it doubles each time."""


def rest(turn: MasterTurn) -> None:
    """Handle a suspended job: end all waiting workers, and have commits written that are only in memory."""
    turn.planned = False
    if turn.at_boundary:
        turn.write(switch=None)
    turn.grace_until_s = None
    turn.reason = by = f"suspended by {turn.record.sizing.suspended}"
    for entry in list(turn.nodes.values()):
        if entry.draining and not is_last_holder(turn, entry):
            away.dismiss(turn, "the job is suspended", only=entry)
    newest = newest_in_memory([entry for entry in turn.nodes.values() if entry.attached])
    unwritten = newest.version > max((entry.stored for entry in turn.nodes.values()), default=NO_STATE)
    if unwritten:
        turn.reason = f"{by}; commit {newest.version.commit} is only in the memory of launchers"
    writers = _writers(turn, newest) if unwritten and not _pauses_writing(turn, newest.version) else ()
    for entry in turn.free():
        if entry.info.node in writers:
            entry = turn.ordered(entry, write=newest.version)
            turn.tell(entry, Idle(by, newest.version))
        if not entry.orders.idle:
            if entry.info.node not in writers:
                turn.tell(entry, Idle(by))
            entry = turn.update(entry, restarted=False, orders=entry.orders._replace(idle=True, prestart=False))
            if entry.parked or turn.spec.independent:
                due_s = turn.now_s + turn.absence_s(entry.info) + turn.spec.timeouts.shutdown_s
                turn.update(entry, status=NodeStatus.STOPPING, due_s=due_s)
                turn.wake_at(due_s)


def newest_to_keep(turn: MasterTurn) -> Version:
    """The newest commit in memory that a world can begin from, or could if nodes that are awaited have the rest."""
    if awaited(turn):
        return max((held.version for entry in turn.nodes.values() for held in entry.holdings), default=NO_STATE)
    return newest_in_memory(turn.nodes.values()).version


def is_last_holder(turn: MasterTurn, entry: NodeEntry) -> bool:
    """Whether this node's memory has the newest state, or a part of it, and neither the checkpoint directory nor the
    nodes that stay have all of it."""
    newest = newest_to_keep(turn)
    if all(held.version != newest for held in entry.holdings):
        return False
    if any(other.stored >= newest for other in turn.nodes.values()):
        return False
    stay = [
        other
        for other in turn.nodes.values()
        if other.info.node != entry.info.node and other.attached and not other.draining
        if other.status is not NodeStatus.LEAVING
    ]
    return newest_in_memory(stay).version < newest


def write_failed(turn: MasterTurn, node: NodeId, version: Version) -> bool:
    """Have a suspended job write its newest commit again after a pause, since a node could not write it. Returns
    whether an earlier attempt has failed as well, so that the history has it already."""
    resting = turn.record.phase is Phase.FORMING and bool(turn.record.sizing.suspended)
    if not resting or all(entry.orders.write != version for entry in turn.nodes.values()):
        return False
    failed = turn.failed_writes
    if failed.version != version:
        failed = FailedWrites(version)
    nodes = (*(one for one in failed.nodes if one != node), node)
    if failed.due_s:  # another node has failed in the same attempt
        turn.failed_writes = dataclasses.replace(failed, nodes=nodes)
        return failed.count > 1
    due_s = turn.now_s + _write_pause_s(failed.count + 1)
    turn.failed_writes = FailedWrites(version, failed.count + 1, due_s, nodes)
    return failed.count > 0


def _pauses_writing(turn: MasterTurn, version: Version) -> bool:
    """Whether to wait before the next attempt to write this commit. When it is due, no node counts as asked."""
    failed = turn.failed_writes
    if failed.version != version or not failed.due_s:
        return False
    if turn.now_s < failed.due_s:
        pause_s = _write_pause_s(failed.count)
        turn.reason += f": attempt {failed.count} to write it failed, the next one follows within {pause_s:g} s"
        turn.wake_at(failed.due_s)
        return True
    turn.failed_writes = dataclasses.replace(failed, due_s=0.0)
    for entry in list(turn.nodes.values()):
        if entry.orders.write == version:
            turn.ordered(entry, write=NO_STATE)
    return False


def _write_pause_s(failed: int) -> float:
    return min(FIRST_WRITE_PAUSE_S * 2.0 ** (failed - 1), LONGEST_WRITE_PAUSE_S)


def _writers(turn: MasterTurn, newest: Restore) -> list[NodeId]:
    """Nodes that have to write the parts of a commit in memory that no node has been asked to write yet. The first
    member of the world is preferred, because it may have begun; those that have failed come last."""
    world, free = turn.record.world, {entry.info.node for entry in turn.free()}
    first = world.members[0].node if world is not None else ""
    failed = turn.failed_writes.nodes if turn.failed_writes.version == newest.version else ()
    found = []
    for shard in range(newest.shards):
        holders = sorted(
            (source.node for source in newest.sources if source.shard == shard),
            key=lambda node: (failed.index(node) if node in failed else -1, node != first),
        )
        asked = any(turn.nodes[node].orders.write == newest.version for node in holders)
        found += [] if asked else [node for node in holders if node in free][:1]
    return found
