"""A death soon after another: how long buckets are without a second copy, and what comes when both copies are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edl.job_records import Mode
from tests.sim.ps_world import PsSim

SEEDS = range(3)


def settle(sim: PsSim) -> None:
    """Three pservers with a copy of everything, a trainer, and a checkpoint."""
    sim.loss = sim.disk_faults = 0.0
    sim.wants_checkpoints = sim.gentle = False
    sim.training = replace(sim.training, mode=Mode.ASYNC, servers=(2, 3), save_every_s=4.0)
    sim.limits = replace(sim.limits, motion=(2, 2), gather_s=0.02)
    for _ in range(3):
        sim.add_node()
    sim.master.start()
    sim.new_place()
    sim._until(lambda: bool(sim.disk.complete), 120.0, "for a checkpoint")
    sim._until(sim.calm, 120.0, "to be calm")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_second_death_before_there_are_copies_goes_back_to_the_checkpoint(seed: int) -> None:
    sim = PsSim(seed, "sync", 12)
    with sim.watched():
        settle(sim)
        for number in sim.roles[0]:
            node = sim.by_number(number)
            assert node is not None
            sim.kill(node)
        sim._until(lambda: sim.rollbacks > 0, 60.0, "to go back to the checkpoint")
        sim._heal()
    assert not sim.master.failed and sim.restored in sim.disk.complete
