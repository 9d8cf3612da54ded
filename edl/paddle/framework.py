"""Paddle as seen by edl.worker. Paddle's own gloo groups are not used: a dead peer aborts the process in
``DataParallel``, their time limit is fixed at 30 seconds, and every group leaks threads and descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from edl.paddle import group
from edl.paddle.arrays import PaddleArrays
from edl.wire.local import Seat
from edl.wire.peer_loss import chain
from edl.worker.exchange import exchange
from edl.worker.framework import Accelerator
from edl.worker.ring import PeerLost, Ring


class PaddleFramework:
    """The framework port of ``edl.worker`` (``Framework``) for Paddle."""

    name = "paddle"
    accelerator: Accelerator | None = None

    def __init__(self) -> None:
        self.arrays = PaddleArrays()

    def why_not_in_process(self) -> str:
        """The reason why this worker has to be restarted to join the next world; empty when it trains on the CPU."""
        framework: Any = paddle.framework
        place = framework._current_expected_place_()
        if place.is_cpu_place():
            return ""
        return f"paddle trains on {place} here, and its communicators cannot be formed again in the same process"

    def warm_up(self, local_rank: int, enough: Callable[[], bool]) -> str:
        """Nothing to do: only workers on the CPU stay in process."""
        return ""

    def synchronize(self) -> None:
        """Nothing to wait for: workers on a GPU are restarted after a fault, and the ring's calls return with their
        results."""

    def prepare(self, seat: Seat) -> Ring:
        """The ring of this round, not connected yet."""
        return Ring(seat.rank, seat.world_size, seat.endpoints, seat.token, seat.round)

    def connect(self, ring: Ring, seat: Seat) -> None:
        """Connect the ring; ``edl.paddle``'s collectives and ``parallel`` use it from now on."""
        group.use(ring)
        ring.connect()

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes over the ring of the round, or over the group of a script that has called
        ``init_parallel_env`` itself. Returns one entry per rank."""
        ring = group.current()
        if ring is not None:
            ring.settle()
            return [data] if ring.world_size == 1 else exchange(data, lambda part: _around(ring, part))
        if self._shared():
            return exchange(data, _through_paddle)
        return [data]

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Send bytes from rank ``root`` over the ring of the round, or over the group of a script that has called
        ``init_parallel_env`` itself."""
        ring = group.current()
        if ring is not None:
            return ring.broadcast_bytes(data, root)
        rank = paddle.distributed.get_rank() if paddle.distributed.is_initialized() else root
        return self.exchange(data if rank == root else b"")[root if self._shared() else 0]

    def _shared(self) -> bool:
        """Whether the script has its own group with other ranks."""
        return bool(paddle.distributed.is_initialized() and paddle.distributed.get_world_size() > 1)

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception reports a lack of memory. Paddle's ``ResourceExhaustedError`` arrives as
        ``MemoryError``."""
        return isinstance(error, MemoryError)

    def lost_peers(self, error: BaseException) -> bool:
        """Whether an exception, or one that it was raised from, reports a lost peer."""
        return any(isinstance(one, PeerLost) for one in chain(error))


def _around(ring: Ring, data: bytes) -> list[bytes]:
    return [part.tobytes() for part in ring.all_gather(np.frombuffer(data, np.uint8))]


def _through_paddle(data: bytes) -> list[bytes]:
    parts: list[Any] = []
    paddle.distributed.all_gather(parts, paddle.to_tensor(np.frombuffer(data, np.uint8).astype(np.int32)))
    return [part.numpy().astype(np.uint8).tobytes() for part in parts]


FRAMEWORK: Any = PaddleFramework()
"""The only framework object of this process."""
