"""The Master's state as shown by ``edl status``, answers to requests, and the lines of the history that programs
parse."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edl.master import autoscaling, checking, hyper, planning, resizing
from edl.master.events import Kind
from edl.master.policies.health import KnownHealth
from edl.master.policies.slots import KnownDrops
from edl.master.state import Agreement, MasterState, NodeEntry, NodeStatus, Phase, Record
from edl.master.turn import MasterTurn
from edl.rendezvous.parting import need_s
from edl.types import NodeId
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, Version, World
from edl.wire.scale_requests import ScaleView
from edl.wire.status import Answer, DroppedSlot, HistoryEntry, JobStatus, NodeView

SHOWN = 10
"""Number of entries of the history that are part of the status."""
_SAVING = re.compile(r".*: saving commit (\d+)", re.DOTALL)
_COMPLETE = re.compile(r"commit (\d+) is complete in (.*)", re.DOTALL)
_SETTINGS = re.compile(r"settings \d+ from commit (\d+): .*", re.DOTALL)
_STATE = Kind.STATE.value
_FAILED = re.compile(r"commit (\d+) could not be written: (.*)", re.DOTALL)


def job_status(
    state: MasterState, master: NodeId, history: tuple[HistoryEntry, ...], revision: int = 0, now_s: float = 0.0
) -> JobStatus:
    """Everything that ``edl status`` shows. ``history``: the whole history. ``revision``: store revision of the size.
    ``now_s``: the Master's clock."""
    record = state.record
    known, drops = KnownHealth(record.health), KnownDrops(record.dropped)
    saved = planning.newest_stored(state)
    paced = [entry for entry in state.nodes.values() if entry.paced_round == record.round]
    # A world that stops may have lost some of the holders that its nodes have counted.
    kept = [] if state.spec.independent or record.phase is not Phase.RUNNING else [one.holders for one in paced]
    return JobStatus(
        job=state.spec.job,
        phase=_phase(record),
        round=record.round,
        world_size=record.world.size if record.world and record.phase is Phase.RUNNING else 0,
        reason=state.reason or record.reason,
        nnodes=str(record.sizing.bounds(state.spec.nodes)),
        fault_tolerance=state.spec.fault_tolerance.value,
        restarts_used=min(record.restarts, state.spec.max_restarts),
        restarts_allowed=state.spec.max_restarts,
        master=master,
        nodes=tuple(
            _node_view(entry, record, out=_why_out(entry, state, known, drops))
            for entry in sorted(state.nodes.values(), key=lambda entry: _order(entry, record.world))
        ),
        history=history[-SHOWN:],
        failures=record.failures,
        era=record.world.era if record.world else 0,
        restored=record.world.restore if record.world else NO_STATE,
        saved=saved,
        saved_in=_place(saved, history),
        boundary=_boundary(state.agreement, record.world),
        kill=record.kill,
        flaws=tuple(flaw.text for flaw in record.flaws),
        warnings=_warnings(state),
        alarms=record.alarms,
        hang_timeout="" if state.spec.independent else str(state.spec.timeouts.hang),
        health=checking.views(state, now_s),
        settings=record.settings,
        scale=_scale(state, revision, now_s),
        dropped=tuple(
            DroppedSlot(
                *(one.node, one.host, one.slot, one.device, one.why, one.round),
                host_id=one.host_id,
                by=one.by.value,
            )
            for one in record.dropped
        ),
        commit=max((entry.commit for entry in paced), default=0),
        holders=min((number for number in kept if number), default=0),
    )


def _warnings(state: MasterState) -> tuple[str, ...]:
    """Current problems with checkpoints, commits in memory, and logs."""
    without = {node: entry.not_kept for node, entry in sorted(state.nodes.items()) if entry.not_kept}
    unkept = (f"commits of node {node} are not kept in memory: {why}" for node, why in without.items())
    unlogged = (f"node {node}: {entry.not_logged}" for node, entry in sorted(state.nodes.items()) if entry.not_logged)
    return tuple(text for text in (state.unwritten[1], *unkept, *unlogged) if text)


