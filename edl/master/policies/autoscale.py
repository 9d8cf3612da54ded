"""Chooses the number of nodes from the measured throughput of each size. Pure: no clock, no I/O.

It moves one step at a time: measure a size, try its neighbour, and compare what the nodes of that step add with what an
average node contributes. Verdicts are remembered, so that nothing is tried over and over.

Borrowed ideas: marginal efficiency as the measure is from Pollux and AdaptDL, without their model of gradient noise;
the cool-down of 60 s is from Ray's autoscaler and Kubeflow's KEP-2903; a new size is measured only after a while, as
Elastic Horovod's autotuning discards its warm-up.
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
"""Seconds that a proposal must hold before it is acted upon."""
LOWER = 2 / 3
"""A step found good is given up below this share of the required efficiency (hysteresis)."""
FEWEST, MOST = 4, 60
"""Measurements of the whole world before its mean counts; after the maximum it counts in any case. About 5 s each."""
CERTAIN = 0.1
"""A mean counts when the gain of one step is known to this standard error, in average nodes."""
DRIFT = 0.3
"""Relative change of a known size's throughput after which everything learnt is discarded: the job or the machines have
changed."""
RETRY_S = 3600.0
"""Seconds after which a step that brought too little is tried again; doubled each time, up to ``LONGEST_RETRY_S``."""
LONGEST_RETRY_S = 86400.0


class Found(enum.Enum):
    """Verdict on one step from a size to the next."""

    UNKNOWN = "unknown"
    GOOD = "good"
    """Its nodes contribute enough."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Rung:
    """One size of the world, and the step that leads up to it."""

    nodes: int
    rate: float = 0.0
    """Throughput as last measured; 0: never."""
    found: Found = Found.UNKNOWN
    gain: float = 0.0
    """Contribution of a node of this step, as a share of an average node of the size below it."""
    misses: int = 0
    """Number of times the step was found bad."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """Knowledge that outlives the Master. It contains no times, since clocks differ."""

    measure: str = ""
    """The unit that was counted, and under which settings. Results of one measure do not apply to another."""
    rungs: tuple[Rung, ...] = ()
    last: int = 0
    """Size that was measured last; 0: none. A step is judged only by two sizes measured in succession."""

    def rung(self, nodes: int) -> Rung:
        """The measurements of one size."""
        return next((rung for rung in self.rungs if rung.nodes == nodes), Rung(nodes))

    def put(self, rung: Rung) -> Learnt:
        """A copy in which this size's entry is replaced."""
        others = (other for other in self.rungs if other.nodes != rung.nodes)
        return dataclasses.replace(self, rungs=tuple(sorted((*others, rung), key=lambda one: one.nodes)))


NOTHING_LEARNT = Learnt()


@dataclass(frozen=True, slots=True)
class AutoscaleMemory:
    """State that each Master collects itself: the current measurement, and times in seconds of its clock."""

    round: int = 0
    nodes: int = 0
    since_s: float = 0.0
    """Time of the first pace report in this world."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step, for nodes that have reported since the last measurement."""
    count: int = 0
    mean: float = 0.0
    spread: float = 0.0
    """Variance of single measurements."""
    complete: bool = False
    """This world has been measured, and the step to it judged."""
    changed_s: float = 0.0
    """Time of the last change of the size, or request for one."""
    lean: int = 0
    """Size that is about to be requested."""
    lean_s: float = 0.0
    forgot_s: float = -math.inf
    retry: Mapping[int, float] = field(default_factory=dict)
    """Time at which a step found bad may be tried again, by size."""
    proposal: int = 0
    reason: str = ""


NO_MEMORY = AutoscaleMemory()


@dataclass(frozen=True, slots=True)
class CurrentWorld:
    """The current world."""

    round: int
    slots: Mapping[str, int]
    """Number of workers of each member."""
    lowest: int
    highest: int
    unit: int
    reach: int
    """Maximum number of nodes that exist or that a scheduler would provide."""
    measure: str = ""
    noun: str = "worker steps/s"
    share: float = 1.0
    """Work that one worker does per step, in units of the measure."""
    unsettled: str = ""
    """Why the current pace says nothing about this size; empty if it does."""
    lacking: str = ""
    """Why nothing is proposed at the moment; empty if something may be."""
    advice: str = ""
    """Why a proposal is only shown; empty if it is acted upon."""


@dataclass(frozen=True, slots=True)
class Look:
    """Result of one report."""

    memory: AutoscaleMemory
    learnt: Learnt
    size: int = 0
    """Size to request now; 0: none."""


@dataclass(frozen=True, slots=True)
class _Choice:
    nodes: int
    why: str


