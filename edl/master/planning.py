"""Changes that nobody is hurt by: agreed with all workers at a step boundary.

``Hold`` asks every worker how far it is and keeps it from passing its next boundary. No worker can then be further than
one step beyond the highest answer, so that step's boundary is one that all reach and none has passed: there the
change happens. One round trip; nothing is written to the store until the answers are in, and if any part of it fails
the change becomes an interruption like any other.
"""

from __future__ import annotations

import dataclasses

from edl.config import FaultTolerance
from edl.master import hyper
from edl.master.events import Kind
from edl.master.forming import at_boundary, dismiss, names, stop_world, try_to_form
from edl.master.restoring import keepers
from edl.master.state import Agreement, NodeEntry, NodeStatus, Phase
from edl.master.turn import Turn
from edl.wire.messages import Asked, Boundary, Hold, KeepWith, Kept, Purpose, Switch, Underway

_WEIGHT = {Purpose.SET: 0, Purpose.SAVE: 1, Purpose.SWITCH: 2, Purpose.KILL: 2}
"""Which wish gives way to which while a boundary is being agreed on. Settings are tried again after that."""


def change(turn: Turn, reason: str) -> None:
    """Replace the running world: at a step boundary if its workers can be held there, else at once."""
    if turn.underway:
        agree(turn, Purpose.SWITCH, reason)
    else:
        stop_world(turn, reason)
        try_to_form(turn)


def agree(turn: Turn, purpose: Purpose, reason: str) -> None:
    """Begin to agree with all members on a step boundary; a wish to change the world outweighs one to save."""
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


def _hold(turn: Turn, agreement: Agreement) -> Hold:
    return Hold(turn.record.round, agreement.number, binding=agreement.purpose is Purpose.SET)


def answered(turn: Turn, entry: NodeEntry, answer: Boundary) -> None:
    """A node says how far its workers are; the last one settles it."""
    agreement, world = turn.agreement, turn.record.world
    if agreement is None or world is None or answer.hold != agreement.number or answer.round != turn.record.round:
        return
    answers = {**agreement.answers, entry.info.node: answer.commit}
    turn.agreement = dataclasses.replace(agreement, answers=answers)
    if set(answers) >= {member.node for member in world.members}:
        _settle(turn, agreement, max(answers.values()) + 1)


def _settle(turn: Turn, agreement: Agreement, commit: int) -> None:
    order = Switch(turn.record.round, agreement.number, commit, agreement.purpose, agreement.reason)
    turn.agreement = None
    members = turn.members()
    if agreement.purpose is Purpose.SAVE:
        turn.note(Kind.BOUNDARY, f"{agreement.reason}: saving commit {commit}")
    elif agreement.purpose is Purpose.SET:
        order = hyper.agreed(turn, agreement.number, commit, agreement.reason)
    else:
        at_boundary(turn, f"{agreement.reason} (at commit {commit})")
    for entry in members:
        turn.tell(entry, order)


def look_at_agreement(turn: Turn) -> None:
    """Time has passed: an agreement that does not come about is given up."""
    agreement = turn.agreement
    if agreement is None:
        return
    if not turn.underway:
        _give_up(turn, agreement)
    elif turn.now_s >= agreement.until_s:
        silent = [e.info.node for e in turn.members() if e.info.node not in agreement.answers]
        why = f"no answer from {', '.join(silent[:5])} within {turn.spec.timeouts.boundary_s:g} s"
        if agreement.purpose is Purpose.SAVE:
            turn.note(Kind.BOUNDARY, f"{agreement.reason}: not saved, {why}")
            _give_up(turn, agreement)
        elif agreement.purpose is Purpose.SET:
            hyper.failed(turn, agreement.reason, why)
            _give_up(turn, agreement)
        else:
            stop_world(turn, f"{agreement.reason}; {why}")
    else:
        turn.wake_at(agreement.until_s)


def _give_up(turn: Turn, agreement: Agreement) -> None:
    """Nothing comes of it: whoever holds is to go on."""
    turn.agreement = None
    for entry in turn.members():
        turn.tell(entry, Switch(turn.record.round, agreement.number, 0, Purpose.SAVE, agreement.reason))


def ask_again(turn: Turn, entry: NodeEntry) -> None:
    """A member is back on the line; its workers have gone on meanwhile, so what it has answered is void."""
    hyper.remind(turn, entry)
    agreement = turn.agreement
    if agreement is not None and turn.underway:
        answers = {node: commit for node, commit in agreement.answers.items() if node != entry.info.node}
        turn.agreement = dataclasses.replace(agreement, answers=answers)
        turn.tell(entry, _hold(turn, agreement))


