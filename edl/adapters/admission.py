"""Access control for the launcher's gRPC port: decided from a call's metadata before any of its messages is read.

A decoded message takes many times its size in Python objects, so unauthenticated messages must not be decoded.
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
"""Longest request; agents' messages, which arrive on their streams, may be longer."""

LIMITS = [
    ("grpc.server_handshake_timeout_ms", 5_000),  # clients that connect and stay silent are dropped
    ("grpc.max_concurrent_streams", 128),  # per connection: an agent has one stream, the command line a few
]


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the job's token. ``token`` is called for each request, since the token may be unknown when
    listening begins."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token
        # One handler for all kinds of calls: it reads no messages.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Passes calls with the right token on to the service, and refuses the others."""
        sent = dict(details.invocation_metadata or ()).get("authorization", "")
        if hmac.compare_digest(str(sent).encode(), f"Bearer {self._token()}".encode()):
            return await continuation(details)
        return self._refusal


async def _refuse(requests: Any, context: Any) -> Any:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong job token")
    yield b""  # never reached; it makes this a handler of streams


def small(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Wrap ``decode`` so that messages longer than ``SMALL_BYTES`` raise ``ProtocolError``."""

    def decode_small(data: bytes) -> T:
        if len(data) > SMALL_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes; this call accepts at most {SMALL_BYTES}")
        return decode(data)

    return decode_small
