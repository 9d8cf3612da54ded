"""Hosts on one machine, for tests; skips those where the kernel does not allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from benchmarks.common import hosts as real
from benchmarks.common.hosts import Network

__all__ = ["Network", "network"]


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """A switch with these hosts. Skips the test where the kernel does not allow it."""
    try:
        with real.network(hosts) as made:
            yield made
    except real.NotAllowed as error:
        pytest.skip(str(error))
