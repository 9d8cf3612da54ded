"""``Copies`` between the in-memory checkpoints of one process, for tests: no sockets, faults on demand."""

from __future__ import annotations

import enum
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edl.errors import CheckpointError
from edl.ports import Arrival, Label, Lent, Piece, SnapshotPool
from edl.wire.parts import check_ranges
from edl.wire.records import Version
from edl.wire.snapshot import raw_header


class Trouble(enum.Enum):
    """Faults of a transfer."""

    TRUNCATE = "the connection ends in the middle"
    FLIP = "one bit changes"
    STALL = "nothing comes any more"


@dataclass
class MemoryNetwork:
    """Registry of reachable servers. While ``trouble`` is set, it affects all transfers."""

    trouble: Trouble | None = None
    served: list[str] = field(default_factory=list)
    """One line per transfer: ``put host:port`` or ``get host:port``."""
    nodes: dict[tuple[str, int], MemoryCopies] = field(default_factory=dict)


class MemoryCopies:
    """``Copies`` of one node."""

    def __init__(self, network: MemoryNetwork, token: str = "") -> None:
        self._network = network
        self._token = token
        self._snapshot_pool: SnapshotPool | None = None

    def start(self, snapshot_pool: SnapshotPool, host: str, port: int = 0) -> int:
        """Make this node reachable; returns its port."""
        self._snapshot_pool = snapshot_pool
        port = port or len(self._network.nodes) + 1
        self._network.nodes[host, port] = self
        return port

    def put(self, host: str, port: int, lent: Lent, *, urgent: bool = False) -> None:
        """Send a copy to the node at this address. Raises ``CheckpointError``."""
        arrival = self._other(host, port).arriving(lent.label)
        if arrival is not None:
            self._carry(f"put {host}:{port}", lent, arrival)

    def get(
        self, host: str, port: int, version: Version, shard: int, arriving: Callable[[Label], Arrival | None]
    ) -> None:
        """Fetch a part of a commit from the node at this address. Raises ``CheckpointError``."""
        lent = self._borrowed(host, port, version, shard)
        try:
            arrival = arriving(lent.label)
            if arrival is not None:
                self._carry(f"get {host}:{port}", lent, arrival)
        finally:
            lent.release()

    def header(self, host: str, port: int, version: Version, shard: int) -> tuple[bytes, int]:
        """The header of a part in the memory of the node at this address. Raises ``CheckpointError``."""
        lent = self._borrowed(host, port, version, shard)
        try:
            return raw_header(lent.view), len(lent.view)
        finally:
            lent.release()

    def read(self, host: str, port: int, version: Version, shard: int, pieces: Sequence[Piece]) -> None:
        """Read ranges of a part in the memory of the node at this address. Raises ``CheckpointError``."""
        lent = self._borrowed(host, port, version, shard)
        self._network.served.append(f"read {host}:{port}")
        try:
            check_ranges([one for one, _ in pieces], len(lent.view), f"shard {shard}")
            if self._network.trouble is not None:
                raise CheckpointError(f"{host}:{port}: {self._network.trouble.value}")
            for one, view in pieces:
                view[:] = lent.view[one.start : one.start + one.size]
        finally:
            lent.release()

    def _borrowed(self, host: str, port: int, version: Version, shard: int) -> Lent:
        lent = self._other(host, port).borrow(version, shard)
        if lent is None:
            raise CheckpointError(f"{host}:{port} does not hold shard {shard} of {version}")
        return lent

    def stop(self) -> None:
        """Make this node unreachable."""
        for key in [key for key, node in self._network.nodes.items() if node is self]:
            del self._network.nodes[key]

    def _other(self, host: str, port: int) -> SnapshotPool:
        other = self._network.nodes.get((host, port))
        if other is None or other._snapshot_pool is None:
            raise CheckpointError(f"{host}:{port}: nobody is there")
        if other._token != self._token:
            raise CheckpointError(f"{host}:{port}: does not know this job's token")
        return other._snapshot_pool

    def _carry(self, name: str, lent: Lent, arrival: Arrival) -> None:
        self._network.served.append(name)
        label, trouble = lent.label, self._network.trouble
        try:
            data = bytearray(os.pread(lent.descriptor, label.size, 0))
            if trouble in (Trouble.TRUNCATE, Trouble.STALL):
                del data[len(data) // 2 :]
            elif trouble is Trouble.FLIP:
                data[-1] ^= 1
            arrival.view[: len(data)] = data
            if len(data) < label.size:
                raise CheckpointError(f"{len(data)} of {label.size} bytes came")
            if zlib.crc32(data) != lent.crc32:
                raise CheckpointError("damaged in transit: wrong checksum")
            arrival.accept(lent.crc32)
        finally:
            arrival.discard()