def consider_growth(turn: Turn) -> None:
    """Replace the running world by a larger one when ready newcomers allow it."""
    world = turn.record.world
    if world is None or turn.record.done or turn.spec.fault_tolerance is not FaultTolerance.ELASTIC:
        return
    if turn.agreement is not None or not _settled(turn) or _is_cut_to_size(turn):
        return
    newcomers = [entry for entry in turn.ready() if turn.member(entry) is None]
    size = turn.spec.nodes.fit(len(world.members) + len(newcomers))
    if not newcomers or size <= len(world.members):
        turn.grace_until_s = None
        return
    coming = (NodeStatus.WARMING, NodeStatus.PREPARING)
    warming = any(e.attached and e.registered and e.status in coming for e in turn.nodes.values())
    if warming and size < turn.spec.nodes.highest:
        if turn.grace_until_s is None:
            turn.grace_until_s = turn.now_s + turn.spec.timeouts.join_grace_s
        if turn.now_s < turn.grace_until_s:
            turn.wake_at(turn.grace_until_s)
            return
    change(turn, f"{names(newcomers)} joined: growing from {len(world.members)} to {size} nodes")


def consider_settings(turn: Turn) -> None:
    """Have the workers take up what has been changed by hand, unless the world is about to change anyway."""
    reason = turn.record.wish or "settings changed by hand"
    if hyper.wants_boundary(turn):
        agree(turn, Purpose.SET, reason)
    elif hyper.wants_world(turn):
        stop_world(turn, reason)


def _is_cut_to_size(turn: Turn) -> bool:
    """The state is sharded, and in memory it fits worlds of this size only: growing would throw it away. Not so with a
    checkpoint directory: there the workers write it at the boundary, and any size reads it."""
    members = turn.members()
    sharded = any(holding.shards > 1 for entry in members for holding in entry.holdings)
    return sharded and not any(entry.stored_sharded and entry.stored.commit for entry in members)


def _settled(turn: Turn) -> bool:
    """A world whose workers can be held is given time to come that far before it is changed again."""
    until_s = turn.formed_at_s + turn.spec.timeouts.boundary_s
    if not turn.record.rejoins or turn.underway or turn.now_s >= until_s:
        return True
    turn.wake_at(until_s)
    return False


def underway(turn: Turn, entry: NodeEntry, message: Underway) -> None:
    """All workers of a node train; once those of all nodes do, the world stands."""
    if message.round != turn.record.round or turn.member(entry) is None or entry.underway:
        return
    turn.update(entry, underway=True, how=message.how)
    if not turn.record.rejoins:
        turn.write(rejoins=True)
    if turn.underway:
        ways = sorted({member.how for member in turn.members()})
        turn.note(Kind.WORLD_UNDERWAY, f"round {turn.record.round} is underway: {'; '.join(ways)}")
        dismiss(turn, "the others go on without this node")


def drain(turn: Turn, entry: NodeEntry, reason: str) -> bool:
    """A node wants to leave, and can wait. False when there is nothing to wait for."""
    if turn.member(entry) is None or entry.info.node in turn.record.done:
        return False
    if entry.draining or (turn.record.phase is Phase.FORMING and turn.at_boundary):
        turn.update(entry, draining=True)
        return True
    if not turn.underway:
        return False
    turn.update(entry, draining=True)
    turn.note(Kind.NODE_LEAVING, f"node {entry.info.node} leaves: {reason}", entry.info.node)
    agree(turn, Purpose.SWITCH, f"node {entry.info.node} leaves: {reason}")
    return True


def asked(turn: Turn, message: Asked) -> None:
    """Somebody uses the kill switch or the save switch, or changes settings."""
    if turn.record.phase is Phase.ENDED or turn.record.kill:
        return
    if message.purpose is Purpose.KILL:
        reason = f"kill switch: {message.by}"
        turn.write(kill=reason)
        turn.note(Kind.BOUNDARY, reason)
        if turn.underway:
            turn.agreement = None
            agree(turn, Purpose.KILL, reason)
        elif turn.record.phase is Phase.RUNNING:
            stop_world(turn, reason)
    elif message.purpose is Purpose.SAVE:
        if turn.underway:
            agree(turn, Purpose.SAVE, f"checkpoint asked for by {message.by}")
        else:
            turn.note(Kind.BOUNDARY, f"checkpoint asked for by {message.by}: no world with edl.State is in training")
    elif message.purpose is Purpose.SET:
        hyper.asked(turn, message)


def kept(turn: Turn, entry: NodeEntry, message: Kept) -> None:
    """A commit has reached the checkpoint directory, or has not."""
    version, node = message.version, entry.info.node
    if message.error:
        turn.note(Kind.STATE, f"commit {version.commit} could not be written: {message.error}", node)
        return
    for other in list(turn.nodes.values()):
        turn.update(other, stored=max(other.stored, version))
    turn.note(Kind.STATE, f"commit {version.commit} is complete in {message.where}", node)


def assign_keepers(turn: Turn) -> None:
    """Tell each member where copies of its commits go, if that has changed."""
    members = turn.members()
    if not any(entry.underway for entry in members):
        return  # a plain script makes no commits
    for node, keeper in keepers(members, [e for e in turn.ready() if turn.member(e) is None]).items():
        entry = turn.nodes[node]
        name = keeper.info.node if keeper is not None else ""
        if entry.attached and entry.keeper != name:
            entry = turn.update(entry, keeper=name)
            info = keeper.info if keeper is not None else None
            turn.tell(entry, KeepWith(info.node, info.host, info.state_port) if info else KeepWith(entry.keeper))
