"""Chooses the number of nodes by the measured throughput of each size. Pure: no clock, no I/O.

It moves one step at a time: it measures a size, tries the next one, and compares what the nodes of that step add with
what an average node contributes. Results are remembered, so that a step is not tried over and over.

Sources of ideas: marginal efficiency as the criterion is from Pollux and AdaptDL, without their model of gradient
noise; the cool-down of 60 s is from Ray's autoscaler and Kubeflow's KEP-2903; a new size is measured only after a
while, as Elastic Horovod's autotuning discards its warm-up.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.config import AutoscaleRules

SETTLE_S = 10.0
"""Seconds after a change of the world without measurements: caches fill, kernels are chosen, loaders catch up."""
HOLD_S = 10.0
"""Seconds that a proposal must stay the same before the size is requested."""
LOWER = 2 / 3
"""A step that was found good is found bad only below this fraction of the required efficiency (hysteresis)."""
FEWEST, MOST = 4, 60
"""Bounds of the number of measurements of a world before its mean is used; each takes about 5 s. In between,
``CERTAIN`` decides."""
CERTAIN = 0.1
"""A mean is used once the standard error of the gain of one step is at most this many average nodes."""
DRIFT = 0.3
"""Relative change of a known size's throughput after which everything learnt is discarded: the job or the hosts have
changed."""
RETRY_S = 3600.0
"""Seconds after which a step that was found bad is tried again; doubled each time, up to ``LONGEST_RETRY_S``."""
LONGEST_RETRY_S = 86400.0


class Found(enum.Enum):
    """What is known about the step from one size to the next."""

    UNKNOWN = "unknown"
    GOOD = "good"
    """Its nodes contribute enough."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Rung:
    """One size of the world, and the step that leads up to it."""

    nodes: int
    rate: float = 0.0
    """Throughput as last measured; 0: never measured."""
    found: Found = Found.UNKNOWN
    gain: float = 0.0
    """Contribution of a node of this step, as a fraction of an average node of the size below."""
    misses: int = 0
    """How often the step was found bad."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """Knowledge that is part of the record, for the next Master. It contains no times, because clocks differ."""

    measure: str = ""
    """What throughput counts, and under which settings. Results of one measure do not apply to another."""
    rungs: tuple[Rung, ...] = ()
    """Known sizes, ascending."""
    last: int = 0
    """The size that was measured last; 0: none. A step is judged only by two sizes measured in succession."""

    def rung(self, nodes: int) -> Rung:
        """What is known about one size; an empty entry if nothing is."""
        return next((rung for rung in self.rungs if rung.nodes == nodes), Rung(nodes))

    def put(self, rung: Rung) -> Learnt:
        """A copy with this entry in place of the size's earlier one."""
        others = (other for other in self.rungs if other.nodes != rung.nodes)
        return dataclasses.replace(self, rungs=tuple(sorted((*others, rung), key=lambda one: one.nodes)))


NOTHING_LEARNT = Learnt()


@dataclass(frozen=True, slots=True)
class AutoscaleMemory:
    """What a new Master collects from scratch: the current measurement, and times in seconds of its clock."""

    round: int = 0
    nodes: int = 0
    since_s: float = 0.0
    """Time of the first report in this world."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step of the nodes that have reported since the last measurement."""
    count: int = 0
    """Number of measurements of this world."""
    mean: float = 0.0
    """Mean throughput of this world."""
    spread: float = 0.0
    """Variance of single measurements."""
    complete: bool = False
    """Whether this world has been measured, and the step to it judged."""
    changed_s: float = 0.0
    """Time of the last change of the size, or of the last request for one."""
    candidate: int = 0
    """The size that will be requested if it stays the best for ``HOLD_S``; 0: none."""
    candidate_s: float = 0.0
    """Time since which it is the best."""
    forgot_s: float = -math.inf
    """Time at which everything learnt was last discarded."""
    retry: Mapping[int, float] = field(default_factory=dict)
    """Time from which a step that was found bad may be tried again, by size."""
    proposal: int = 0
    """The proposed size, for the status; 0: none."""
    reason: str = ""
    """The reason for the proposal, or for the lack of one."""


