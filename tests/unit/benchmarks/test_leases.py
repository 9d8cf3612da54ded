"""The benchmark of leases counts what the Master grants."""

from __future__ import annotations

import pytest

from benchmarks.data import leases
from data_service.protocol.messages import Lease, LeasesGranted, decode


def test_the_shards_of_a_rate_are_leased_and_finished() -> None:
    master = leases.Alone(leases.big(40), nodes=2)
    with pytest.raises(RuntimeError, match="no shard was leased"):
        master.rate(8, 60.0)
    answer = decode(master.say(0, Lease(master.next(), leases.NAME, 0, 1)))
    assert isinstance(answer, LeasesGranted)
    assert not answer.leases
