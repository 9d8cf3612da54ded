"""Admission to the launcher's gRPC port: requests without the job's token, or too long, are not decoded."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from edl.adapters import transport
from edl.adapters.admission import SMALL_BYTES
from edl.adapters.transport import SERVICE, MasterServer
from edl.wire import codec
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose

TOKEN = "right"
ANYTHING = b"\x0a\x00" * 1000


class Decoded:
    """Counts what is decoded, in place of the transport's own decoders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("_decode_question", "_decode_request", "_decode_asked", "_decode_output", "_decode_stacks"):
            monkeypatch.setattr(transport, name, self._decode)
        for name in ("decode", "decode_agent"):
            monkeypatch.setattr(codec, name, self._decode)

    def _decode(self, *_: object) -> Asked:
        self.count += 1
        return Asked(Purpose.DATA, "")


async def call(port: int, method: str, body: bytes, token: str | None, streaming: bool = False) -> str:
    """The status of one call."""
    metadata = None if token is None else (("authorization", f"Bearer {token}"),)
    if streaming:
        return await asyncio.to_thread(_stream, port, method, body, metadata)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask: Any = channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            await ask(body, metadata=metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return "OK"


def _stream(port: int, method: str, body: bytes, metadata: Any) -> str:
    """Not through ``grpc.aio``, whose client reports INTERNAL when the server refuses the call before the message has
    left, and loses the server's status."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        join: Any = channel.stream_stream(f"/{SERVICE}/{method}")
        try:
            list(join(iter([body]), metadata=metadata, timeout=30))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def serve(body: Any) -> None:
    async def all_of() -> None:
        server = MasterServer(lambda: TOKEN)
        port = await server.start("127.0.0.1")
        try:
            await body(port)
        finally:
            await server.stop()

    asyncio.run(all_of())


@pytest.mark.parametrize("token", [None, "", "wrong", "righ"])
@pytest.mark.parametrize("method", ["Status", "Events", "Ask", "Drain", "Stop", "Join", "Output", "Stacks"])
def test_nothing_is_decoded_without_the_token(monkeypatch: pytest.MonkeyPatch, method: str, token: str | None) -> None:
    decoded = Decoded(monkeypatch)

    async def body(port: int) -> None:
        assert await call(port, method, ANYTHING, token, streaming=method == "Join") == "UNAUTHENTICATED"

    serve(body)
    assert decoded.count == 0


@pytest.mark.parametrize("method", ["Status", "Events", "Ask", "Drain", "Output", "Stacks"])
def test_what_asks_for_something_is_short(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    decoded = Decoded(monkeypatch)

    async def body(port: int) -> None:
        assert await call(port, method, b"x" * (SMALL_BYTES + 1), TOKEN) == "UNKNOWN"
        assert decoded.count == 0
        assert await call(port, method, b"x" * SMALL_BYTES, TOKEN) == "UNAVAILABLE", "read, but nobody rules here"
        assert decoded.count == 1

    serve(body)
