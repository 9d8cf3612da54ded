"""torch as seen by the framework-neutral part of a worker."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from edl.torch import data_waits, nccl
from edl.torch.arrays import TorchArrays
from edl.torch.collectives import Collectives, observe
from edl.torch.cuda import wait_for
from edl.torch.ddp import arm, disarm
from edl.torch.group import GroupLost, TorchGroup, forget_default_group, why_not
from edl.torch.known_meshes import known
from edl.torch.sockets import FOLDER
from edl.torch.warm_calls import DeviceCalls
from edl.torch.warm_up import carry_out, device_of, plan
from edl.wire.local import Seat
from edl.wire.peer_loss import chain, speaks_of_lost_peer
from edl.worker.exchange import exchange
from edl.worker.framework import Accelerator, Arrays

_NO_MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate memory|out of memory\. Tried to allocate")
"""Also matches inside the message of ``load_state_dict``."""


class TorchFramework:
    """The framework port of ``edl.worker`` (``Framework``) for torch."""

    name = "torch"

    def __init__(self) -> None:
        arrays = TorchArrays()
        self.arrays: Arrays = arrays
        self.device_copies = arrays.device_copies
        self.accelerator: Accelerator | None = None
        self.seat: Seat | None = None
        self._group: TorchGroup | None = None

    def why_not_in_process(self) -> str:
        """The reason why this worker has to be restarted to join the next world; empty when it can stay."""
        if not os.path.isdir(FOLDER):
            return f"this system has no {FOLDER}, by which blocked calls are interrupted"
        if not dist.is_available() or not dist.is_gloo_available():
            return "this torch was built without gloo"
        if _uses_nccl():
            return nccl.why_not(os.environ) or why_not()  # noqa: TID251  torch's own settings
        return why_not()

    def warm_up(self, local_rank: int, enough: Callable[[], bool]) -> str:
        """Make this process's first calls on its GPU, if NCCL is used; see ``edl.torch.warm_up``."""
        devices = torch.cuda.device_count() if _uses_nccl() else 0
        device = torch.device("cuda", device_of(local_rank, devices))
        failed = carry_out(plan(devices), DeviceCalls(device), enough)
        if devices and not failed:
            self._copy_to(device)
        return failed

    def synchronize(self) -> None:
        """Wait for the current stream of this worker's GPU. Another one may wait for a message that a peer sends only
        after this round."""
        if self.device_copies.device is not None:
            wait_for(self.device_copies.device)

    def prepare(self, seat: Seat) -> TorchGroup:
        """Forget the previous group, and create one for this round that ``abort`` can disconnect."""
        disarm(seat.round)
        known.forget()
        forget_default_group()
        self.seat = seat
        self._group = TorchGroup(seat)
        return self._group

    def connect(self, group: TorchGroup, seat: Seat) -> None:
        """Form the group; ``torch.distributed`` then uses it like one made by ``init_process_group``."""
        observe(self._watch, self.lost_peers)
        data_waits.observe()
        group.connect(self._backend(seat))
        arm(begins_from_nothing=seat.restore_commit == 0)

    @property
    def device_type(self) -> str:
        """The kind of device whose tensors the workers of this world can exchange: ``cuda`` if there is NCCL."""
        formed = self._group is None or self._group.has_nccl
        return "cuda" if formed and _uses_nccl() else "cpu"

    def _watch(self) -> Collectives | None:
        return self._group.watch if self._group is not None else None

    def lost_peers(self, error: BaseException) -> bool:
        """Whether an exception, or one that it was raised from, reports a lost peer or an aborted group."""
        return any(_speaks_of_peers(one) for one in chain(error))

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception reports a lack of memory. torch has a class for devices, but only a message for the
        host."""
        device = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)  # torch.OutOfMemoryError since 2.5
        if isinstance(error, (MemoryError, device)):
            return True
        return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes over torch's default group, even if the script created it. Returns one entry per rank."""
        if not dist.is_initialized():
            return [data]
        if dist.get_world_size() == 1:
            return [data]
        if self._group is not None:
            self._group.watch.due()
            self._refuse_garbage()
        return exchange(data, self._gather)

    def _gather(self, data: bytes) -> list[bytes]:
        parts = _gather(data)
        self._refuse_garbage()
        return parts

    def _refuse_garbage(self) -> None:
        """Check for failures. The results have left the device, so the collective has ended and an abort that spoiled
        them is visible now. Raises ``GroupLost``."""
        if self._group is not None and (why := self._group.failure()):
            raise GroupLost(f"round {self._group.seat.round}: the exchanged data cannot be used: {why}")

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Send bytes from rank ``root`` over torch's default group, even if the script created it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return data
        size = int.from_bytes(self.exchange(len(data).to_bytes(8, "big"))[root], "big")
        if not size:
            return b""
        mine = bytearray(data) if dist.get_rank() == root else bytearray(size)
        buffer = torch.frombuffer(mine, dtype=torch.uint8).to(_host())
        dist.broadcast(buffer, root)
        result = buffer.cpu().numpy().tobytes()
        self._refuse_garbage()
        return result

    def _copy_to(self, device: torch.device) -> None:
        """Have commits copied from this device."""
        self.device_copies.device = device
        self.accelerator = self.device_copies

    def _backend(self, seat: Seat) -> str:
        if not _uses_nccl():
            return "gloo"
        torch.cuda.set_device(device_of(seat.local_rank, torch.cuda.device_count()))
        self._copy_to(torch.device("cuda", torch.cuda.current_device()))
        nccl.set_up(os.environ)  # noqa: TID251  torch's own settings
        return "cpu:gloo,cuda:nccl"


def _uses_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _host() -> str:
    """The kind of device from which the default group takes short messages."""
    group: Any = dist.group.WORLD
    # The script's own group may have no backend for CPU tensors.
    return "cpu" if any(kind.type == "cpu" for kind in group._device_types) else "cuda"


def _gather(data: bytes) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_host())
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
    return isinstance(error, RuntimeError) and speaks_of_lost_peer(str(error))


def current() -> TorchFramework:
    """The only framework object of this process."""
    return _current


_current = TorchFramework()
