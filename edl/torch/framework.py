"""torch, as the framework-neutral part of a worker sees it."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed as dist

from edl.torch.arrays import TorchArrays
from edl.torch.ddp import arm, disarm
from edl.torch.group import GroupLost, TorchGroup, forget_default_group, has_nccl_abort, watch_new_groups, why_not
from edl.torch.sockets import FOLDER
from edl.wire.local import Seat
from edl.worker.exchange import exchange
from edl.worker.framework import Arrays

_PEER_LOSS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe"
    r"|gloo/transport/|gloo::|Gloo connectFullMesh failed"
    r"|Timed out waiting \d+ms for"
    r"|NCCL communicator was aborted|ncclRemoteError|ncclSystemError|remote process exited or there was a network error"
    r"|Watchdog caught collective operation timeout"
    r"|failed to recv, got 0 bytes|[Ss]ocket Timeout|TCPStore",
)
"""How gloo, NCCL and torch's store say, in a plain ``RuntimeError``, that the other side is gone."""

_LONGEST_CHAIN = 10


class TorchFramework:
    """``edl.worker.framework.Framework`` for torch."""

    name = "torch"

    def __init__(self) -> None:
        self.arrays: Arrays = TorchArrays()
        self.seat: Seat | None = None

    def why_not_in_process(self) -> str:
        """Why this worker has to be restarted to join the next world; empty when it can stay."""
        if not os.path.isdir(FOLDER):
            return f"this system has no {FOLDER}, by which blocked calls are interrupted"
        if not dist.is_available() or not dist.is_gloo_available():
            return "this torch was built without gloo"
        if torch.cuda.is_available() and dist.is_nccl_available() and not has_nccl_abort():
            return f"NCCL cannot be aborted in torch {torch.__version__}"
        return why_not()

    def prepare(self, seat: Seat) -> TorchGroup:
        """Part from the group before, and begin one that ``abort`` works on."""
        watch_new_groups(None)
        disarm(seat.round)
        forget_default_group()
        self.seat = seat
        return TorchGroup(seat)

    def connect(self, group: TorchGroup, seat: Seat) -> None:
        """Form the group; ``torch.distributed`` then uses it like one made by ``init_process_group``."""
        group.connect(self._backend(seat))
        arm(begins_from_nothing=seat.restore_commit == 0)

    def lost_peers(self, error: BaseException) -> bool:
        """Whether a lost peer or an aborted group is what this exception is about, or what caused it."""
        cause: BaseException | None = error
        for _ in range(_LONGEST_CHAIN):
            if cause is None:
                return False
            if _speaks_of_peers(cause):
                return True
            cause = cause.__cause__
        return False

    def exchange(self, data: bytes) -> list[bytes]:
        """Over torch's default group, whoever has made it."""
        if not dist.is_initialized():
            return [data]
        return [data] if dist.get_world_size() == 1 else exchange(data, _gather)

    def _backend(self, seat: Seat) -> str:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            return "gloo"
        # Whoever gave each worker a card of its own (--virtual-local-rank) shows it only that one.
        torch.cuda.set_device(seat.local_rank if seat.local_rank < torch.cuda.device_count() else 0)
        # The default is to end the process when a communicator is aborted.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # noqa: TID251
        return "cpu:gloo,cuda:nccl"


def _gather(data: bytes) -> list[bytes]:
    group: Any = dist.group.WORLD
    # A script's own group may have no backend for the host's memory.
    device = "cpu" if any(kind.type == "cpu" for kind in group._device_types) else "cuda"
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [part.cpu().numpy().tobytes() for part in parts]


def _speaks_of_peers(error: BaseException) -> bool:
    known: tuple[type[BaseException], ...] = tuple(
        kind for name in ("DistBackendError", "DistNetworkError", "DistStoreError")
        if isinstance(kind := getattr(dist, name, None), type)
    )  # fmt: skip
    if isinstance(error, (GroupLost, *known)):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_LOSS.search(str(error)))


def current() -> TorchFramework:
    """The one framework of this process."""
    return _current


_current = TorchFramework()
