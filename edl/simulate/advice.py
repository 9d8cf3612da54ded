"""Recommends settings by simulating several and taking the best. Compared are shares of the cluster's slot time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from edl.errors import SettingError
from edl.master.goodput.slot_times import NS
from edl.simulate.accounts import SavingRules, account
from edl.simulate.history import RestoredFrom, SimulatedHistory
from edl.simulate.scenario import SimulatedScenario

AROUND = (0.125, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
"""Intervals that are tried, as multiples of Young's."""
SPARES = (0, 1, 2, 4, 8)
UNITS = (1, 2, 4, 8, 16, 32)
CHECKPOINT_EVERY = "--checkpoint-every"
"""The setting whose values are seconds."""


Known = Mapping[SimulatedScenario, SimulatedHistory]
"""Scenarios that have been simulated already."""
NOTHING_KNOWN: Known = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TriedSetting:
    """One value of a setting, and what came of it."""

    value: float
    of_cluster: float
    """Useful share of all slot time of the cluster."""


@dataclass(frozen=True, slots=True)
class SettingAdvice:
    """The best of several values."""

    setting: str
    best: float
    tried: tuple[TriedSetting, ...]
    why: str
    """What else is to be known."""
    to_vary: str = ""
    """What to change so that several values are compared, if none were."""


def young_s(blocks_s: float, between_s: float) -> float:
    """Young's interval: the square root of twice the cost of a checkpoint times the mean time between its uses."""
    return math.sqrt(2 * blocks_s * between_s)


def between_loads_s(history: SimulatedHistory) -> float:
    """Mean time of training from one return to a checkpoint to the next; infinity: there was none."""
    loads = sum(one.restored is RestoredFrom.STORAGE for one in history.spells[1:])
    trained_ns = sum(one.halted_ns - one.begin_ns for one in history.spells)
    return trained_ns / NS / loads if loads else math.inf


def interval(history: SimulatedHistory, saving: SavingRules) -> SettingAdvice:
    """The interval between checkpoints. All are judged by one history, which does not depend on it."""
    between_s = between_loads_s(history)
    if math.isinf(between_s):
        why = "no checkpoint was read: it only limits what is lost if copies in memory are, so any interval does"
        to_vary = "Simulate faults that cost a load, as with --no-memory"
        return SettingAdvice(CHECKPOINT_EVERY, saving.checkpoint_s, (), why, to_vary)
    if not saving.blocks_s:
        shortest_s = max(saving.step_s, saving.write_s)
        why = "checkpoints do not block training: one after the other, as fast as they can be written"
        return SettingAdvice(CHECKPOINT_EVERY, shortest_s, (), why, "Set --checkpoint-blocks")
    middle_s = young_s(saving.blocks_s, between_s)
    values = [max(saving.step_s, middle_s * one) for one in AROUND]
    tried = tuple(
        TriedSetting(value, account(history, dataclasses.replace(saving, checkpoint_s=value)).of_cluster)
        for value in sorted({*values, saving.checkpoint_s})
    )
    why = f"Young: sqrt(2 x {saving.blocks_s:g} s x {between_s:,.0f} s between loads) = {middle_s:,.0f} s"
    return SettingAdvice(CHECKPOINT_EVERY, _best(tried).value, tried, why)


def spares(scenario: SimulatedScenario, known: Known = NOTHING_KNOWN) -> SettingAdvice:
    """The number of spares, which cost their own slots."""
    found = []
    for value in sorted({*SPARES, scenario.spares}):
        with contextlib.suppress(SettingError):  # the recorded faults or the racks need more nodes
            found.append((float(value), scenario.with_spares(value)))
    tried = _simulated(found, known)
    return SettingAdvice("--spares", _best(tried).value, tried, "a spare that idles counts as slot time that is lost")


def unit(scenario: SimulatedScenario, known: Known = NOTHING_KNOWN) -> SettingAdvice:
    """The node unit, among those that the model's replicas allow. Faster steps of certain sizes are not part of it."""
    found = []
    for value in sorted({*UNITS, scenario.job.unit}):
        if value % scenario.job.replica_nodes and scenario.job.replica_nodes > 1:
            continue
        try:
            job = dataclasses.replace(scenario.job, unit=value)
        except SettingError:
            continue  # no size within the bounds is a multiple of it
        found.append((float(value), dataclasses.replace(scenario, job=job)))
    tried = _simulated(found, known)
    return SettingAdvice("--node-unit", _best(tried).value, tried, "the smallest that the model allows idles least")


def placement(scenario: SimulatedScenario, known: Known = NOTHING_KNOWN) -> SettingAdvice:
    """Whether launchers should know their racks: 1 yes, 0 no. ``edl`` then keeps copies on other racks."""
    both = (
        (float(racks), dataclasses.replace(scenario, cluster=dataclasses.replace(scenario.cluster, racks_known=racks)))
        for racks in (True, False)
    )
    tried = _simulated(both, known)
    return SettingAdvice("--rack", _best(tried).value, tried, "1: copies on other racks, 0: on any other node")


def recommend(scenario: SimulatedScenario, history: SimulatedHistory) -> list[SettingAdvice]:
    """All that can be recommended for a scenario, whose history is already known."""
    known = {scenario: history}
    found = [interval(history, scenario.saving), spares(scenario, known), unit(scenario, known)]
    return [*found, placement(scenario, known)] if scenario.cluster.rack_nodes else found


def _simulated(scenarios: Iterable[tuple[float, SimulatedScenario]], known: Known) -> tuple[TriedSetting, ...]:
    return tuple(
        TriedSetting(value, account(known.get(one) or one.run(), one.saving).of_cluster) for value, one in scenarios
    )


def _best(tried: tuple[TriedSetting, ...]) -> TriedSetting:
    """Of equals the first."""
    return max(tried, key=lambda one: one.of_cluster)
