"""Invariants of the Master's machine, checked after every step by the simulator and the unit tests. A violation is
returned as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edl.config import JobSpec, NodeRange
from edl.master.events import Decision, TellNode
from edl.master.policies.slots import Dropped
from edl.master.sizing import Departing
from edl.master.state import MasterState, NodeStatus, Phase, Record
from edl.wire.messages import StartRound
from edl.wire.records import Member, Version, World
from edl.wire.scale_requests import DrainMode


def formed_violations(record: Record, spec: NodeRange) -> Iterator[str]:
    """Violations by a newly formed world: bounds, requested size, cordons, drops and departures."""
    world, sizing = record.world, record.sizing
    if world is None:
        return
    bounds, nodes = sizing.bounds(spec), [member.node for member in world.members]
    if not bounds.minimum <= len(nodes) <= bounds.maximum:
        yield f"round {world.round} has {len(nodes)} nodes outside {bounds}"
    if len(nodes) > sizing.target(spec):
        yield f"round {world.round} has {len(nodes)} nodes, {sizing.target(spec)} are wanted"
    if sizing.suspended:
        yield f"round {world.round} is formed while the job is suspended by {sizing.suspended}"
    for member in world.members:
        lost = [slot for slot in member.used if any(_is_in(one, member, slot) for one in record.dropped)]
        if lost:
            yield f"round {world.round} uses slots {lost} of {member.node}, which are dropped"
        if sizing.excludes(member.node):
            yield f"round {world.round} has {member.node}, which is cordoned"
        if any(one.incarnation == member.incarnation and not _stays(one, record) for one in record.departing):
            yield f"round {world.round} has {member.node}, which is to leave"


def _stays(one: Departing, record: Record) -> bool:
    """Whether a departing node may be in a world, because it must not leave before a checkpoint is complete."""
    complete = one.commit and record.saved >= Version(one.era, one.commit)
    return one.mode is DrainMode.MUST and not complete


def _unhealthy_members(before: Record, after: MasterState) -> Iterator[str]:
    """Members of a newly formed world that should have been kept out or checked first. ``before``: the record before
    the world was formed."""
    record, mode, earlier = after.record, after.spec.health.mode, before.world
    verdicts = {one.incarnation: one for one in record.health.verdicts}
    suspects = {one.node for one in record.health.suspects}
    for member in record.world.members if record.world is not None else ():
        verdict = verdicts.get(member.incarnation)
        there = earlier.member(member.node) if earlier is not None else None
        new = there is None or there.incarnation != member.incarnation
        if verdict is not None and verdict.excluded:
            yield f"round {record.round} has {member.node}, which is {verdict.fitness.value}: {verdict.why}"
        if member.node in suspects:
            yield f"round {record.round} has {member.node}, which must be checked first"
        if mode.on_join and new and verdict is None:
            yield f"round {record.round} has {member.node}, which has not been checked"


def _is_in(one: Dropped, member: Member, slot: int) -> bool:
    """Whether a drop is about this slot. Only drops without a known device are compared, because devices may move."""
    return not one.device and one.node == member.node and one.slot == slot


def world_violations(world: World, spec: JobSpec) -> Iterator[str]:
    """Violations by a world at any time: node unit, whole replicas, duplicate nodes, ranks without gaps, slots and
    ports."""
    nodes = [member.node for member in world.members]
    if len(nodes) % spec.nodes.unit:
        yield f"round {world.round} has {len(nodes)} nodes, not a multiple of {spec.nodes.unit}"
    if world.size % spec.replicas.size:
        yield f"round {world.round} has {world.size} workers, not whole replicas of {spec.replicas.size}"
    if spec.replicas.nodes == 1:  # else each node has all its workers
        for member in world.members:
            if member.slots % spec.replicas.size:
                yield f"round {world.round}: {member.node} has {member.slots} workers, which cuts a replica"
    if len(set(nodes)) != len(nodes):
        yield f"round {world.round} lists a node twice: {nodes}"
    expected = 0
    for member in world.members:
        if member.first_rank != expected:
            yield f"round {world.round}: ranks of {member.node} begin at {member.first_rank}, not {expected}"
        if len(member.used) != member.slots or list(member.used) != sorted(set(member.used)) or not member.slots:
            yield f"round {world.round}: {member.node} has {member.slots} workers in slots {member.used}"
        if len(member.ports) < 1 + member.slots:
            yield f"round {world.round}: {member.node} has {len(member.ports)} ports for {member.slots} workers"
        expected += member.slots


def state_violations(state: MasterState) -> Iterator[str]:
    """Contradictions within one state."""
    record = state.record
    if record.world is not None:
        yield from world_violations(record.world, state.spec)
        if record.world.round != record.round:
            yield f"record says round {record.round}, its world {record.world.round}"
    elif record.round:
        yield f"round {record.round} without a world"
    if record.observed > record.sizing.generation:
        yield f"generation {record.observed} has been observed, {record.sizing.generation} is the newest"
    if not 0 <= record.restarts <= state.spec.max_restarts + 1:
        yield f"{record.restarts} restarts used of {state.spec.max_restarts}"
    if record.phase is Phase.RUNNING and record.restarts > state.spec.max_restarts:
        yield "a world runs on an overdrawn restart budget"
    order = record.switch
    if order is not None and (record.phase is not Phase.FORMING or order.round != record.round or not order.commit):
        yield f"phase {record.phase.value} of round {record.round} with {order}"
    if (record.phase is Phase.ENDED) != (record.outcome is not None):
        yield f"phase {record.phase.value} with outcome {record.outcome}"
    for node, entry in state.nodes.items():
        if entry.info.incarnation in state.dead:
            yield f"{node} is listed although incarnation {entry.info.incarnation} is dead"
        if entry.status is NodeStatus.RUNNING and record.phase is Phase.FORMING:
            yield f"{node} counts as running while a world is being formed"


def step_violations(before: MasterState, decision: Decision) -> Iterator[str]:
    """Contradictions between two states, and between a state and the messages about to be sent."""
    after = decision.state
    yield from state_violations(after)
    if after.record.round > before.record.round:
        yield from formed_violations(after.record, after.spec.nodes)
        yield from _unhealthy_members(before.record, after)
    was, now = before.record.sizing, after.record.sizing
    if now.generation < was.generation or (now.generation == was.generation and replace(now, fact=was.fact) != was):
        yield f"what is wanted went from {was} to {now}"
    if after.record.observed < before.record.observed:
        yield f"observed went back from {before.record.observed} to {after.record.observed}"
    if after.record.round < before.record.round:
        yield f"round went back from {before.record.round} to {after.record.round}"
    if before.record.round == after.record.round and before.record.world != after.record.world:
        yield f"the world of round {after.record.round} changed after it was formed"
    old, new = before.record.settings, after.record.settings
    if new.number < old.number or (new.number == old.number and new != old):
        yield f"settings {old} are followed by {new}"
    if before.record.phase is Phase.ENDED and after.record != before.record:
        yield "the record changed after the job had ended"
    for effect in decision.effects:
        if isinstance(effect, TellNode) and isinstance(effect.message, StartRound):
            # If several events are handled together, a later one may end the world that an earlier one has formed: a
            # stop order follows then.
            recorded = [one.world for one in (before.record, after.record) if one.phase is Phase.RUNNING]
            if effect.message.world not in recorded:
                yield f"start order for a world that is not the recorded one: round {effect.message.world.round}"
            if effect.message.world.settings.number > after.record.settings.number:
                yield f"round {effect.message.world.round} begins with settings that are not recorded"
            member = effect.message.world.member(effect.node)
            if member is None and after.spec.independent:
                continue  # its workers were not stopped, and must learn that they have no place
            if member is None or member.incarnation != effect.incarnation:
                yield f"start order to {effect.node}, which has no place in round {effect.message.world.round}"
