"""Checks the health of nodes, in the Master: who is checked and when, and what follows. The plan of a check is in
``edl.health.plan``, the rules are in ``edl.master.policies.health``.

Level-triggered: the record says what is known about nodes, and from this follows which ones must be checked before they
take part. Only nodes that run no worker are probed. A check that is interrupted (a new Master, a world that forms
without its nodes) has no effect and is begun anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from edl.health.plan import (
    BrokenLink,
    Conclusion,
    NodeResult,
    Pairing,
    conclude,
    first_round,
    second_round,
)
from edl.health.signs import hardware_sign
from edl.job_records import SlowNodes
from edl.master import dropping
from edl.master.events import Kind, Unfit
from edl.master.policies import health as policy
from edl.master.policies.health import HealthCheck
from edl.master.state import MasterState, NodeEntry, NodeStatus, Phase
from edl.master.turn import MasterTurn
from edl.rendezvous.phrases import count, listed, one_line
from edl.types import Incarnation, NodeId
from edl.wire.health import CheckHealth, HealthChecked, HealthPeer, HealthView
from edl.wire.health_records import Fitness, HealthVerdict
from edl.wire.records import Failure, NodeInfo

MARGIN_S = 5.0
"""Seconds after a probe's time limit until its node counts as silent."""
LONGEST_WHY = 400
"""Most characters of a reason, so that the record stays small."""
LONGEST_REMARK = 160
"""The same for a node that takes part, of which there may be a thousand."""
MOST_NOTED = 8
"""Most nodes, and most pairs, of a check that have an entry in the history each."""

# --- suspicion -------------------------------------------------------------------------------------------------------


def look_at_failure(turn: MasterTurn, entry: NodeEntry, failure: Failure) -> None:
    """Suspect the node of a failed worker if the failure looks like defective hardware."""
    why = hardware_sign(failure.exit_code, f"{failure.exception}\n{failure.tail}", failure.peer_loss)
    if why:
        suspect(turn, entry.info, why)


def suspect(turn: MasterTurn, info: NodeInfo, why: str) -> None:
    """Have a node checked before it takes part again, if checks after failures are on."""
    if turn.spec.health.mode.on_failure:
        request(turn, info, why)


def request(turn: MasterTurn, info: NodeInfo, why: str) -> None:
    """Have a node checked before it takes part again, whatever ``--health-check`` is: at once if it is outside the
    world, else when its world ends. What was known about it no longer holds."""
    if turn.record.phase is not Phase.ENDED:
        turn.write(health=policy.with_suspect(turn.record.health, info, _short(why)))


# --- the course of a check -------------------------------------------------------------------------------------------


def reported(turn: MasterTurn, entry: NodeEntry, message: HealthChecked) -> None:
    """Handle an agent's answer."""
    check = turn.health.check
    if check is None or (message.number, message.stage) != (check.number, check.stage):
        return
    node = entry.info.node
    pairing, answers = check.rounds[-1]
    if check.incarnations.get(node) != entry.info.incarnation or node not in pairing:
        return
    rounds = (*check.rounds[:-1], (pairing, {**answers, node: message}))
    _set(turn, dataclasses.replace(check, rounds=rounds))


def ask_again(turn: MasterTurn, entry: NodeEntry) -> None:
    """Repeat the order to a node that has reported ready during a check: it may have been lost with its stream."""
    check = turn.health.check
    if check is not None and _is_awaited(turn, check, entry.info.node):
        _order(turn, check, [entry.info.node])


def keep_going(turn: MasterTurn) -> None:
    """Advance the check in progress, and forget verdicts that have expired."""
    _expire(turn)
    check = turn.health.check
    if check is None:
        return
    if not any(turn.current(node, check.incarnations[node]) for node in check.due):
        abandon(turn)
        return
    missing = [node for node in check.rounds[-1][0] if _is_awaited(turn, check, node)]
    if missing and turn.now_s < check.until_s:
        turn.wake_at(check.until_s)
        return
    pairing, answers = check.rounds[-1]
    factor, reserve = turn.spec.health.factor, _reserve(turn, check)
    again: Pairing = {}
    if check.stage == 1:
        again = second_round(pairing, _results(turn, answers), reserve, factor, _gone(turn, check))
    if again:
        _begin_stage(turn, check, again)
    else:
        _finish(turn, check)


