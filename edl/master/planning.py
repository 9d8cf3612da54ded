"""Changes at a step boundary agreed with all workers, without an interruption.

``Hold`` asks every worker for its newest commit and keeps it from passing its next boundary. No worker can then be more
than one step beyond the highest answer, so the boundary of that step is one that all reach and none has passed: there
the change happens. This takes one round trip; nothing is written to the store until the answers are in, and if any part
fails, the change becomes an ordinary interruption.
"""

from __future__ import annotations

import dataclasses

from edl.master import away, hyper
from edl.master.events import Kind
from edl.master.forming import names, stop_world, switch_world, try_to_form
from edl.master.resting import is_last_holder, write_failed
from edl.master.restoring import copy_holders
from edl.master.sizing import Departing
from edl.master.state import TO_NOBODY, Agreement, MasterState, NodeEntry, NodeStatus, Phase
from edl.master.turn import MasterTurn
from edl.rendezvous.parting import Saver, saver
from edl.types import NodeId
from edl.wire.messages import Asked, Boundary, Hold, KeepWith, Kept, Leaving, NotKept, NotLogged, Switch, Underway
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, Version
from edl.wire.scale_requests import DrainMode

_WEIGHT = {Purpose.SET: 0, Purpose.SAVE: 1, Purpose.SWITCH: 2, Purpose.KILL: 3}
"""Priorities of requests while a boundary is being agreed on; the lower one gives way. Settings are tried again later.
With KILL a checkpoint is written at the boundary, with SWITCH none."""


NOT_SAVED = ": not saved, "
"""Separates a request for a checkpoint that is given up from the reason."""


def change(turn: MasterTurn, reason: str) -> None:
    """Replace the running world: at a step boundary if its workers can be held there, else at once."""
    if turn.underway:
        agree(turn, Purpose.SWITCH, reason)
    else:
        stop_world(turn, reason)
        try_to_form(turn)


def agree(turn: MasterTurn, purpose: Purpose, reason: str) -> None:
    """Begin to agree with all members on a step boundary. A change of the world has priority over a save."""
    before = turn.agreement
    if before is not None and _WEIGHT[before.purpose] >= _WEIGHT[purpose]:
        return
    turn.agreements += 1
    until_s = turn.now_s + turn.spec.timeouts.boundary_s
    turn.agreement = Agreement(turn.agreements, purpose, reason, until_s)
    turn.reason = f"{reason}; agreeing on a step boundary"
    for entry in turn.members():
        turn.tell(entry, _hold(turn, turn.agreement))
    turn.wake_at(until_s)


def _hold(turn: MasterTurn, agreement: Agreement) -> Hold:
    return Hold(turn.record.round, agreement.number, binding=agreement.purpose is not Purpose.SAVE)


def answered(turn: MasterTurn, entry: NodeEntry, answer: Boundary) -> None:
    """A node reports its workers' newest commit; the last answer settles the agreement."""
    agreement, world = turn.agreement, turn.record.world
    if agreement is None or world is None or answer.hold != agreement.number or answer.round != turn.record.round:
        return
    answers = {**agreement.answers, entry.info.node: answer.commit}
    turn.agreement = dataclasses.replace(agreement, answers=answers)
    enough = len(answers) >= len(world.members)  # looking at all members after each answer would be quadratic
    if enough and set(answers) >= {member.node for member in world.members}:
        _settle(turn, agreement, max(answers.values()) + 1)


def _settle(turn: MasterTurn, agreement: Agreement, commit: int) -> None:
    order = Switch(turn.record.round, agreement.number, commit, agreement.purpose, agreement.reason)
    turn.agreement = None
    members = turn.members()
    if agreement.purpose is Purpose.SAVE:
        turn.note(Kind.BOUNDARY, f"{agreement.reason}: saving commit {commit}")
        turn.write(owed="")
        _wait_for_it(turn, commit)
    elif agreement.purpose is Purpose.SET:
        order = hyper.agreed(turn, agreement.number, commit, agreement.reason)
    else:
        ends = agreement.purpose is Purpose.KILL and turn.record.kill
        where = f": the job ends at commit {commit}" if ends else f" (at commit {commit})"
        switch_world(turn, dataclasses.replace(order, reason=agreement.reason + where))
        return
    for entry in members:
        turn.tell(entry, order)


