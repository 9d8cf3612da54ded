"""The job's size: requests of operators, autoscalers and schedulers, and the rules for accepting them.

Level-triggered: ``Sizing`` holds what is wanted now, not the requests that led to it. A request is judged by what the
Master knows at that moment. An accepted one becomes part of the record before it is answered, so it also holds for
later Masters. ``resizing.py`` makes the world conform.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edl.config import NodeRange, Replicas
from edl.errors import SettingError
from edl.master.policies import slots
from edl.rendezvous.phrases import count, cut, one_line
from edl.types import Incarnation, NodeId
from edl.wire.records import NodeInfo
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Resize, ScaleRequest, SetBounds, Suspend, Verdict

KEYS_KEPT = 32
"""Number of idempotency keys that are remembered with their answers."""
LONGEST_BY = 200
LONGEST_REASON = 500
LONGEST_KEY = 200
"""Most characters of a requester, a reason and an idempotency key: the record repeats them for each node concerned, and
has to fit into one value of the store (etcd: 1.5 MiB). Longer keys are refused, the others are cut."""
SHOWN_NODES = 8
"""Number of nodes listed in the answer to a request that names an unknown node."""
UNNAMED = "a client that gave no name"
"""Requester of a request without one; edl's own clients always name themselves."""


@dataclass(frozen=True, slots=True)
class Cordoned:
    """A node that is kept out of every world, whichever launcher uses its name."""

    node: NodeId
    why: str
    """The requester and the reason."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What is requested. Also stored under a key of its own, whose revision detects stale requests."""

    minimum: int = 0
    maximum: int = 0
    """Bounds that were set in the running job; 0: those of the spec apply."""
    desired: int = 0
    """Requested number of nodes, which later bounds may limit; 0: no request."""
    generation: int = 0
    """Number of accepted requests of any kind; never decreases."""
    by: str = ""
    """The requester of the last request."""
    reason: str = ""
    """The reason of the last request."""
    suspended: str = ""
    """The requester of the suspension; empty: the job is not suspended."""
    cordoned: tuple[Cordoned, ...] = ()
    automatic: bool = False
    """Whether the autoscale policy may request another size, because it requested the last one or got it back."""
    fact: int = -1
    """The last size reported by a scheduler that owns the size, before it was limited to the bounds; -1: none."""

    def bounds(self, spec: NodeRange) -> NodeRange:
        """The bounds that apply. ``spec``: those given at the start of the job."""
        return NodeRange(self.minimum, self.maximum, spec.unit) if self.maximum else spec

    def requested(self, spec: NodeRange) -> int:
        """The requested number of nodes, within the bounds; 0: no request."""
        return within(self.bounds(spec), self.desired) if self.desired else 0

    def target(self, spec: NodeRange) -> int:
        """The number of nodes of a world if enough are available: the requested one, or else the maximum."""
        return self.requested(spec) or self.bounds(spec).highest

    def excludes(self, node: str) -> bool:
        """Whether a node is cordoned."""
        return any(one.node == node for one in self.cordoned)


NO_SIZING = Sizing()


def within(bounds: NodeRange, nodes: int) -> int:
    """The largest allowed size that is at most ``nodes``; the smallest allowed one if there is none."""
    return bounds.fit(nodes) or bounds.lowest


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """The idempotency key of a request, and its answer."""

    key: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Departing:
    """A node that has to leave. Only this incarnation: a later launcher of the same name is another node."""

    node: NodeId
    incarnation: Incarnation
    reason: str
    deadline_s: float
    """Seconds that the node may take to leave; 0: ``--shutdown-timeout``."""
    mode: DrainMode
    era: int = 0
    commit: int = 0
    """With ``DrainMode.MUST``: the commit (with its era) that must be in the checkpoint directory before the node is
    ordered to leave; 0: not agreed on yet."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Master knows that matters for requests."""

    spec: NodeRange
    nodes: frozenset[str]
    """All existing nodes."""
    able: frozenset[str]
    """Existing nodes that can be in a world: alive, not leaving, not cordoned."""
    lowest: int = 0
    """Minimum number of nodes for a world; 0: the lower bound."""
    over: str = ""
    """Why no request is accepted any more; empty: requests are accepted."""
    owner: str = ""
    """The scheduler that owns the size; empty: none."""
    saves: bool = True
    """Whether there is a checkpoint directory, as far as is known."""
    aware: bool = True
    """Whether the workers of this job use ``edl.State``."""
    scales: bool = False
    """Whether the job has an autoscale policy."""
    store_members: frozenset[str] = frozenset()
    """Nodes whose launchers run a member of the embedded store, which ends with the launcher."""
    members: int = 0
    """Number of members of that store, which needs more than half of them."""
    held: int = 0
    """Store revision of ``Sizing``."""
    seen: Sequence[SeenRequest] = ()
    infos: Mapping[NodeId, NodeInfo] = field(default_factory=dict)
    """The infos of the existing nodes."""
    dropped: Sequence[slots.Dropped] = ()
    """Dropped slots."""
    replicas: Replicas = field(default_factory=Replicas)


