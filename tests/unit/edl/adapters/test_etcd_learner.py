"""One member of an etcd of the user's own is being replaced: until it has caught up, it is a learner."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import grpc.aio
import pytest
from pyetcd.etcdrpc import rpc_pb2, rpc_pb2_grpc

from edl.adapters.etcd import EtcdStore
from edl.ports import Put

LIMIT_S = 60.0


class _Member(rpc_pb2_grpc.KVServicer):  # type: ignore[misc]  # pyetcd has no types
    async def Txn(self, request: Any, context: Any) -> Any:
        return rpc_pb2.TxnResponse(header=rpc_pb2.ResponseHeader(revision=5), succeeded=True)


class _Learner(rpc_pb2_grpc.KVServicer):  # type: ignore[misc]
    code = grpc.StatusCode.UNAVAILABLE
    asked = 0

    async def Txn(self, request: Any, context: Any) -> Any:
        self.asked += 1
        await context.abort(self.code, "etcdserver: rpc not supported for learner")


async def serve(servicer: Any) -> tuple[grpc.aio.Server, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    server = grpc.aio.server()
    rpc_pb2_grpc.add_KVServicer_to_server(servicer, server)
    server.add_insecure_port(place)
    await server.start()
    return server, place


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION])
def test_another_member_is_asked(code: grpc.StatusCode) -> None:
    """A learner has done nothing. Which status it answers with depends on its version."""
    learner = _Learner()
    learner.code = code

    async def write() -> None:
        (first, place), (second, other) = await serve(learner), await serve(_Member())
        store = EtcdStore([place, other], LIMIT_S)
        try:
            while not learner.asked:  # the connection to it may be up later than the other one
                assert await store.write([Put("/edl/job/a", b"")]) == 5
                store._connections._current = 0
        finally:
            await store.close()
            await first.stop(None)
            await second.stop(None)

    asyncio.run(asyncio.wait_for(write(), LIMIT_S))