def _why_out(entry: NodeEntry, state: MasterState, known: KnownHealth, drops: KnownDrops) -> str:
    """The state of a node that takes no part: ``cordoned``, also if it has no usable slot, or what a health check has
    found; empty: it may take part."""
    record, info = state.record, entry.info
    if record.sizing.excludes(info.node) or not drops.places(info, state.spec.replicas):
        return "cordoned"
    check = state.health.check
    if check is not None and info.node in check.due and entry.status is NodeStatus.READY:
        return "checking"
    verdict = known.verdict(info)
    return verdict.fitness.value if verdict is not None and verdict.excluded else ""


def _phase(record: Record) -> str:
    resting = record.phase is Phase.FORMING and record.sizing.suspended
    return "suspended" if resting else record.phase.value


def _scale(state: MasterState, revision: int, now_s: float) -> ScaleView:
    record, spec = state.record, state.spec.nodes
    sizing, bounds = record.sizing, record.sizing.bounds(spec)
    running = record.phase is Phase.RUNNING and record.world is not None
    proposal, why = autoscaling.proposal(state)
    step_s = max((entry.step_s for entry in state.nodes.values()), default=0.0)
    return ScaleView(
        minimum=bounds.minimum,
        maximum=bounds.maximum,
        unit=bounds.unit,
        desired=sizing.target(spec),
        nodes=len(record.world.members) if running and record.world is not None else 0,
        revision=revision,
        generation=sizing.generation,
        observed=record.observed,
        by=sizing.by,
        reason=sizing.reason,
        suspended=bool(sizing.suspended),
        cordoned=tuple(one.node for one in sizing.cordoned),
        owner=state.spec.size_owner,
        waiting="" if record.phase is Phase.ENDED else resizing.standing(MasterTurn(state, now_s)).waiting,
        need_s=need_s(step_s, state.save_s),
        proposal=proposal,
        proposal_reason=why,
        asked=sizing.desired,
    )


def _order(entry: NodeEntry, world: World | None) -> tuple[int, int]:
    return (_position(entry, world) % 1_000_000, entry.joined)


def _position(entry: NodeEntry, world: World | None) -> int:
    member = world.member(entry.info.node) if world else None
    if world is None or member is None or member.incarnation != entry.info.incarnation:
        return -1
    return world.position(entry.info.node)


def _node_view(entry: NodeEntry, record: Record, *, out: str) -> NodeView:
    world, running = record.world, record.phase is Phase.RUNNING
    position = _position(entry, world)
    member = world.members[position] if world and position >= 0 else None
    spare = running and entry.status is NodeStatus.READY and member is None
    limit = entry.hang_limit
    paced = running and member is not None and entry.paced_round == record.round
    outside = out if not (running and member is not None) else ""
    shown = outside or ("spare" if spare else entry.status.value)
    return NodeView(
        node=entry.info.node,
        host=entry.info.host,
        slots=entry.info.slots,
        state=shown,
        attached=entry.attached,
        position=position,
        first_rank=member.first_rank if member else -1,
        underway=entry.underway,
        how=entry.how if entry.underway else "",
        draining=entry.draining,
        index=entry.info.index,
        places=member.used if member else (),
        spare_slots=entry.info.spare_slots,
        step_s=entry.step_s if paced else 0.0,
        members=entry.info.members,
        ranks=entry.ranks if paced else (),
        hang_limit_s=limit.limit_s if limit is not None else 0.0,
        hang_pauses=limit.pauses if limit is not None else 0,
        hang_needed=limit.needed if limit is not None else 0,
    )


def _boundary(agreement: Agreement | None, world: World | None) -> str:
    if agreement is None:
        return ""
    asked = len(world.members) if world else 0
    # A job is suspended in the same way as it is ended, so "kill" would alarm its user.
    purpose = "stop" if agreement.purpose is Purpose.KILL else agreement.purpose.value
    return f"{purpose}: {agreement.reason} ({len(agreement.answers)} of {asked} nodes have answered)"