@dataclass(frozen=True, slots=True)
class Judged:
    """The decision about a request."""

    verdict: Verdict
    text: str
    """The answer for the requester."""
    sizing: Sizing
    """What is requested now."""
    said: str = ""
    """The text for the history; empty: none."""

    @property
    def ok(self) -> bool:
        """Whether the request is accepted, or nothing has to change."""
        return self.verdict in (Verdict.ACCEPTED, Verdict.KNOWN)


def judge(sizing: Sizing, request: ScaleRequest, facts: Facts) -> Judged:
    """Decide about a request. A repeated key gets the earlier answer; an outdated revision is stale."""
    key = getattr(request, "key", "")
    before = next((seen for seen in facts.seen if key and seen.key == key), None)
    if before is not None:
        return Judged(before.verdict, before.text, sizing)
    if len(key) > LONGEST_KEY:
        return _refused(sizing, f"an idempotency key of {len(key)} characters: at most {LONGEST_KEY} are allowed")
    if facts.over:
        return _refused(sizing, facts.over)
    revision = getattr(request, "revision", 0)
    if revision and revision != facts.held:
        last = f" by {sizing.by}" if sizing.by else ""
        text = (
            f"stale: the size was changed{last} since revision {revision} (it is {facts.held} now). Read it and retry"
        )
        return Judged(Verdict.STALE, text, sizing)
    rule: Callable[[Sizing, Any, Facts], Judged] = _RULES[type(request)]
    judged = rule(sizing, request, facts)
    if judged.verdict is not Verdict.ACCEPTED:
        return judged
    changed = dataclasses.replace(
        judged.sizing, generation=sizing.generation + 1, by=request.by, reason=" ".join(request.reason.split())
    )
    return dataclasses.replace(judged, sizing=changed)


def shortened(request: ScaleRequest) -> ScaleRequest:
    """The request, with requester and reason on one line and cut to their limits."""
    return dataclasses.replace(
        request, by=cut(one_line(request.by), LONGEST_BY), reason=cut(one_line(request.reason), LONGEST_REASON)
    )


def remember(seen: Sequence[SeenRequest], request: ScaleRequest, judged: Judged) -> tuple[SeenRequest, ...]:
    """The remembered answers after this request. Refusals are not remembered: a refused request may be repeated with
    its key."""
    key = getattr(request, "key", "")
    if not key or not judged.ok or any(one.key == key for one in seen):
        return tuple(seen)
    return (*seen, SeenRequest(key, judged.verdict, judged.text))[-KEYS_KEPT:]


def _accepted(sizing: Sizing, said: str, text: str = "") -> Judged:
    return Judged(Verdict.ACCEPTED, text or said, sizing, said)


def _known(sizing: Sizing, text: str) -> Judged:
    already = "" if " is not " in text else " already"
    return Judged(Verdict.KNOWN, f"{text}{already}: nothing changes", sizing)


def _refused(sizing: Sizing, text: str) -> Judged:
    return Judged(Verdict.REFUSED, text, sizing)


def _resize(sizing: Sizing, request: Resize, facts: Facts) -> Judged:
    bounds = sizing.bounds(facts.spec)
    if request.external:
        return _fact(sizing, request, bounds)
    if request.auto and not facts.scales:
        return _refused(sizing, "the job has no policy that could decide: its launchers need --autoscale=throughput")
    if facts.owner:
        return _refused(
            sizing, f"the size belongs to {facts.owner}: change it there, or start with --scale-owner=master"
        )
    if request.auto:
        return _to_policy(sizing)
    problem = _misfit(request.nodes, bounds)
    if problem:
        return _refused(sizing, problem)
    by_hand = dataclasses.replace(sizing, desired=request.nodes, automatic=False)
    if sizing == by_hand:
        return _known(sizing, f"{count(request.nodes)} requested")
    return _accepted(by_hand, f"{count(request.nodes)} requested")


def _to_policy(sizing: Sizing) -> Judged:
    if sizing.automatic or not sizing.desired:
        return _known(sizing, "the autoscale policy decides")
    return _accepted(dataclasses.replace(sizing, automatic=True), "size given back to the autoscale policy")


