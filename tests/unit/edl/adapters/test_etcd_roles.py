"""An etcd whose users may read and write the keys of jobs only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from pyetcd.etcdrpc import rpc_pb2, rpc_pb2_grpc

from edl.adapters.etcd import EtcdStore
from edl.errors import LeaseLost, StoreError

LIMIT_S = 60.0
REVISION = 7


class _Limited(rpc_pb2_grpc.KVServicer):  # type: ignore[misc]  # pyetcd has no types
    """It has lost all leases, and its data: it was at a higher revision before."""

    async def Range(self, request: Any, context: Any) -> Any:
        if not request.key.startswith(b"/edl/"):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        return rpc_pb2.RangeResponse(header=rpc_pb2.ResponseHeader(revision=REVISION))


class _NoLeases(rpc_pb2_grpc.LeaseServicer):  # type: ignore[misc]
    async def LeaseKeepAlive(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield rpc_pb2.LeaseKeepAliveResponse(ID=request.ID, TTL=0)


class _Watches(rpc_pb2_grpc.WatchServicer):  # type: ignore[misc]
    async def Watch(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            yield rpc_pb2.WatchResponse(header=rpc_pb2.ResponseHeader(revision=REVISION), created=True)


def with_store(work: Callable[[EtcdStore], Awaitable[None]]) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        rpc_pb2_grpc.add_KVServicer_to_server(_Limited(), server)
        rpc_pb2_grpc.add_LeaseServicer_to_server(_NoLeases(), server)
        rpc_pb2_grpc.add_WatchServicer_to_server(_Watches(), server)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        await server.start()
        store = EtcdStore([f"127.0.0.1:{port}"], LIMIT_S)
        try:
            await asyncio.wait_for(work(store), LIMIT_S)
        finally:
            await store.close()
            await server.stop(None)

    asyncio.run(run())


def test_a_lease_that_has_ended_is_lost() -> None:
    """Otherwise a node that was cut off would never register again."""

    async def renew(store: EtcdStore) -> None:
        with pytest.raises(LeaseLost):
            await store.renew_lease(1)

    with_store(renew)


def test_a_store_that_has_lost_its_data_is_noticed() -> None:
    async def watch(store: EtcdStore) -> None:
        with pytest.raises(StoreError, match="it has lost its data"):
            await anext(store.watch("/edl/job/", REVISION + 1))

    with_store(watch)
