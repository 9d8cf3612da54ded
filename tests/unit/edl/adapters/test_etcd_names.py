"""An etcd whose name gets another address, as after the restart of a pod."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import grpc.aio
from pyetcd.etcdrpc import rpc_pb2, rpc_pb2_grpc

from edl.adapters.etcd import EtcdStore
from edl.errors import StoreUnavailable

LIMIT_S = 20.0
"""gRPC by itself asks for the addresses of a name once in 30 s."""
ANSWERED, ADDRESS, INTERNET = b"\x81\x80", b"\xc0\x0c\x00\x01", b"\x00\x01"


class _EmptyStore(rpc_pb2_grpc.KVServicer):  # type: ignore[misc]  # pyetcd has no types
    async def Range(self, request: Any, context: Any) -> Any:
        return rpc_pb2.RangeResponse()


class NameServer(asyncio.DatagramProtocol):
    """Knows one address, whatever the name is (RFC 1035)."""

    def __init__(self, address: str) -> None:
        self.address = address

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: Any) -> None:
        question = data[12 : data.index(b"\0", 12) + 5]
        found = b""
        if question[-4:-2] == b"\x00\x01":  # not an address of IPv6
            found = ADDRESS + INTERNET + struct.pack("!IH", 1, 4) + socket.inet_aton(self.address)
        counts = struct.pack("!HHHH", 1, bool(found), 0, 0)
        self._transport.sendto(data[:2] + ANSWERED + counts + question + found, peer)


async def serve(address: str, port: int) -> grpc.aio.Server:
    server = grpc.aio.server()
    rpc_pb2_grpc.add_KVServicer_to_server(_EmptyStore(), server)
    assert server.add_insecure_port(f"{address}:{port}") == port
    await server.start()
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def read_at_last(store: EtcdStore) -> None:
    """Read until there is an answer."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            await store.read("/")
            return


def test_a_new_address_is_used_as_soon_as_the_name_has_it() -> None:
    async def move() -> None:
        names = NameServer("127.0.0.1")
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: names, local_addr=("127.0.0.1", 0)
        )
        place, port = transport.get_extra_info("sockname"), free_port()
        store = EtcdStore([f"dns://{place[0]}:{place[1]}/etcd.test:{port}"], 1.0)
        before = await serve("127.0.0.1", port)
        await store.read("/")
        await before.stop(None)
        with contextlib.suppress(StoreUnavailable):
            await store.read("/")  # the name still has the old address
        names.address = "127.0.0.2"
        after = await serve("127.0.0.2", port)
        try:
            await asyncio.wait_for(read_at_last(store), LIMIT_S)
        finally:
            await store.close()
            await after.stop(None)
            transport.close()

    asyncio.run(move())