def _wait_for_it(turn: MasterTurn, commit: int) -> None:
    """Let nodes that must not leave before a checkpoint is complete wait for this one, or an earlier one of this
    world."""
    turn.saving = True
    world = turn.record.world
    if world is not None:
        marked = tuple(
            dataclasses.replace(one, era=world.era, commit=commit)
            if one.mode is DrainMode.MUST and not (one.commit and one.era == world.era)
            else one
            for one in turn.record.departing
        )
        if marked != turn.record.departing:
            turn.write(departing=marked)


def look_at_agreement(turn: MasterTurn) -> None:
    """Check an agreement in progress: it is abandoned when the time is up."""
    agreement = turn.agreement
    if agreement is None:
        return
    if not turn.underway:
        _give_up(turn, agreement)
    elif turn.now_s >= agreement.until_s:
        silent = [e.info.node for e in turn.members() if e.info.node not in agreement.answers]
        why = f"no answer from {', '.join(silent[:5])} within {turn.spec.timeouts.boundary_s:g} s"
        if agreement.purpose is Purpose.SAVE:
            turn.note(Kind.BOUNDARY, f"{agreement.reason}{NOT_SAVED}{why}")
            turn.write(owed="")
            _give_up(turn, agreement)
        elif agreement.purpose is Purpose.SET:
            hyper.failed(turn, agreement.reason, why)
            _give_up(turn, agreement)
        else:
            stop_world(turn, f"{agreement.reason}; {why}")
    else:
        turn.wake_at(agreement.until_s)


def _give_up(turn: MasterTurn, agreement: Agreement) -> None:
    """Abandon an agreement: workers that are held may continue."""
    turn.agreement = None
    for entry in turn.members():
        turn.tell(entry, Switch(turn.record.round, agreement.number, 0, Purpose.SAVE, agreement.reason))


def ask_again(turn: MasterTurn, entry: NodeEntry, in_doubt: bool) -> None:
    """A member has reconnected; its workers have continued meanwhile, so its answer is void. As that answer may still
    be on its way, ask all members again under a new number."""
    hyper.remind(turn, entry, in_doubt)
    agreement = turn.agreement
    if agreement is not None and turn.underway:
        turn.agreements += 1
        turn.agreement = dataclasses.replace(agreement, number=turn.agreements, answers={})
        for member in turn.members():
            turn.tell(member, _hold(turn, turn.agreement))


def consider_stop(turn: MasterTurn) -> None:
    """End the world of a job that has been asked to stop, even if an earlier Master was asked: at a step boundary, with
    a checkpoint, if its workers can be held there."""
    if not turn.record.kill:
        return
    if turn.underway:
        agree(turn, Purpose.KILL, _stop_reason(turn))
    elif settled(turn):
        _stop_without_checkpoint(turn)


def _stop_without_checkpoint(turn: MasterTurn) -> None:
    stop_world(turn, f"{_stop_reason(turn)}: the job ends without a new checkpoint")


def _stop_reason(turn: MasterTurn) -> str:
    return f"stop requested by {turn.record.kill}"


def consider_checkpoint(turn: MasterTurn) -> None:
    """Have the world write an outstanding checkpoint, even if an earlier Master was asked for it."""
    if turn.record.owed and turn.underway and turn.agreement is None and not turn.record.done:
        agree(turn, Purpose.SAVE, turn.record.owed)


def consider_settings(turn: MasterTurn) -> None:
    """Apply manually changed settings, unless the world is about to change anyway."""
    reason = turn.record.settings_request or "settings changed by hand"
    if hyper.wants_boundary(turn):
        agree(turn, Purpose.SET, reason)
    elif hyper.wants_world(turn):
        stop_world(turn, reason)


def settled(turn: MasterTurn) -> bool:
    """Whether the world may be changed: workers that can be held get some time to start training first."""
    until_s = turn.formed_at_s + turn.spec.timeouts.boundary_s
    if not turn.record.rejoins or turn.underway or turn.now_s >= until_s:
        return True
    turn.wake_at(until_s)
    return False