def _misfit(nodes: int, bounds: NodeRange) -> str:
    """Why a world of ``nodes`` nodes is not allowed; empty: it is."""
    if nodes <= 0:
        return f"{nodes} nodes: a job needs at least one. To stop for a while: edl suspend; for good: edl stop"
    if not bounds.minimum <= nodes <= bounds.maximum:
        return f"{count(nodes)}: outside {bounds.minimum}:{bounds.maximum}. To change the bounds: edl scale --min --max"
    if nodes % bounds.unit:
        fitting = [size for size in (bounds.fit(nodes), within(bounds, nodes + bounds.unit)) if size]
        near = " or ".join(str(size) for size in dict.fromkeys(fitting))
        return f"{count(nodes)}: not a multiple of {bounds.unit} (--node-unit). Ask for {near}"
    return ""


def _fact(sizing: Sizing, request: Resize, bounds: NodeRange) -> Judged:
    """Take over the number of nodes that the scheduler which owns the size provides, whatever the bounds."""
    changed = request.nodes != sizing.fact
    updated = dataclasses.replace(sizing, fact=request.nodes)
    if request.nodes <= 0:
        text = f"{request.by} provides {request.nodes} nodes: ignored, the job needs at least {bounds.lowest}"
        return Judged(Verdict.KNOWN, text, updated, text if changed else "")
    size = within(bounds, request.nodes)
    outside = f" ({request.nodes} is not a size within {bounds})" if size != request.nodes else ""
    text = f"{count(size)} given{outside}"
    if updated.desired == size:
        return Judged(Verdict.KNOWN, f"{text}: nothing changes", updated, text if changed and outside else "")
    return _accepted(dataclasses.replace(updated, desired=size), text)


def _set_bounds(sizing: Sizing, request: SetBounds, facts: Facts) -> Judged:
    try:
        bounds = NodeRange(request.minimum, request.maximum, facts.spec.unit)
    except SettingError as error:
        return _refused(sizing, str(error.renamed("bounds") if error.setting == "--nnodes" else error))
    if bounds == sizing.bounds(facts.spec):
        return _known(sizing, f"the bounds are {bounds}")
    changed = dataclasses.replace(sizing, minimum=request.minimum, maximum=request.maximum)
    return _accepted(changed, f"bounds set to {bounds}")


def _drain(sizing: Sizing, request: Drain, facts: Facts) -> Judged:
    if not request.nodes:
        return _refused(sizing, "no node named")
    strangers = [node for node in request.nodes if node not in facts.nodes]
    if strangers:
        return Judged(Verdict.UNKNOWN, _unknown(strangers, facts), sizing)
    if not math.isfinite(request.deadline_s) or request.deadline_s < 0:
        return _refused(sizing, f"a deadline of {request.deadline_s:g} s: must be 0 or more seconds, or omitted")
    if request.mode is DrainMode.MUST and not facts.saves:
        return _refused(sizing, "no checkpoint can be written first: the job has no --checkpoint-dir")
    if request.mode is DrainMode.MUST and not facts.aware:
        return _refused(sizing, "no checkpoint can be written first: the script does not use edl.State")
    going = frozenset(request.nodes)
    short = _short(sizing, facts, going) or _storeless(facts, going)
    if short:
        return _refused(sizing, f"draining {', '.join(request.nodes)} {short}")
    return _accepted(sizing, f"drain of {', '.join(request.nodes)} requested")


def _unknown(strangers: Sequence[str], facts: Facts) -> str:
    known = sorted(facts.nodes)
    more = f" and {len(known) - SHOWN_NODES} more" if len(known) > SHOWN_NODES else ""
    return f"no such node: {', '.join(strangers)}. Existing nodes: {', '.join(known[:SHOWN_NODES]) or 'none'}{more}"


def _storeless(facts: Facts, going: frozenset[str]) -> str:
    """Why the job's store would not survive without these nodes; empty: it would."""
    left, needed = facts.store_members - going, facts.members // 2 + 1
    if left == facts.store_members or len(left) >= needed:
        return ""
    kept = f"leaves {count(len(left))} with a member of the job's store, and {needed} of {facts.members} are needed"
    return f"{kept}: the job would end with it. Use edl cordon, which keeps the launcher, or a separate etcd"


def _short(sizing: Sizing, facts: Facts, going: frozenset[str]) -> str:
    """Why the job cannot continue without these nodes; empty: it can."""
    left = facts.able - going
    if left == facts.able:
        return ""
    lowest = 1 if sizing.suspended else facts.lowest or sizing.bounds(facts.spec).lowest
    if len(left) >= lowest:
        return ""
    whole = "" if left else ". To end the whole job: edl stop; to stop it for a while: edl suspend"
    return f"leaves {count(len(left))} able to take part, at least {lowest} needed{whole}"


