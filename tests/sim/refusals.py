"""Schedules in which every checkpoint is corrupt, its writers are gone, and who was away has an older commit."""

from __future__ import annotations

import dataclasses
import random

from edl.config import NodeRange
from edl.testing.sim.faults import Fault, FaultKind, FaultPlan
from edl.testing.sim.schedules import Schedule
from edl.testing.sim.stepping import Script


def draw(seed: int) -> Schedule:
    """A world of two and a spare: one of them is away for a while and comes back as a spare, with what it had."""
    rng, drawn = random.Random(f"refusals {seed}"), Schedule.draw(seed)
    at_s, faults = rng.uniform(5, 8), []
    story = [
        (rng.choice((FaultKind.PAUSE, FaultKind.ISOLATE)), rng.uniform(8, 10), rng.uniform(11, 14)),
        (FaultKind.SAVE, 1.0, rng.uniform(2, 4)),
        *[(FaultKind.SPOIL, 1.0, 0.0)] * 3,
        *[(FaultKind.CRASH, 1.0, 0.001)] * 2,
        (FaultKind.RESTART, 1.0, 2.0),
    ]
    for kind, for_s, then_s in story:
        faults.append(Fault(at_s, kind, for_s, rng.random(), rng.random()))
        at_s += then_s
    return dataclasses.replace(
        drawn,
        spec=dataclasses.replace(
            drawn.spec,
            nodes=NodeRange(1, 2),
            max_restarts=20,
            timeouts=dataclasses.replace(drawn.spec.timeouts, recover_s=60.0),
        ),
        starts_s=drawn.starts_s[:3] if len(drawn.starts_s) > 2 else (0.0, 0.1, 0.2),
        total_s=100.0,
        plan=FaultPlan(tuple(faults), at_s + 15.0),
        script=dataclasses.replace(drawn.script or Script(), sharded=False, save_every=0, clumsy=0.0),
        saved=(),
    )
