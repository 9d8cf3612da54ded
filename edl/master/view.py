"""The Master's state as people see it."""

from __future__ import annotations

from edl.master.state import MasterState, NodeEntry, NodeStatus, Phase
from edl.types import NodeId
from edl.wire.messages import World
from edl.wire.status import JobStatus, JournalEntry, NodeView


def job_status(state: MasterState, master: NodeId, journal: tuple[JournalEntry, ...]) -> JobStatus:
    """Everything ``edl status`` shows."""
    record = state.record
    return JobStatus(
        job=state.spec.job,
        phase=record.phase.value,
        round=record.round,
        world_size=record.world.size if record.world else 0,
        reason=state.reason or record.reason,
        nnodes=str(state.spec.nodes),
        fault_tolerance=state.spec.fault_tolerance.value,
        restarts_used=min(record.restarts, state.spec.max_restarts),
        restarts_allowed=state.spec.max_restarts,
        master=master,
        nodes=tuple(
            _node_view(entry, record.world, running=record.phase is Phase.RUNNING)
            for entry in sorted(state.nodes.values(), key=lambda entry: _order(entry, record.world))
        ),
        journal=journal,
        failures=record.failures,
    )


def _order(entry: NodeEntry, world: World | None) -> tuple[int, int]:
    return (_position(entry, world) % 1_000_000, entry.joined)


def _position(entry: NodeEntry, world: World | None) -> int:
    member = world.member(entry.info.node) if world else None
    if world is None or member is None or member.incarnation != entry.info.incarnation:
        return -1
    return world.position(entry.info.node)


def _node_view(entry: NodeEntry, world: World | None, *, running: bool) -> NodeView:
    position = _position(entry, world)
    member = world.members[position] if world and position >= 0 else None
    spare = running and entry.status is NodeStatus.READY and member is None
    return NodeView(
        node=entry.info.node,
        host=entry.info.host,
        slots=entry.info.slots,
        state="spare" if spare else entry.status.value,
        attached=entry.attached,
        position=position,
        first_rank=member.first_rank if member else -1,
    )
