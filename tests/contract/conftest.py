"""Real services for contract tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.slurm_fixture import Slurm, missing
from tests.support.copies_fixture import Bench, MemoryBench, TcpBench


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """One real Slurm for all tests here, with room for eight jobs of one processor, and little grace."""
    if lacking := missing():
        pytest.skip(f"no Slurm: {lacking}")
    with Slurm(tmp_path_factory.mktemp("slurm"), cpus=8, grace_s=3) as running:
        yield running


@pytest.fixture
def slurm(slurm_cluster: Slurm) -> Iterator[Slurm]:
    """The same, without jobs before and after."""
    try:
        yield slurm_cluster
    finally:
        slurm_cluster.clear()


@pytest.fixture(params=[MemoryBench, TcpBench])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made: Bench = request.param()
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[TcpBench]:
    made = TcpBench()
    yield made
    made.close()