NO_MEMORY = AutoscaleMemory()


@dataclass(frozen=True, slots=True)
class CurrentWorld:
    """The running world, and what restricts proposals."""

    round: int
    slots: Mapping[str, int]
    """Number of workers by member."""
    lowest: int
    highest: int
    unit: int
    reach: int
    """Number of nodes that exist, or that a scheduler would provide."""
    measure: str = ""
    """``Learnt.measure`` for this world."""
    noun: str = "worker steps/s"
    """Unit of the throughput, for messages."""
    share: float = 1.0
    """Work that one worker does per step, in units of the measure."""
    unsettled: str = ""
    """Why the current pace is not typical of this size; empty if it is."""
    lacking: str = ""
    """Why no size may be proposed now; empty if one may."""
    advice: str = ""
    """Why a proposal is only shown in the status; empty if it is requested."""


@dataclass(frozen=True, slots=True)
class PaceResult:
    """The result of handling one report."""

    memory: AutoscaleMemory
    learnt: Learnt
    size: int = 0
    """Size to request now; 0: none."""


@dataclass(frozen=True, slots=True)
class _Choice:
    nodes: int
    why: str


def handle_pace(
    memory: AutoscaleMemory,
    learnt: Learnt,
    place: CurrentWorld,
    node: str,
    step_s: float,
    rules: AutoscaleRules,
    now_s: float,
) -> PaceResult:
    """Handle a node's report of its step time in seconds."""
    memory, learnt = _at(memory, learnt, place, now_s)
    if place.unsettled or node not in place.slots or not 0 < step_s < math.inf:
        return PaceResult(_show(memory, 0, place.unsettled or memory.reason), learnt)
    if now_s < memory.since_s + SETTLE_S:
        return PaceResult(
            _show(memory, 0, f"{_count(memory.nodes)}: this world has just begun, not measured yet"), learnt
        )
    memory = dataclasses.replace(memory, reported={**memory.reported, node: step_s})
    if len(memory.reported) < len(place.slots):
        return PaceResult(memory, learnt)
    memory = _measured(memory, place)
    if not _certain(memory, place):
        text = f"{_count(memory.nodes)}: about {memory.mean:.4g} {place.noun} ({_count(memory.count, 'measurement')})"
        return PaceResult(_show(memory, 0, f"{text}, not certain yet"), learnt)
    memory, learnt = _learn(memory, learnt, place, rules, now_s)
    if not memory.count:
        return PaceResult(
            _show(memory, 0, f"{_count(memory.nodes)}: its throughput has changed, measuring again"), learnt
        )
    return _propose(memory, learnt, place, rules, now_s)


# --- measuring -------------------------------------------------------------------------------------------------------


def _at(memory: AutoscaleMemory, learnt: Learnt, place: CurrentWorld, now_s: float) -> tuple[AutoscaleMemory, Learnt]:
    """Start a new measurement if the world or the measure has changed."""
    if learnt.measure != place.measure:
        learnt = Learnt(place.measure)
        memory = dataclasses.replace(memory, round=0, retry={})
    if memory.round == place.round:
        return memory, learnt
    nodes = len(place.slots)
    new = AutoscaleMemory(
        round=place.round,
        nodes=nodes,
        since_s=now_s,
        changed_s=memory.changed_s if memory.nodes == nodes else now_s,
        forgot_s=memory.forgot_s,
        retry=memory.retry or {rung.nodes: now_s + _retry_s(rung) for rung in learnt.rungs if rung.found is Found.BAD},
    )
    return new, learnt