def underway(turn: MasterTurn, entry: NodeEntry, message: Underway) -> None:
    """All workers of a node train; once this is so for all nodes, the world is underway."""
    if message.round != turn.record.round or turn.member(entry) is None or entry.underway:
        return
    turn.update(entry, underway=True, how=message.how)
    if not turn.record.rejoins:
        turn.write(rejoins=True)
    if turn.underway:
        ways = sorted({member.how for member in turn.members()})
        turn.note(Kind.WORLD_UNDERWAY, f"round {turn.record.round} is underway: {'; '.join(ways)}")
        away.dismiss(turn, "the others continue without this node")


def drain(turn: MasterTurn, entry: NodeEntry, leaving: Leaving) -> bool:
    """A node wants to leave and can wait. False when there is nothing to wait for."""
    reason = leaving.reason
    if turn.member(entry) is not None and _is_hurried(turn, leaving):
        entry = turn.update(entry, hurried=True)
    resting = turn.record.phase is Phase.FORMING and bool(turn.record.sizing.suspended)
    if (resting and is_last_holder(turn, entry)) or _gives_state(turn, entry):
        turn.update(entry, draining=True)
        return True
    if turn.member(entry) is None or entry.info.node in turn.record.done:
        return False
    forming = turn.record.phase is Phase.FORMING and not resting
    if entry.draining or (forming and (turn.at_boundary or turn.record.rejoins)):
        # The next world may begin from this node's state.
        turn.update(entry, draining=True)
        return True
    if not turn.underway and settled(turn):
        return False
    turn.update(entry, draining=True)
    turn.note(Kind.NODE_LEAVING, f"node {entry.info.node} leaves: {reason}", entry.info.node)
    if turn.underway:
        agree(turn, Purpose.SWITCH, f"node {entry.info.node} leaves: {reason}")
    return True


def see_off(turn: MasterTurn) -> None:
    """Let members that want to leave go at a step boundary, even if they asked an earlier Master, or before the world
    was underway."""
    going = [entry for entry in turn.members() if entry.draining and entry.underway]
    if going and not turn.record.done and (turn.underway or settled(turn)):
        change(turn, f"{names(going)} to leave")


def _is_hurried(turn: MasterTurn, leaving: Leaving) -> bool:
    """Whether other holders of the whole state must write it, because the node lacks the time."""
    members = turn.members()
    if len(members) < 2 or any(holding.shards > 1 for member in members for holding in member.holdings):
        return False
    step_s = max(member.step_s for member in members)
    return saver(leaving.grace_s, step_s, turn.save_s) is Saver.OTHERS


def _gives_state(turn: MasterTurn, entry: NodeEntry) -> bool:
    """Whether the running world gets its state from this node, which is not a member."""
    world = turn.record.world
    if world is None or turn.record.phase is not Phase.RUNNING or turn.underway or turn.record.done:
        return False
    giver = any(source.node == entry.info.node for source in world.sources)
    return turn.record.rejoins and giver and turn.member(entry) is None and entry.status is NodeStatus.READY


def asked(turn: MasterTurn, message: Asked) -> None:
    """Handle the kill switch, the save switch, or a change of settings."""
    if turn.record.phase is Phase.ENDED or turn.record.kill:
        return
    if message.purpose is Purpose.KILL:
        turn.write(kill=message.by)
        turn.agreement = None
        if turn.underway:
            consider_stop(turn)  # the history gets one line, once the commit is known
        elif turn.record.phase is Phase.RUNNING:
            _stop_without_checkpoint(turn)
        else:
            turn.note(Kind.BOUNDARY, f"{_stop_reason(turn)}: the job ends once its workers have stopped")
    elif message.purpose is Purpose.SAVE:
        wanted = f"checkpoint requested by {message.by}"
        if turn.underway:
            turn.write(owed=wanted)  # until it is agreed on, perhaps in another world or by another Master
            agree(turn, Purpose.SAVE, wanted)
        elif turn.spec.independent:
            turn.note(Kind.BOUNDARY, f"{wanted}: the workers do not step together")
        else:  # a file asks as soon as its own node trains
            turn.note(Kind.BOUNDARY, f"{wanted}: it is written once a world with edl.State is in training")
            turn.write(owed=wanted)
    elif message.purpose is Purpose.SET:
        hyper.asked(turn, message)


