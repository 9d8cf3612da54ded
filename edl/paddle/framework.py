"""What edl.worker needs to know about Paddle. Its own gloo groups are not used: a peer that dies aborts the process in
``DataParallel``, 30 seconds are their fixed limit, and every group formed leaks threads and descriptors."""

from __future__ import annotations

from typing import Any

import paddle

from edl.paddle import group
from edl.paddle.arrays import PaddleArrays
from edl.wire.local import Seat
from edl.worker.ring import PeerLost, Ring


class PaddleFramework:
    """``edl.worker.framework.Framework`` for Paddle."""

    name = "paddle"

    def __init__(self) -> None:
        self.arrays = PaddleArrays()

    def why_not_in_process(self) -> str:
        """Only training on the CPU rejoins in process."""
        framework: Any = paddle.framework
        place = framework._current_expected_place_()
        if place.is_cpu_place():
            return ""
        return f"paddle trains on {place} here, and its communicators cannot be formed anew in one process"

    def prepare(self, seat: Seat) -> Ring:
        """The ring of this round, not connected yet."""
        return Ring(seat.rank, seat.world_size, seat.endpoints, seat.token, seat.round)

    def connect(self, ring: Ring, seat: Seat) -> None:
        """Connect it; ``edl.paddle``'s collectives and ``parallel`` use it from now on."""
        group.use(ring)
        ring.connect()

    def lost_peers(self, error: BaseException) -> bool:
        """Also when somebody has raised another exception from it."""
        seen: BaseException | None = error
        for _ in range(10):
            if seen is None or isinstance(seen, PeerLost):
                break
            seen = seen.__cause__ or seen.__context__
        return isinstance(seen, PeerLost)


FRAMEWORK: Any = PaddleFramework()
"""The one of this process."""