def _measured(memory: AutoscaleMemory, place: CurrentWorld) -> AutoscaleMemory:
    """Add one measurement of the world to mean and variance, which are exponential after ``MOST`` measurements."""
    reported = {node: step_s for node, step_s in memory.reported.items() if node in place.slots}
    rate = place.share * sum(place.slots[node] / step_s for node, step_s in reported.items())
    count = memory.count + 1
    weight = 1 / min(count, MOST)
    off = rate - memory.mean
    mean = memory.mean + weight * off if memory.count else rate
    spread = (1 - weight) * (memory.spread + weight * off * off) if memory.count else 0.0
    return dataclasses.replace(memory, reported={}, count=count, mean=mean, spread=spread)


def _certain(memory: AutoscaleMemory, place: CurrentWorld) -> bool:
    """Whether the mean is precise enough to judge a step: the larger the world, the less a step changes it."""
    if memory.count < FEWEST or memory.count >= MOST:
        return memory.count >= MOST
    error = math.sqrt(memory.spread / (memory.count - 1)) / memory.mean
    return math.sqrt(2) * error * memory.nodes / place.unit <= CERTAIN


# --- learning --------------------------------------------------------------------------------------------------------


def _learn(
    memory: AutoscaleMemory, learnt: Learnt, place: CurrentWorld, rules: AutoscaleRules, now_s: float
) -> tuple[AutoscaleMemory, Learnt]:
    """Record the throughput of this size, once per world, and judge the step that led to it."""
    nodes, old = memory.nodes, learnt.rung(memory.nodes)
    trial = not memory.complete and learnt.last == nodes - place.unit and old.found is not Found.GOOD
    if old.rate and not trial and abs(memory.mean / old.rate - 1) > DRIFT and now_s >= memory.forgot_s + RETRY_S:
        # The mean mixes the throughput before and after the drift, so this size is measured again as well.
        memory = dataclasses.replace(memory, forgot_s=now_s, retry={}, complete=False, count=0, mean=0.0, spread=0.0)
        return memory, Learnt(learnt.measure)
    if memory.complete:
        return memory, learnt
    before = learnt.last
    learnt = learnt.put(dataclasses.replace(old, rate=memory.mean))
    if before and abs(before - nodes) == place.unit and learnt.rung(before).rate:
        memory, learnt = _judge(memory, learnt, before, rules, now_s)
    learnt = dataclasses.replace(learnt, last=nodes)
    return dataclasses.replace(memory, complete=True), learnt


def _judge(
    memory: AutoscaleMemory, learnt: Learnt, before: int, rules: AutoscaleRules, now_s: float
) -> tuple[AutoscaleMemory, Learnt]:
    """Judge the step between two sizes that were measured in succession, by the contribution of its nodes."""
    low, high = learnt.rung(min(before, memory.nodes)), learnt.rung(max(before, memory.nodes))
    down = memory.nodes == low.nodes
    if down and high.found is not Found.UNKNOWN:
        return memory, learnt  # the return from a trial must not reverse its result by noise
    gain = (high.rate - low.rate) / (high.nodes - low.nodes) / (low.rate / low.nodes)
    least = rules.efficiency * (LOWER if down or high.found is Found.GOOD else 1.0)
    if gain >= least:
        return memory, learnt.put(dataclasses.replace(high, found=Found.GOOD, gain=gain))
    bad = dataclasses.replace(high, found=Found.BAD, gain=gain, misses=high.misses + 1)
    memory = dataclasses.replace(memory, retry={**memory.retry, bad.nodes: now_s + _retry_s(bad)})
    return memory, learnt.put(bad)


def _retry_s(rung: Rung) -> float:
    return float(min(RETRY_S * 2.0 ** min(max(rung.misses - 1, 0), 16), LONGEST_RETRY_S))


# --- proposing -------------------------------------------------------------------------------------------------------


