"""Transports for copies of snapshots, in memory and over TCP, and pools to copy between."""

from __future__ import annotations

import zlib
from typing import Protocol

from edl.adapters.clock import SystemClock
from edl.adapters.copies import TcpCopies
from edl.adapters.copy_connection import CopyLimits
from edl.checkpoint.memory.buffer_table import SnapshotStream
from edl.checkpoint.memory.snapshot_pool import Loan, MemorySnapshotPool
from edl.ports import Copies, Label
from edl.testing.memory_copies import MemoryCopies, MemoryNetwork, Trouble
from edl.testing.snapshots import JOB, make_snapshot
from edl.types import NodeId
from edl.wire.records import Holding, Version
from tests.support.spoiling_proxy import Proxy

A, B = NodeId("a"), NodeId("b")
TOKEN = "secret"
LIMITS = CopyLimits(connect_s=10, handshake_s=1.5, silence_s=1.5)  # a busy machine is no silent peer
SIZE = 1_000_000
OLD, NEW = Holding(Version(1, 1)), Holding(Version(1, 2))


class Bench(Protocol):
    """A transport for copies under test."""

    def node(self, token: str = TOKEN) -> Copies: ...
    def spoiled(self, port: int, trouble: Trouble, upwards: bool) -> int: ...
    def mend(self) -> None: ...
    def close(self) -> None: ...


class MemoryBench:
    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def node(self, token: str = TOKEN) -> Copies:
        return MemoryCopies(self.network, token)

    def spoiled(self, port: int, trouble: Trouble, upwards: bool) -> int:
        self.network.trouble = trouble
        return port

    def mend(self) -> None:
        self.network.trouble = None

    def close(self) -> None:
        pass


class TcpBench:
    def __init__(self) -> None:
        self._nodes: list[TcpCopies] = []
        self._proxies: list[Proxy] = []

    def node(self, token: str = TOKEN) -> Copies:
        self._nodes.append(TcpCopies(A, lambda: token, SystemClock(), LIMITS))
        return self._nodes[-1]

    def spoiled(self, port: int, trouble: Trouble, upwards: bool) -> int:
        self._proxies.append(Proxy(port, trouble, upwards, SIZE // 2))
        return self._proxies[-1].port

    def mend(self) -> None:
        pass

    def close(self) -> None:
        for node in self._nodes:
            node.stop()
        for proxy in self._proxies:
            proxy.close()


def snapshot_pool(node: NodeId = B, limit_bytes: int = 64 << 20) -> MemorySnapshotPool:
    return MemorySnapshotPool(node, JOB, limit_bytes, lambda: None)


def put_in(
    into: MemorySnapshotPool, holding: Holding, fill: int, stream: SnapshotStream | None = None
) -> SnapshotStream:
    """Put a snapshot into the pool, as if a worker had committed it."""
    data = make_snapshot(holding, fill, SIZE)
    stream = stream or SnapshotStream.of_worker(0, "state")
    arrival = into.incoming(stream, Label(A, holding, len(data)))
    arrival.view[:] = data
    arrival.accept(zlib.crc32(data))
    return stream


def lent(owner: MemorySnapshotPool, holding: Holding = NEW, fill: int = 7) -> Loan:
    put_in(owner, holding, fill)
    loan = owner.borrow(holding.version, holding.shard)
    assert loan is not None
    return loan
