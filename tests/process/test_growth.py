"""Writes of the Master grow linearly with the number of nodes, and no election happens meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.growth import measure
from tests.process.harness import OutsideEtcd

SMALL, LARGE = 50, 200


@pytest.mark.timeout(240)
def test_writes_of_200_nodes_against_those_of_50(tmp_path: Path) -> None:
    with OutsideEtcd(tmp_path) as etcd:
        small, large = (asyncio.run(measure(nodes, etcd.endpoint)) for nodes in (SMALL, LARGE))
    for phases in (("attach", "form"), ("re-form",)):  # where attaching ends and forming begins is a matter of luck
        before, after = (sum(one.phases[phase].written_bytes for phase in phases) for one in (small, large))
        assert 0 < after < 1.5 * LARGE / SMALL * before, phases
        assert sum(large.phases[phase].writes for phase in phases) <= LARGE, "what comes together is written together"
    assert large.phases["re-form"].writes <= 20, "each names all nodes"
    assert (small.deposed, large.deposed) == (0, 0)
