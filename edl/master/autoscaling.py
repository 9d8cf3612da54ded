"""Connects the autoscale policy to the Master: describes the world to the policy, and requests the sizes that it
chooses."""

from __future__ import annotations

from edl.master import resizing
from edl.master.policies.autoscale import CurrentWorld, handle_pace
from edl.master.state import MasterState, NodeEntry, Phase
from edl.master.turn import MasterTurn
from edl.rendezvous.phrases import count
from edl.wire.messages import Pace
from edl.wire.purpose import Purpose
from edl.wire.records import World
from edl.wire.scale_requests import Resize

WHO = "autoscale"
"""The requester's name in its size requests."""


def paced(turn: MasterTurn, entry: NodeEntry, message: Pace) -> None:
    """Handle a node's report of its step time: measure, and request another size if the policy chooses one."""
    reported = {"step_s": message.step_s, "commit": message.commit, "holders": message.holders}
    entry = turn.update(entry, paced_round=message.round, **reported)
    rules, world = turn.spec.autoscale, turn.record.world
    running = turn.record.phase is Phase.RUNNING and world is not None and message.round == world.round
    if not rules.enabled or not running or world is None or turn.member(entry) is None:
        return
    place = _place(turn, world)
    result = handle_pace(turn.scaling, turn.record.learnt, place, entry.info.node, message.step_s, rules, turn.now_s)
    turn.scaling = result.memory
    if result.learnt != turn.record.learnt:
        turn.write(learnt=result.learnt)
    if result.size:
        resizing.decide(turn, Resize(result.size, WHO, result.memory.reason))


def proposal(state: MasterState) -> tuple[int, str]:
    """The proposed size (0: none) and the reason, for the status."""
    record, memory = state.record, state.scaling
    if not state.spec.autoscale.enabled or record.phase is Phase.ENDED:
        return 0, ""
    if record.sizing.suspended:
        return 0, "the job is suspended"
    if record.phase is not Phase.RUNNING or record.world is None:
        return 0, "no world runs"
    if memory.round != record.round:
        nodes = count(len(record.world.members))
        return 0, f"{nodes}: not measured yet (workers with edl.State report their pace while they commit)"
    return memory.proposal, memory.reason


def _place(turn: MasterTurn, world: World) -> CurrentWorld:
    """The running world as the policy sees it."""
    settings, bounds = turn.record.settings, turn.bounds
    staying = [entry for entry in turn.members() if not turn.excluded(entry) and not entry.draining]
    spares = [entry for entry in turn.ready() if turn.member(entry) is None]
    batch = settings.global_batch
    return CurrentWorld(
        round=world.round,
        slots={member.node: member.slots for member in world.members},
        lowest=bounds.lowest,
        highest=bounds.highest,
        unit=bounds.unit,
        reach=bounds.highest if turn.spec.size_owner else len(staying) + len(spares),
        measure=f"{batch or 'worker steps'}/{settings.local_batch}",
        noun="samples/s" if batch else "worker steps/s",
        share=batch / world.size if batch else 1.0,
        unsettled=_unsettled(turn),
        lacking=_lacking(turn, world),
        advice=_advice(turn),
    )


def _unsettled(turn: MasterTurn) -> str:
    """Why the current pace is not typical of the size; empty if it is."""
    if turn.record.sizing.suspended:
        return "the job is being suspended"
    if turn.record.done:
        return "the workers finish"
    if turn.record.rejoins and not turn.underway:
        return "workers are still starting"
    if turn.agreement is not None and turn.agreement.purpose in (Purpose.SWITCH, Purpose.KILL):
        return f"the world is being changed ({turn.agreement.reason})"
    return ""


def _lacking(turn: MasterTurn, world: World) -> str:
    """Why no other size may be proposed now; empty if one may."""
    nodes, sizing = len(world.members), turn.record.sizing
    if turn.record.observed < sizing.generation:
        return f"a resize is under way: {resizing.standing(turn).waiting or 'nearly done'}"
    wanted = sizing.requested(turn.spec.nodes)
    if wanted > nodes:
        return f"{count(wanted - nodes, 'more node')} to come"
    if not turn.bounds.lowest <= nodes <= turn.bounds.highest:
        return "the size is outside the bounds"
    return ""


def _advice(turn: MasterTurn) -> str:
    """Who decides instead of the policy; empty if the policy decides."""
    if turn.spec.sized_outside:
        return f"{turn.spec.size_owner} decides"
    sizing = turn.record.sizing
    if sizing.desired and not sizing.automatic:
        return f"{count(sizing.desired)} requested by hand: edl scale auto gives the size back to the policy"
    return ""
