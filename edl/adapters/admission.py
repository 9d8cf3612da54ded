"""Who may call the launcher's gRPC port: decided by a call's metadata, before any of its messages is read.

A message is decoded into Python objects many times its size, so what a stranger sends must not get that far.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from edl.errors import ProtocolError

T = TypeVar("T")

SMALL_BYTES = 64 * 1024
"""Longest message that asks for something; the words of agents, which come on their streams, may be longer."""

LIMITS = [
    ("grpc.server_handshake_timeout_ms", 5_000),  # who connects and says nothing is hung up on
    ("grpc.max_concurrent_streams", 128),  # for each connection: an agent has one, the command line a few
]


class Admission(grpc.aio.ServerInterceptor):
    """Refuses calls without the job's token. ``token`` is asked at each call: it is not known when listening begins."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token
        # Whatever the call's own kind: this one reads no message of it.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        sent = dict(details.invocation_metadata or ()).get("authorization", "")
        if hmac.compare_digest(str(sent).encode(), f"Bearer {self._token()}".encode()):
            return await continuation(details)
        return self._refusal


async def _refuse(requests: Any, context: Any) -> Any:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong job token")
    yield b""  # never reached; it makes this a handler of streams


def small(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """``decode`` for messages that are refused when longer than ``SMALL_BYTES``."""

    def decode_small(data: bytes) -> T:
        if len(data) > SMALL_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes; at most {SMALL_BYTES} are taken here")
        return decode(data)

    return decode_small