def _place(saved: Version, history: Sequence[HistoryEntry]) -> str:
    """The location of this checkpoint according to the history; empty: unknown."""
    for entry in reversed(history) if saved.commit else ():
        found = complete(entry)
        if found is not None and found[0] == saved.commit:
            return found[1]
    return ""


_BY_SCRIPT = "with parameter servers it is the script that saves (ps.save()), or --ps-save-every"


# --- switches --------------------------------------------------------------------------------------------------------


def reply(state: MasterState, purpose: Purpose, checkpoint_dir: str | None, request: str = "") -> Answer:
    """The answer to a request for a checkpoint, the end of the job, or other settings. ``checkpoint_dir``: empty: the
    job has none; None: unknown. ``request``: the settings, for ``Purpose.SET``."""
    record = state.record
    underway = MasterTurn(state, now_s=0.0).underway
    keep = "and nothing could be written: it has no --checkpoint-dir"
    if record.phase is Phase.ENDED:
        return Answer(f"the job has ended: {record.reason}", ok=False)
    if purpose is Purpose.KILL:
        if record.kill:
            return Answer(f"the job is already being stopped by {record.kill}", ok=True)
        if underway and checkpoint_dir == "":
            return Answer(f"the job would lose its state, {keep}. Its launchers end on Ctrl-C (SIGINT)", ok=False)
        if state.spec.independent:
            return Answer(f"the job ends without a new checkpoint: {_BY_SCRIPT}", ok=True)
        if not underway:
            return Answer("the job ends without a new checkpoint: no world with edl.State is in training", ok=True)
        return Answer("the job ends at the next step boundary, with a checkpoint", ok=True)
    if purpose is Purpose.SET:
        return hyper.reply(state, underway, request)
    if purpose is not Purpose.SAVE:
        return Answer(f"{purpose.value} cannot be requested", ok=False)
    if record.kill:
        return Answer(f"the job is being stopped by {record.kill}", ok=False)
    if state.spec.independent:
        return Answer(f"not for a job with parameter servers: {_BY_SCRIPT}", ok=False)
    if not underway:
        now = f"the job is {record.phase.value}: {state.reason or record.reason}"
        return Answer(f"no world with edl.State is in training, so there is nothing to save ({now})", ok=False)
    if checkpoint_dir == "":
        return Answer(f"the job was asked for a checkpoint, {keep}", ok=False)
    if state.agreement is not None and state.agreement.purpose not in (Purpose.SAVE, Purpose.SET):
        return Answer(f"the world is being changed ({state.agreement.reason}). Retry in a few seconds", ok=False)
    return Answer("a checkpoint is written at the next step boundary", ok=True)


def saving(entry: HistoryEntry) -> int | None:
    """The number of the commit that will be saved, if this entry announces one; otherwise None."""
    found = _SAVING.fullmatch(entry.text) if entry.kind == Kind.BOUNDARY.value else None
    return int(found[1]) if found else None


def changed(entry: HistoryEntry) -> int | None:
    """The commit from which new settings apply, if this entry announces them; otherwise None."""
    found = _SETTINGS.fullmatch(entry.text) if entry.kind == Kind.SETTINGS.value else None
    return int(found[1]) if found else None


def complete(entry: HistoryEntry) -> tuple[int, str] | None:
    """Number and location of a complete checkpoint, if this entry reports one; otherwise None."""
    found = _COMPLETE.fullmatch(entry.text) if entry.kind == _STATE else None
    return (int(found[1]), found[2]) if found else None


def unwritten(entry: HistoryEntry) -> tuple[int, str] | None:
    """Number of a commit that could not be written and the reason, if this entry reports one; otherwise None."""
    found = _FAILED.fullmatch(entry.text) if entry.kind == Kind.STATE.value else None
    return (int(found[1]), found[2]) if found else None
