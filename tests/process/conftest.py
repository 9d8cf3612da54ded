"""Stores for tests of whole jobs, and the option for long ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.harness import OutsideEtcd


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the fault tests of hours in full length")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutsideEtcd]:
    """One etcd for all tests that do not break it."""
    with OutsideEtcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutsideEtcd]:
    """One for a test that breaks it."""
    with OutsideEtcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running