def consider(turn: MasterTurn) -> None:
    """While a world runs: check nodes outside it that must be checked before they can join."""
    if not turn.checks_health:
        return
    waiting = turn.unchecked()
    if turn.health.check is not None or not waiting or turn.record.sizing.suspended or turn.record.done:
        if turn.health.due_since_s is not None:
            turn.health = dataclasses.replace(turn.health, due_since_s=None)
        return
    since_s = turn.now_s if turn.health.due_since_s is None else turn.health.due_since_s
    turn.health = dataclasses.replace(turn.health, due_since_s=since_s)
    until_s = since_s + turn.spec.timeouts.join_grace_s
    others_come = any(
        one.attached and one.registered and one.status is NodeStatus.WARMING for one in turn.nodes.values()
    )
    if others_come and turn.now_s < until_s:
        turn.wake_at(until_s)
        return
    begin(turn, waiting)


def holds_up(turn: MasterTurn, waiting: Sequence[NodeEntry], nodes: int) -> bool:
    """Whether the next world waits for a check; begins it if necessary. ``waiting``: ready nodes that must be checked.
    ``nodes``: size of a world without them, 0: there is none.

    The first world waits for one check, and so does a world that replaces one with a suspect. Nodes that are merely new
    hold up no world that can form without them.
    """
    check = turn.health.check
    wanted = [e for e in waiting if turn.record.world is None or turn.member(e) is not None]
    if check is not None:
        if nodes and not {entry.info.node for entry in wanted} & set(check.due):
            return False
    else:
        if not waiting or (nodes and (not wanted or turn.health.checked_s >= turn.forming_since_s)):
            return False
        check = begin(turn, waiting)
    turn.reason = f"{turn.record.reason}; checking the health of {listed(check.due)}"
    turn.wake_at(check.until_s)
    return True


def begin(turn: MasterTurn, waiting: Sequence[NodeEntry]) -> HealthCheck:
    """Begin a check of these nodes. An odd number gets a witness, a single node two, if there are ready ones."""
    due = sorted(waiting, key=lambda entry: entry.joined)
    witnesses = turn.ready()[: 2 if len(due) == 1 else len(due) % 2]
    number = turn.record.health.checks + 1
    turn.write(health=dataclasses.replace(turn.record.health, checks=number))
    names = tuple(entry.info.node for entry in due)
    check = HealthCheck(number, 0, 0.0, names, {}, ())
    return _begin_stage(turn, check, first_round([entry.info.node for entry in (*due, *witnesses)]))


def abandon(turn: MasterTurn) -> None:
    """Forget the check in progress. Its nodes are checked later if they still must be."""
    if turn.health.check is not None:
        turn.health = dataclasses.replace(turn.health, check=None, due_since_s=None)


def _set(turn: MasterTurn, check: HealthCheck) -> None:
    turn.health = dataclasses.replace(turn.health, check=check)


def _begin_stage(turn: MasterTurn, before: HealthCheck, pairing: Pairing) -> HealthCheck:
    incarnations: dict[NodeId, Incarnation] = dict(before.incarnations)
    for name in pairing:
        node = NodeId(name)
        if node in turn.nodes:
            incarnations.setdefault(node, turn.nodes[node].info.incarnation)
    check = dataclasses.replace(
        before,
        stage=before.stage + 1,
        until_s=turn.now_s + turn.spec.health.timeout_s + MARGIN_S,
        incarnations=incarnations,
        rounds=(*before.rounds, (pairing, {})),
    )
    _set(turn, check)
    _order(turn, check, [NodeId(name) for name in pairing])
    turn.wake_at(check.until_s)
    return check


def _order(turn: MasterTurn, check: HealthCheck, nodes: Sequence[NodeId]) -> None:
    rules, pairing = turn.spec.health, check.rounds[-1][0]
    for node in nodes:
        entry = turn.current(node, check.incarnations[node]) if node in check.incarnations else None
        if entry is None:
            continue
        others = [turn.nodes[NodeId(peer)] for peer in pairing[node] if peer in turn.nodes]
        peers = tuple(HealthPeer(one.info.node, one.info.host, _port(one)) for one in others)
        known = turn.known_health.why_due(entry.info, rules, member=turn.member(entry) is not None)
        reason = known if node in check.due else "another node is checked"
        order = CheckHealth(check.number, check.stage, _port(entry), peers, rules.size, rules.timeout_s, reason)
        turn.tell(entry, order)


def _port(entry: NodeEntry) -> int:
    """The port for a node's probe: one of those that are reserved for the next world."""
    return entry.ports[-1] if entry.ports else 0


