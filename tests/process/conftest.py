"""Stores and a small disk for tests of whole jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import OutsideEtcd
from tests.support.small_disk import small_disk


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutsideEtcd]:
    """One etcd for all tests that do not break it."""
    with OutsideEtcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "paddle")])
def framework(request: pytest.FixtureRequest) -> str:
    """Each of them that is installed."""
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.fixture
def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutsideEtcd]:
    """One for a test that breaks it."""
    with OutsideEtcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte, where one may be mounted."""
    with small_disk(tmp_path / "disk", "1m", lazy=True) as folder:
        yield folder
