"""A server in a separate process, over edl's transport and over gRPC, for the comparisons.

A workload is a function that answers ``(call, head, body)`` with the buffers of an answer. Both transports get the same
one: edl's passes the body as received and sends the answer from where it is stored; gRPC takes and returns ``bytes``,
so an answer stored elsewhere is copied once, as in any gRPC server.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import numpy as np
import psutil

from ps.net.caller import EndpointPeer, FrameCaller, FrameEndpoint, FrameReply
from ps.protocol.frames import Frame, FrameOp
from ps.protocol.handshake import TRAINER, CallerHello
from ps.protocol.messages import PserverAddress

SECRET = "benchmark"  # noqa: S105 - of processes on this host that live for seconds
HOST = "127.0.0.1"
LONG_S = 120.0
_CHUNK = 1 << 20
_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

Room = Callable[[int], memoryview]
"""Memory for an answer, reused for the next one."""
Work = Callable[[str, memoryview, Room], Sequence[Any]]


class Client(Protocol):
    """One way to reach the server."""

    def call(self, head: str, parts: Sequence[Any], out: Any | None) -> Any:
        """Make a call; returns the answer's bytes, in ``out`` if the transport can put them there."""
        ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, ready: dict[str, Any], *, unix: bool, check: bool = True, borrow: bool = True) -> None:
        path, machine = (ready["path"], ready["machine"]) if unix else ("", "")
        place = PserverAddress(1, "bench", HOST, ready["port"], path, machine)
        self._caller = FrameCaller.connect(
            place, CallerHello(TRAINER, 1, "bench", check=check), secret=SECRET, deadline_s=LONG_S
        )
        if not borrow:
            self._caller._connection.borrowed = None

    def call(self, head: str, parts: Sequence[Any], out: Any | None) -> Any:
        into = None if out is None else (lambda size, _: memoryview(out).cast("B"))
        return self._caller.request(FrameOp.PULL, head.encode(), parts, deadline_s=LONG_S, into=into).body

    def close(self) -> None:
        self._caller.close()


class Unary:
    def __init__(self, ready: dict[str, Any]) -> None:
        self._channel = grpc.insecure_channel(f"{HOST}:{ready['grpc']}", options=_NO_LIMIT)
        self._method: Any = self._channel.unary_unary("/bench/Unary")

    def call(self, head: str, parts: Sequence[Any], out: Any | None) -> Any:
        return self._method(_message(head, parts), timeout=LONG_S)

    def close(self) -> None:
        self._channel.close()


class Stream:
    """Chunks of a megabyte in both directions, one stream per call."""

    def __init__(self, ready: dict[str, Any]) -> None:
        self._channel = grpc.insecure_channel(f"{HOST}:{ready['grpc']}", options=_NO_LIMIT)
        self._method: Any = self._channel.stream_stream("/bench/Stream")

    def call(self, head: str, parts: Sequence[Any], out: Any | None) -> Any:
        answer = self._method(iter(_chunks(_message(head, parts))), timeout=LONG_S)
        if out is None:
            return b"".join(answer)
        place, done = memoryview(out).cast("B"), 0
        for piece in answer:
            place[done : done + len(piece)] = piece
            done += len(piece)
        return place

    def close(self) -> None:
        self._channel.close()


def _message(head: str, parts: Sequence[Any]) -> bytes:
    return b"".join([head.encode(), b"\n", *(memoryview(part).cast("B") for part in parts)])


def _chunks(data: bytes) -> Iterator[bytes]:
    for begin in range(0, len(data), _CHUNK):
        yield data[begin : begin + _CHUNK]


def _split(message: bytes) -> tuple[str, memoryview]:
    end = message.index(b"\n")
    return message[:end].decode(), memoryview(message)[end + 1 :]


def _join(parts: Sequence[Any]) -> bytes:
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def serve(work: Work) -> None:
    """Serve until stdin ends."""

    def handle(peer: EndpointPeer, frame: Frame) -> FrameReply:
        return FrameReply(FrameOp.OK, b"", work(str(frame.head, "utf-8"), frame.body, peer.room))

    kept: dict[str, memoryview] = {}

    def room(size: int) -> memoryview:
        if len(kept.get("room", b"")) < size:
            kept["room"] = np.empty(size, np.uint8).data
        return kept["room"][:size]

    def unary(request: bytes, context: Any) -> bytes:
        return _join(work(*_split(request), room))

    def stream(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from _chunks(_join(work(*_split(b"".join(requests)), room)))

    endpoint = FrameEndpoint(handle, secret=SECRET)
    endpoint.start(HOST)
    server = grpc.server(ThreadPoolExecutor(2), options=_NO_LIMIT)
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    ready = {"port": endpoint.port, "path": endpoint.path, "machine": endpoint.machine, "grpc": port}
    print(json.dumps(ready), flush=True)
    sys.stdin.read()
    endpoint.stop()
    server.stop(0)


@contextlib.contextmanager
def server(module: str, *arguments: str) -> Iterator[tuple[dict[str, Any], psutil.Process]]:
    """A process that serves ``module.work(*arguments)``; yields the description that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ps.rpc", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline()), psutil.Process(process.pid)
    finally:
        process.communicate()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def clients(ready: dict[str, Any]) -> dict[str, Client]:
    """All clients to compare, by name."""
    return {
        "ours, TCP": Ours(ready, unix=False),
        "ours, TCP, bodies unchecked": Ours(ready, unix=False, check=False),
        "ours, unix socket": Ours(ready, unix=True, borrow=False),
        "ours, unix socket, memory lent": Ours(ready, unix=True),
        "gRPC unary": Unary(ready),
        "gRPC stream": Stream(ready),
    }


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]).work(*sys.argv[2:]))