def hear(
    memory: AutoscaleMemory,
    learnt: Learnt,
    place: CurrentWorld,
    node: str,
    step_s: float,
    rules: AutoscaleRules,
    now_s: float,
) -> Look:
    """Handle a node's report of its step time."""
    memory, learnt = _at(memory, learnt, place, now_s)
    if place.unsettled or node not in place.slots or not 0 < step_s < math.inf:
        return Look(_show(memory, 0, place.unsettled or memory.reason), learnt)
    if now_s < memory.since_s + SETTLE_S:
        return Look(_show(memory, 0, f"{_count(memory.nodes)}: just begun, not measured yet"), learnt)
    memory = dataclasses.replace(memory, reported={**memory.reported, node: step_s})
    if len(memory.reported) < len(place.slots):
        return Look(memory, learnt)
    memory = _measured(memory, place)
    if not _certain(memory, place):
        text = f"{_count(memory.nodes)}: about {memory.mean:.4g} {place.noun} ({_count(memory.count, 'measurement')})"
        return Look(_show(memory, 0, f"{text}, not certain yet"), learnt)
    memory, learnt = _learn(memory, learnt, place, rules, now_s)
    if not memory.count:
        return Look(_show(memory, 0, f"{_count(memory.nodes)}: its throughput has changed, measuring again"), learnt)
    return _propose(memory, learnt, place, rules, now_s)


# --- measuring -------------------------------------------------------------------------------------------------------


def _at(memory: AutoscaleMemory, learnt: Learnt, place: CurrentWorld, now_s: float) -> tuple[AutoscaleMemory, Learnt]:
    """Start over in each new world, and when the measure changes."""
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
    """Add one measurement of the world to mean and variance (exponential after the first ones)."""
    reported = {node: step_s for node, step_s in memory.reported.items() if node in place.slots}
    rate = place.share * sum(place.slots[node] / step_s for node, step_s in reported.items())
    count = memory.count + 1
    weight = 1 / min(count, MOST)
    off = rate - memory.mean
    mean = memory.mean + weight * off if memory.count else rate
    spread = (1 - weight) * (memory.spread + weight * off * off) if memory.count else 0.0
    return dataclasses.replace(memory, reported={}, count=count, mean=mean, spread=spread)


def _certain(memory: AutoscaleMemory, place: CurrentWorld) -> bool:
    """Whether the mean is certain enough to judge a step: the larger the world, the less a step changes it."""
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
        # The mean is still a mixture of before and after: measure it again as well.
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
    """Judge the step between two sizes measured in succession by the contribution of its nodes."""
    low, high = learnt.rung(min(before, memory.nodes)), learnt.rung(max(before, memory.nodes))
    down = memory.nodes == low.nodes
    if down and high.found is not Found.UNKNOWN:
        return memory, learnt  # returning from a trial: noise must not reverse the verdict
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


def _propose(memory: AutoscaleMemory, learnt: Learnt, place: CurrentWorld, rules: AutoscaleRules, now_s: float) -> Look:
    """Choose the best size, and request it once it has held for a while and the last change is long enough ago."""
    nodes, facts = memory.nodes, _facts(memory, learnt, place)
    if place.lacking:
        return Look(_show(memory, 0, f"{facts}; {place.lacking}"), learnt)
    choice = _choose(memory, learnt, place, rules, now_s)
    text = f"{facts}; {choice.why}"
    if choice.nodes == nodes:
        return Look(dataclasses.replace(_show(memory, nodes, text), lean=0), learnt)
    if memory.lean != choice.nodes:
        memory = dataclasses.replace(memory, lean=choice.nodes, lean_s=now_s)
    if place.advice:
        return Look(_show(memory, choice.nodes, f"{text}; {place.advice}"), learnt)
    cooled_s = memory.changed_s + rules.cooldown_s
    if now_s < cooled_s:
        return Look(_show(memory, choice.nodes, f"{text}, {rules.cooldown_s:g} s after the last change"), learnt)
    memory = _show(memory, choice.nodes, text)
    if now_s < memory.lean_s + HOLD_S:
        return Look(memory, learnt)
    # The step is judged by the current throughput of this size, not by that when it was new.
    learnt = learnt.put(dataclasses.replace(learnt.rung(nodes), rate=memory.mean))
    return Look(dataclasses.replace(memory, changed_s=now_s, lean=0), learnt, choice.nodes)


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
        return _Choice(nodes - unit, f"what {last} brings is unknown: trying without")
    if above.nodes > place.highest:
        return _Choice(nodes, "the maximum")
    if above.found is Found.BAD:
        return _Choice(
            nodes, f"{more} brought {_percent(above.gain)} of an average node, less than {_percent(rules.efficiency)}"
        )
    return _Choice(nodes, f"{more} would be tried: none is there")


def _show(memory: AutoscaleMemory, proposal: int, reason: str) -> AutoscaleMemory:
    return dataclasses.replace(memory, proposal=proposal, reason=reason)


def _facts(memory: AutoscaleMemory, learnt: Learnt, place: CurrentWorld) -> str:
    """Text such as ``4 nodes: 412 samples/s, 3.1x of one (78 % a node)``."""
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