def _cordon(sizing: Sizing, request: Cordon, facts: Facts) -> Judged:
    node = NodeId(request.node)
    info = facts.infos.get(node)
    bare = info is not None and not slots.places(facts.dropped, info, facts.replicas)
    if request.device or (bare and not request.cordoned and not sizing.excludes(node)):
        return (_cordon_slot if request.cordoned else _uncordon_slots)(sizing, request, facts)
    excluded = sizing.excludes(node)
    if node not in facts.nodes and not excluded:
        return Judged(Verdict.UNKNOWN, _unknown((node,), facts), sizing)
    if excluded == request.cordoned:
        return _known(sizing, f"{node} is {'' if excluded else 'not '}cordoned")
    others = tuple(one for one in sizing.cordoned if one.node != node)
    if not request.cordoned:
        return _accepted(dataclasses.replace(sizing, cordoned=others), f"{node} no longer cordoned")
    short = _short(sizing, facts, frozenset((node,)))
    if short:
        return _refused(sizing, f"cordoning {node} {short}")
    why = ": ".join(part for part in (request.by, " ".join(request.reason.split())) if part)
    return _accepted(dataclasses.replace(sizing, cordoned=(*others, Cordoned(node, why))), f"{node} cordoned")


def _cordon_slot(sizing: Sizing, request: Cordon, facts: Facts) -> Judged:
    info = facts.infos.get(NodeId(request.node))
    if info is None:
        return Judged(Verdict.UNKNOWN, _unknown((request.node,), facts), sizing)
    slot = slots.named(info, request.device)
    if slot is None:
        text = f"{request.node} has no slot or device {request.device}: it has {slots.known_slots(info)}"
        return Judged(Verdict.UNKNOWN, text, sizing)
    left = slots.usable(facts.dropped, info)
    name = f"slot {slot} of {request.node}"
    if slot not in left:
        return _known(sizing, f"{name} is dropped")
    if not facts.replicas.whole(len(left) - 1):
        advice = f"Cordon the node instead: edl cordon {request.node}"
        only = len(left) == 1
        what = "is the only one left there that takes part" if only else "is needed: no whole replica is left without"
        return _refused(sizing, f"{name} {what}. {advice}")
    return _accepted(sizing, f"{name} dropped")


LIFT = "To lift it for all jobs: edl denylist remove"


def _uncordon_slots(sizing: Sizing, request: Cordon, facts: Facts) -> Judged:
    info = facts.infos.get(NodeId(request.node))
    back = slots.meant(facts.dropped, info, request.node, request.device)
    kept_out = next((one for one in back if one.denied), None)
    if kept_out is not None:
        return _refused(sizing, f"{kept_out.why}. {LIFT}")
    if back:
        numbers = ", ".join(str(one.slot) for one in back)
        return _accepted(sizing, f"slot{'s' if len(back) > 1 else ''} {numbers} of {request.node} may take part again")
    if info is None:
        return Judged(Verdict.UNKNOWN, f"no such node: {request.node}, and no slot of it is dropped", sizing)
    slot = slots.named(info, request.device)
    if slot is None:
        text = f"{request.node} has no slot or device {request.device}: it has {slots.known_slots(info)}"
        return Judged(Verdict.UNKNOWN, text, sizing)
    return _known(sizing, f"slot {slot} of {request.node} is not dropped")


def _suspend(sizing: Sizing, request: Suspend, facts: Facts) -> Judged:
    if bool(sizing.suspended) == request.suspended:
        return _known(sizing, f"the job is {'' if request.suspended else 'not '}suspended")
    changed = dataclasses.replace(sizing, suspended=request.by or UNNAMED if request.suspended else "")
    if not request.suspended:
        needed, there = facts.lowest or sizing.bounds(facts.spec).lowest, len(facts.able)
        lacking = f": it waits for {count(needed - there, 'more node')}, {there} of at least {needed} are there"
        return _accepted(changed, "job resumed", f"job resumed{lacking if there < needed else ''}")
    kept = "" if facts.aware else ". Its script does not use edl.State: what it has not saved itself is lost"
    return _accepted(changed, "job suspended", f"job suspended{kept}")


_RULES: dict[type, Callable[[Sizing, Any, Facts], Judged]] = {
    Resize: _resize,
    SetBounds: _set_bounds,
    Drain: _drain,
    Cordon: _cordon,
    Suspend: _suspend,
}
