"""A client of an etcd with TLS of its own, whose certificates are renewed while a job runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from pyetcd.etcdrpc import rpc_pb2, rpc_pb2_grpc

from edl.adapters import etcd_rpc
from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_lease import EtcdLeases
from edl.adapters.etcd_rpc import EtcdTls
from edl.adapters.identity import Identity, identity_of
from edl.errors import StoreUnavailable
from edl.wire.secret import Secret

LIMIT_S = 60.0
OLD, NEW = (identity_of(Secret(name * 32)) for name in (b"a", b"b"))


class _EmptyStore(rpc_pb2_grpc.KVServicer):  # type: ignore[misc]  # pyetcd has no types
    async def Range(self, request: Any, context: Any) -> Any:
        return rpc_pb2.RangeResponse()


@pytest.fixture
def tls(tmp_path: Path) -> EtcdTls:
    return EtcdTls(*(str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem")))


def write(tls: EtcdTls, identity: Identity) -> None:
    for path, data in ((tls.ca, identity.ca), (tls.cert, identity.client), (tls.key, identity.key)):
        assert path is not None
        Path(path).write_bytes(data)


def remove(tls: EtcdTls) -> None:
    Path(tls.ca).unlink()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def serve(port: int, identity: Identity) -> grpc.aio.Server:
    """A server that only accepts clients with a certificate of this authority."""
    server = grpc.aio.server()
    rpc_pb2_grpc.add_KVServicer_to_server(_EmptyStore(), server)
    assert server.add_secure_port(f"localhost:{port}", identity.of_server()) == port
    await server.start()
    return server


async def read_at_last(store: EtcdStore) -> None:
    """Read until there is an answer."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            await store.read("/")
            return


def with_store(tls: EtcdTls, timeout_s: float, work: Callable[[EtcdStore, int], Awaitable[None]]) -> None:
    """Read once with the old certificates, then ``work`` at a server that accepts only the new ones."""

    async def run() -> None:
        port = free_port()
        store = EtcdStore([f"localhost:{port}"], timeout_s, tls=tls)
        before = await serve(port, OLD)
        write(tls, OLD)
        await store.read("/")
        await before.stop(None)
        after = await serve(port, NEW)
        try:
            await work(store, port)
        finally:
            await store.close()
            await after.stop(None)

    asyncio.run(run())


def test_renewed_files_are_read_again(tls: EtcdTls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_rpc, "RENEW_S", 0.0)

    async def renew(store: EtcdStore, port: int) -> None:
        write(tls, NEW)
        assert (await store.read("/")).entries == ()

    with_store(tls, LIMIT_S, renew)


def test_files_that_are_half_renewed_are_read_once_more(tls: EtcdTls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_rpc, "RENEW_S", 0.0)

    async def renew(store: EtcdStore, port: int) -> None:
        remove(tls)
        with pytest.raises(StoreUnavailable):
            await store.read("/")
        write(tls, NEW)
        await asyncio.wait_for(read_at_last(store), LIMIT_S)

    with_store(tls, 1.0, renew)


def test_a_lease_is_not_renewed_and_the_thread_lives_while_there_is_no_file(tls: EtcdTls) -> None:
    assert not EtcdLeases(["localhost:1"], 1.0, tls).renew(1)


def test_without_new_files_the_message_says_what_to_renew(tls: EtcdTls) -> None:
    async def renew_nothing(store: EtcdStore, port: int) -> None:
        with pytest.raises(StoreUnavailable, match="expired"):
            await store.read("/")

    with_store(tls, 1.0, renew_nothing)
