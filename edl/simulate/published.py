"""Figures that others have published, with the rates and durations that they state, as scenarios.

What is not stated is chosen here and said in docs/simulate.md. No result is written down: all are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edl.simulate.accounts import SavingRules, SimulatedAccount, account
from edl.simulate.advice import young_s
from edl.simulate.faults import FaultProcess, FaultType
from edl.simulate.scenario import DAY_S, SimulatedScenario
from edl.simulate.shape import ClusterShape, JobShape, PhaseTimes

MINUTE_S = 60.0
HOUR_S = 3600.0
META_MTBF_S, META_GPUS = 1.8 * HOUR_S, 16_384
"""The failure rate to plan for, of arXiv 2410.21680."""
DLROVER_GPUS, DLROVER_DAILY, DLROVER_CURED = 1000, 0.0027, 0.75
"""GPUs of the job, faults of a GPU in a day, and the share of faults that a restart of the process cures."""
PODS = 100
"""Nodes of the large simulated jobs. Each fault stops all of them, so only the job's rate of faults matters."""


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One published figure, beside the simulated one; both are shares."""

    what: str
    scenario: str
    published: float
    simulated: float


@dataclass(frozen=True, slots=True)
class _Claim:
    what: str
    share: float
    of: Callable[[SimulatedAccount], float]


def _running(found: SimulatedAccount) -> float:
    return found.running


def _effective(found: SimulatedAccount) -> float:
    return found.effective


def _pause(found: SimulatedAccount) -> float:
    return 1 - found.running


def _dlrover(stop_s: float, locate_s: float, load_s: float, blocks_s: float) -> SimulatedScenario:
    """``stop_s``: submission, start of pods and checks, after every fault. ``locate_s``: finding the bad node, after a
    fault that no restart cures."""
    nodes = DLROVER_GPUS // 8
    every_s = DAY_S / (8 * DLROVER_DAILY)
    between_s = DAY_S / (DLROVER_GPUS * DLROVER_DAILY)
    return SimulatedScenario(
        ClusterShape(nodes + 8, 8),
        JobShape(nodes, nodes, memory=False, in_process=False, state_nodes=0),
        (
            FaultProcess(FaultType.WORKER, every_s / DLROVER_CURED),
            FaultProcess(FaultType.NODE, every_s / (1 - DLROVER_CURED), lasts_s=DAY_S),
        ),
        times=PhaseTimes(noticed_node_s=max(30.0, locate_s), connect_s=stop_s, load_s=load_s, start_s=10.0),
        saving=SavingRules(10.0, 0, 0.0, young_s(blocks_s, between_s), blocks_s, 0.0),
        horizon_s=84 * DAY_S,
    )


def _stalls(gpus: int, stall_s: float) -> SimulatedScenario:
    """Every fault stops all GPUs for ``stall_s``, at the rate of Meta's clusters; nothing is repeated."""
    every_s = META_MTBF_S * META_GPUS / gpus * PODS
    return SimulatedScenario(
        ClusterShape(PODS, gpus // PODS),
        JobShape(PODS, PODS),
        (FaultProcess(FaultType.WORKER, every_s),),
        times=PhaseTimes(connect_s=stall_s, start_s=0.0, restore_s=0.0),
        horizon_s=(14 if gpus > 20_000 else 90) * DAY_S,
    )


_DLROVER_BEFORE = _dlrover(15 * MINUTE_S, 120 * MINUTE_S, 8 * MINUTE_S, 10 * MINUTE_S)
_DLROVER_AFTER = _dlrover(3 * MINUTE_S, 5 * MINUTE_S, 4 * MINUTE_S, MINUTE_S)

PRESETS: Mapping[str, tuple[tuple[str, SimulatedScenario, tuple[_Claim, ...]], ...]] = {
    "dlrover": (
        (
            "1,000 GPUs, before",
            _DLROVER_BEFORE,
            (
                _Claim("running", 0.608, _running),
                _Claim("effective training", 0.329, _effective),
                _Claim("pause after faults", 0.30, _pause),
            ),
        ),
        (
            "1,000 GPUs, with DLRover",
            _DLROVER_AFTER,
            (
                _Claim("running", 0.836, _running),
                _Claim("effective training", 0.589, _effective),
                _Claim("pause after faults", 0.12, _pause),
            ),
        ),
    ),
    "byterobust": tuple(
        (
            f"9,600 GPUs, stall {minutes} min",
            _stalls(9_600, minutes * MINUTE_S),
            (_Claim("effective", 0.97, _effective),),
        )
        for minutes in (2, 5, 10)
    ),
    "meta": (
        ("100,000 GPUs, stall 10 min", _stalls(100_000, 10 * MINUTE_S), (_Claim("effective", 0.44, _effective),)),
        ("100,000 GPUs, stall 3 min", _stalls(100_000, 3 * MINUTE_S), (_Claim("effective", 0.80, _effective),)),
    ),
}


def reproduce(preset: str) -> list[PublishedFigure]:
    """Simulate the scenarios of a preset. Raises ``KeyError`` for another name."""
    found = []
    for name, scenario, claims in PRESETS[preset]:
        result = account(scenario.run(), scenario.saving)
        found += [PublishedFigure(claim.what, name, claim.share, claim.of(result)) for claim in claims]
    return found