def _propose(
    memory: AutoscaleMemory, learnt: Learnt, place: CurrentWorld, rules: AutoscaleRules, now_s: float
) -> PaceResult:
    """Choose the best size, and request it once it has been the best for ``HOLD_S`` and the cool-down is over."""
    nodes, facts = memory.nodes, _facts(memory, learnt, place)
    if place.lacking:
        return PaceResult(_show(memory, 0, f"{facts}; {place.lacking}"), learnt)
    choice = _choose(memory, learnt, place, rules, now_s)
    text = f"{facts}; {choice.why}"
    if choice.nodes == nodes:
        return PaceResult(dataclasses.replace(_show(memory, nodes, text), candidate=0), learnt)
    if memory.candidate != choice.nodes:
        memory = dataclasses.replace(memory, candidate=choice.nodes, candidate_s=now_s)
    if place.advice:
        return PaceResult(_show(memory, choice.nodes, f"{text}; {place.advice}"), learnt)
    cooled_s = memory.changed_s + rules.cooldown_s
    if now_s < cooled_s:
        return PaceResult(_show(memory, choice.nodes, f"{text}, {rules.cooldown_s:g} s after the last change"), learnt)
    memory = _show(memory, choice.nodes, text)
    if now_s < memory.candidate_s + HOLD_S:
        return PaceResult(memory, learnt)
    # The step will be judged by the current throughput of this size, not by that of its first measurement.
    learnt = learnt.put(dataclasses.replace(learnt.rung(nodes), rate=memory.mean))
    return PaceResult(dataclasses.replace(memory, changed_s=now_s, candidate=0), learnt, choice.nodes)


def _choose(
    memory: AutoscaleMemory, learnt: Learnt, place: CurrentWorld, rules: AutoscaleRules, now_s: float
) -> _Choice:
    nodes, unit = memory.nodes, place.unit
    here, above = learnt.rung(nodes), learnt.rung(nodes + unit)
    last = "the last one" if unit == 1 else f"one of the last {unit}"
    brings = f"brings {_percent(here.gain)} of an average node"
    if here.found is Found.BAD and nodes - unit >= place.lowest:
        return _Choice(nodes - unit, f"{last} {brings}, less than {_percent(rules.efficiency)}: one step back")
    retry = above.found is Found.BAD and now_s >= memory.retry.get(above.nodes, math.inf)
    may_grow = above.nodes <= min(place.reach, place.highest)
    more = _ordinal(above.nodes) if unit == 1 else f"{unit} more"
    if may_grow and above.found is Found.GOOD:
        return _Choice(above.nodes, f"{more} brought {_percent(above.gain)} of an average node: growing")
    if may_grow and (above.found is Found.UNKNOWN or retry):
        known = "is unknown" if above.found is Found.UNKNOWN else f"brought {_percent(above.gain)} some time ago"
        return _Choice(above.nodes, f"{more} {known}: trying")
    if here.found is Found.UNKNOWN and nodes - unit >= place.lowest:
        return _Choice(nodes - unit, f"what {last} brings is unknown: trying without it")
    if above.nodes > place.highest:
        return _Choice(nodes, "the maximum")
    if above.found is Found.BAD:
        return _Choice(
            nodes, f"{more} brought {_percent(above.gain)} of an average node, less than {_percent(rules.efficiency)}"
        )
    return _Choice(nodes, f"{more} would be tried, but no node is available")


def _show(memory: AutoscaleMemory, proposal: int, reason: str) -> AutoscaleMemory:
    return dataclasses.replace(memory, proposal=proposal, reason=reason)


def _facts(memory: AutoscaleMemory, learnt: Learnt, place: CurrentWorld) -> str:
    """The measured throughput as text: ``4 nodes: 412 samples/s, 3.1x of one (78 % a node)``."""
    text = f"{_count(memory.nodes)}: {memory.mean:.4g} {place.noun}"
    first = next((rung for rung in learnt.rungs if rung.rate and rung.nodes < memory.nodes), None)
    if first is None:
        return text
    times = memory.mean / first.rate
    of = "one" if first.nodes == 1 else str(first.nodes)
    return f"{text}, {times:.2g}x of {of} ({_percent(times * first.nodes / memory.nodes)} a node)"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ordinal(number: int) -> str:
    teens = number % 100 in (11, 12, 13)
    suffix = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{'an' if str(number).startswith('8') or number in (11, 18) else 'a'} {number}{suffix}"


def _count(number: int, noun: str = "node") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