def _is_awaited(turn: MasterTurn, check: HealthCheck, node: str) -> bool:
    """Whether a node has yet to answer the current stage."""
    pairing, answers = check.rounds[-1]
    name = NodeId(node)
    known = check.incarnations.get(name)
    return name in pairing and name not in answers and known is not None and turn.current(name, known) is not None


def _results(turn: MasterTurn, answers: Mapping[str, HealthChecked]) -> Mapping[str, NodeResult]:
    """The answers of a round in the form that ``edl.health.plan`` needs."""
    found = {}
    for node, one in answers.items():
        entry = turn.nodes.get(NodeId(node))
        kind = f"{one.kind}, {count(entry.info.slots, 'slot')}" if entry is not None else one.kind
        found[node] = NodeResult(one.error, kind, one.product_s, {link.node: link.error for link in one.links})
    return found


def _gone(turn: MasterTurn, check: HealthCheck) -> frozenset[str]:
    """Nodes of the check that are lost or have been replaced since."""
    return frozenset(node for node, known in check.incarnations.items() if turn.current(node, known) is None)


def _reserve(turn: MasterTurn, check: HealthCheck) -> list[str]:
    """Ready nodes outside the check that may serve as witnesses."""
    return [entry.info.node for entry in turn.ready() if entry.info.node not in check.incarnations]


# --- verdicts --------------------------------------------------------------------------------------------------------


def _finish(turn: MasterTurn, check: HealthCheck) -> None:
    """Record the verdicts, and let them take effect."""
    rounds = [(pairing, _results(turn, answers)) for pairing, answers in check.rounds]
    found, gone = conclude(rounds, turn.spec.health.factor), _gone(turn, check)
    found = dataclasses.replace(found, links=tuple(one for one in found.links if gone.isdisjoint(one.nodes)))
    turn.health = dataclasses.replace(turn.health, check=None, checked_s=turn.now_s, due_since_s=None)
    judge, due = _Judge(turn, check, found), set(check.due)
    verdicts: list[HealthVerdict] = []
    for node, incarnation in check.incarnations.items():
        entry = turn.current(node, incarnation)
        silent = not any(node in answers for _, answers in check.rounds)
        if entry is None or (silent and not entry.attached):
            continue  # lost, or cut off: checked when it is back
        if node in due or node in found.faulty or node in found.slow:
            verdicts.append(judge.verdict(entry.info))
    turn.write(health=policy.with_verdicts(turn.record.health, verdicts, _present(turn)))
    times = {**turn.health.verdict_s, **{one.incarnation: turn.now_s for one in verdicts}}
    known = {one.incarnation for one in turn.record.health.verdicts}
    kept = {incarnation: at_s for incarnation, at_s in times.items() if incarnation in known}
    turn.health = dataclasses.replace(turn.health, verdict_s=kept)
    _drop_slots(turn, check)
    _note(turn, check, verdicts, found)
    _expire(turn)


class _Judge:
    """Turns the conclusion of a check into verdicts."""

    def __init__(self, turn: MasterTurn, check: HealthCheck, found: Conclusion) -> None:
        self._number = check.number
        self._found = found
        self._excludes_slow = turn.spec.health.slow is SlowNodes.EXCLUDE and _are_dispensable(turn, found)
        self._texts: dict[str, list[str]] = {}
        """What is worth knowing about nodes that may take part."""
        for link in found.links:
            for node in link.nodes:
                self._texts.setdefault(node, []).append(_link_text(link))
        for node, answer in check.rounds[-1][1].items():
            self._texts.setdefault(node, []).extend(answer.remarks)

    def verdict(self, info: NodeInfo) -> HealthVerdict:
        """The verdict about a node."""
        node, found = info.node, self._found
        if node not in found.faulty and node not in found.slow:
            return policy.sound(info, self._number, _short("; ".join(self._texts.get(node, ())))[:LONGEST_REMARK])
        faulty = node in found.faulty
        fitness, why = (Fitness.FAULTY, found.faulty[node]) if faulty else (Fitness.SLOW, found.slow[node])
        out = faulty or self._excludes_slow
        verdict = HealthVerdict(
            node, info.host, info.incarnation, fitness, _short(why), out, info.devices, self._number
        )
        return dataclasses.replace(verdict, host_id=info.host_id)


def _are_dispensable(turn: MasterTurn, found: Conclusion) -> bool:
    """Whether a world can form without the slow nodes."""
    left = [one for one in turn.able() if one.info.node not in found.faulty and one.info.node not in found.slow]
    return bool(turn.next_size(len(left)).nodes)


