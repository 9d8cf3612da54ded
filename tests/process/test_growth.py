"""Writes of the Master grow linearly with the number of nodes, and no election happens meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.growth import measure
from tests.process.harness import OutsideEtcd

SMALL, LARGE = 50, 200
LEASE_S = 60.0
"""On a busy machine this process may not run for several seconds."""
NOTE_BYTES = 1_000
"""A write that notes the arrival of some nodes has 700 to 900 bytes, however many they are."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_writes_of_200_nodes_against_those_of_50(tmp_path: Path) -> None:
    with OutsideEtcd(tmp_path) as etcd:
        small, large = (asyncio.run(measure(nodes, etcd.endpoint, lease_s=LEASE_S)) for nodes in (SMALL, LARGE))
    per_node = small.phases["re-form"].written_bytes / SMALL
    for phases in (("attach", "form"), ("re-form",)):  # where attaching ends and forming begins is a matter of luck
        writes, written = (
            sum(getattr(large.phases[one], name) for one in phases) for name in ("writes", "written_bytes")
        )
        assert 0 < writes <= LARGE, "what comes together is written together"
        assert written < 1.5 * (LARGE * per_node + writes * NOTE_BYTES), "all nodes are named once, not in each write"
    assert large.phases["re-form"].writes <= 20, "each names all nodes"
    assert (small.deposed, large.deposed) == (0, 0)
