"""A port on which another job's etcd answers: the error names it, also when a later call is only slow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from edl.adapters.etcd_rpc import Connections


class Slow(grpc.aio.AioRpcError):
    """A call that got no answer in time."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "Deadline Exceeded")


@pytest.mark.parametrize(("cluster", "text"), [(7, "its disk"), (8, "an etcd of another cluster")])
def test_a_slow_call_to_another_cluster_says_whose_etcd_it_is(cluster: int, text: str) -> None:
    async def main() -> str:
        rpc = Connections(["127.0.0.1:1"], 1.0, one_cluster=True)
        rpc.expect(7)
        endpoint: Any = SimpleNamespace(address="127.0.0.1:1", foreign=False, suspect=lambda: None)
        answer = SimpleNamespace(header=SimpleNamespace(cluster_id=cluster))
        assert rpc.is_foreign(endpoint, answer) is (cluster != 7)
        return str(rpc.explained(endpoint, Slow()))

    assert text in asyncio.run(main())