def _drop_slots(turn: MasterTurn, check: HealthCheck) -> None:
    """Drop slots with defective devices of nodes that may take part."""
    for node, incarnation in check.incarnations.items():
        entry = turn.current(node, incarnation)
        if entry is None or turn.known_health.is_kept_out(entry.info):
            continue
        wrong = {one.slot: one.error for _, answers in check.rounds if node in answers for one in answers[node].slots}
        for slot, why in wrong.items():
            dropping.unfit(turn, Unfit(node, incarnation, slot, f"found defective: {_short(why)}"))


def _note(turn: MasterTurn, check: HealthCheck, verdicts: Sequence[HealthVerdict], found: Conclusion) -> None:
    slow = [one for one in verdicts if one.fitness is Fitness.SLOW]
    faulty = [one for one in verdicts if one.fitness is Fitness.FAULTY]
    good = [one.node for one in verdicts if one.fitness is Fitness.GOOD]
    for link in found.links[:MOST_NOTED]:
        turn.note(Kind.HEALTH, _link_text(link), severity="warning")
    for one in slow[:MOST_NOTED]:
        then = "it is kept out" if one.excluded else "it takes part"
        turn.note(Kind.HEALTH, f"node {one.node} is slow ({one.why}): {then}", one.node, "warning")
    for one in faulty[:MOST_NOTED]:
        turn.note(Kind.HEALTH, f"node {one.node} is kept out: {one.why}", one.node, "warning")
    more = {"pairs that cannot exchange data": found.links, "slow nodes": slow, "faulty nodes": faulty}
    rest = [
        f"{len(all_of_them) - MOST_NOTED} more {what}" for what, all_of_them in more.items() if all_of_them[MOST_NOTED:]
    ]
    if rest:
        turn.note(Kind.HEALTH, f"health check {check.number}: {', '.join(rest)}", severity="warning")
    if good:
        rounds = count(check.stage, "round")
        turn.note(Kind.HEALTH, f"health check {check.number} ({rounds}): {listed(good)} passed")


def _link_text(link: BrokenLink) -> str:
    a, b = link.nodes
    what = f"{a} and {b} cannot exchange data ({one_line(link.error)})"
    return f"{what}, though both can with others" if link.blamed else f"{what}; which of them is faulty is unknown"


def _short(text: str) -> str:
    return one_line(text)[:LONGEST_WHY]


def _expire(turn: MasterTurn) -> None:
    """Forget verdicts that have expired."""
    expiry_s, verdicts = turn.spec.health.expiry_s, turn.record.health.verdicts
    if not expiry_s or not verdicts or turn.record.phase is Phase.ENDED:
        return
    due = {one.incarnation: turn.health.verdict_s.get(one.incarnation, turn.began_s) + expiry_s for one in verdicts}
    expired = {incarnation for incarnation, due_s in due.items() if turn.now_s >= due_s}
    if expired:
        turn.write(health=policy.without_expired(turn.record.health, expired, _present(turn)))
    left = [due_s for incarnation, due_s in due.items() if incarnation not in expired]
    if left:
        turn.wake_at(min(left))


def _present(turn: MasterTurn) -> Mapping[NodeId, Incarnation]:
    return {node: entry.info.incarnation for node, entry in turn.nodes.items()}


# --- status ----------------------------------------------------------------------------------------------------------


def views(state: MasterState, now_s: float) -> tuple[HealthView, ...]:
    """What ``edl status`` shows of the nodes' health."""
    rules, record = state.spec.health, state.record.health
    check = state.health.check
    busy = set(check.due) if check is not None else set()
    found = [
        HealthView(one.node, one.host, "due", one.why, excluded=True) for one in record.suspects if one.node not in busy
    ]
    for name in sorted(busy):
        entry = state.nodes.get(name)
        found.append(HealthView(name, entry.info.host if entry else "", "checking", "", excluded=True))
    named = busy.union(one.node for one in record.suspects)
    for one in {one.node: one for one in record.verdicts}.values():  # the newest about each name
        if one.node not in named:
            at_s = state.health.verdict_s.get(one.incarnation, state.began_s)
            left_s = max(0.0, at_s + rules.expiry_s - now_s) if rules.expiry_s else 0.0
            times_s = now_s - at_s, left_s
            what = one.node, one.host, one.fitness.value, one.why, one.excluded
            found.append(HealthView(*what, *times_s, one.devices, one.host_id))
    return tuple(sorted(found, key=lambda one: one.node))