def kept(turn: MasterTurn, entry: NodeEntry, message: Kept) -> None:
    """A commit has been written to the checkpoint directory, or could not be."""
    version, node = message.version, entry.info.node
    if message.error:
        text = f"commit {version.commit} could not be written: {message.error}"
        if write_failed(turn, node, version):
            turn.reason = text  # a job may be suspended for weeks: its history gets one line
        else:
            turn.note(Kind.STATE, text, node, severity="warning")
        newest = max((other.stored for other in turn.nodes.values()), default=NO_STATE)
        if version > newest and not _left(turn, version):
            turn.unwritten = version, f"commit {version.commit} could not be written by node {node}: {message.error}"
        if turn.record.phase is not Phase.ENDED:
            _keep_those_that_wait(turn, message)
        return
    turn.save_s = message.took_s or turn.save_s
    if version >= turn.unwritten[0]:
        turn.unwritten = NO_STATE, ""
    lies_stored(turn, version, message.sharded)
    if version > turn.record.saved and turn.record.phase is not Phase.ENDED:
        turn.write(saved=version)
    turn.note(Kind.STATE, f"commit {version.commit} is complete in {message.where}", node)


def _left(turn: MasterTurn, version: Version) -> bool:
    """Whether the current world began from an earlier commit than this one of an earlier era."""
    world = turn.record.world
    return world is not None and version.era < world.era and version > world.restore


def not_kept(turn: MasterTurn, entry: NodeEntry, message: NotKept | NotLogged) -> None:
    """A node has no memory for commits or no space for logs, or has it again: show it in status and history."""
    why = message.why
    if isinstance(message, NotLogged):
        turn.update(entry, not_logged=why)
    elif why != entry.not_kept:
        node, what = entry.info.node, f"not kept in memory: {why}" if why else "kept in memory again"
        turn.update(entry, not_kept=why)
        turn.note(Kind.STATE, f"commits of node {node} are {what}", node)


def lies_stored(turn: MasterTurn, version: Version, sharded: bool) -> None:
    """Note that a commit is complete in the checkpoint directory, which all nodes share."""
    for other in list(turn.nodes.values()):
        if other.stored < version:
            turn.update(other, stored=version, stored_sharded=sharded)


def newest_stored(state: MasterState | MasterTurn) -> Version:
    """The newest checkpoint: as far as the nodes know, or else as was reported to this Master or an earlier one."""
    known = max((entry.stored for entry in state.nodes.values()), default=NO_STATE)
    return known if known != NO_STATE else state.record.saved


def _keep_those_that_wait(turn: MasterTurn, failed: Kept) -> None:
    """Nodes that were to leave after this checkpoint stay, since it failed."""
    stay = [one for one in turn.record.departing if one.commit and Version(one.era, one.commit) <= failed.version]
    stay = [one for one in stay if one.mode is DrainMode.MUST and not _was_ordered_to_leave(turn, one)]
    if stay:
        left = tuple(one for one in turn.record.departing if one not in stay)
        turn.write(departing=left)
        who, stays = ", ".join(one.node for one in stay), "stays" if len(stay) == 1 else "stay"
        text = f"{who} {stays}: the checkpoint could not be written ({failed.error})"
        turn.note(Kind.DRAIN_FAILED, text, stay[0].node if len(stay) == 1 else "")


def _was_ordered_to_leave(turn: MasterTurn, one: Departing) -> bool:
    entry = turn.current(one.node, one.incarnation)
    return entry is not None and entry.orders.depart


def assign_copy_holders(turn: MasterTurn) -> None:
    """Order each member to send copies of its commits to a node, unless it has that order."""
    members = turn.members()
    if not any(entry.underway for entry in members):
        return  # a plain script makes no commits
    spares = [entry for entry in turn.ready() if turn.member(entry) is None]
    for node, copy_holder in copy_holders(members, spares, turn.spec.replicas.nodes).items():
        entry = turn.nodes[node]
        info = copy_holder.info if copy_holder is not None else None
        copies = info.incarnation if info is not None else TO_NOBODY
        if entry.attached and entry.orders.copies != copies:
            name = info.node if info is not None else NodeId("")
            entry = turn.ordered(turn.update(entry, copy_holder=name), copies=copies)
            turn.tell(entry, KeepWith(info.node, info.host, info.state_port) if info is not None else KeepWith(name))
