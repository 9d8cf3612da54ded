"""The parts of a health check with torch: the matrix product on each GPU or else on the processor (see
``edl.worker.probe.product``), and exchanges between GPUs through NCCL (``edl.worker.probe.exchange``).

``tests/process/test_nccl.py`` runs them on a GPU where there is one; elsewhere, tests run the exchange with gloo.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from edl.worker.probe.exchange import ExchangeFailed, NotBegun
from edl.worker.probe.product import SEEDS, WRONG, WrongProduct, largest_sum, timed

ELEMENTS = 4 << 20
"""Whole numbers of 4 bytes that each device sends."""
GPU_FACTOR = 4
"""On a GPU the matrices have this many times as many rows."""


def devices(slots: int) -> Iterator[TorchDevice]:
    """The devices of this node that workers use. ``slots``: if there are as many devices, each has one."""
    number = torch.cuda.device_count()
    if not number:
        yield TorchDevice(torch.device("cpu"), "cpu, torch", -1)
    for index in range(number):
        name = torch.cuda.get_device_name(index)
        yield TorchDevice(torch.device("cuda", index), f"{name}, torch", index if number == slots else -1)


class TorchDevice:
    """One device; a ``ProbedDevice``."""

    def __init__(self, device: torch.device, kind: str, slot: int) -> None:
        self.kind = kind
        self.slot = slot
        self._device = device

    def product_s(self, size: int) -> float:
        """See ``ProbedDevice``. The product is verified on the processor."""
        gpu = self._device.type == "cuda"
        size *= GPU_FACTOR if gpu else 1
        first, second = (_matrix(size, seed) for seed in SEEDS)
        a, b = (one.to(self._device, torch.float32) for one in (first, second))

        def multiply() -> torch.Tensor:
            found = a @ b
            if gpu:
                torch.cuda.synchronize(self._device)
            return found

        result = multiply()
        _verify(result.cpu(), first, second)
        return timed(multiply, lambda again: torch.equal(again, result))


def _matrix(size: int, seed: int) -> torch.Tensor:
    """The matrix of ``edl.worker.probe.product.entry``."""
    rows, columns = torch.arange(size).unsqueeze(1), torch.arange(size)
    return (131 * rows + 31 * columns + 5 * rows * columns + seed) % 17 - 8


def _verify(result: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    if not bool((result.abs() <= largest_sum(len(result))).all()):
        raise WrongProduct(f"{WRONG}: not numbers, or too large ones")
    whole = result.to(torch.int64)
    if not torch.equal(whole.to(torch.float32), result):
        raise WrongProduct(f"{WRONG}: not whole numbers")
    weights = 7919 * torch.arange(len(result)) % 1_000_003 + 1
    differs = torch.mv(whole, weights) != torch.mv(first, torch.mv(second, weights))
    if bool(differs.any()):
        rows = torch.nonzero(differs).flatten().tolist()
        raise WrongProduct(f"{WRONG}: {len(rows)} of {len(result)} rows, the first is {rows[0]}")


# --- between devices -------------------------------------------------------------------------------------------------


def device_links() -> TorchLinks | None:
    """Exchanges between GPUs; None: this node has none, or torch has no NCCL."""
    number = torch.cuda.device_count() if dist.is_available() and dist.is_nccl_available() else 0
    return TorchLinks([torch.device("cuda", index) for index in range(number)], "nccl") if number else None


class TorchLinks:
    """Exchanges between the devices of two nodes: device i of one with device i of the other; ``DeviceLinks``."""

    def __init__(self, devices: Sequence[torch.device], backend: str) -> None:
        self._devices = devices
        self._backend = backend
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.store_port = self._store.port

    def exchange(self, name: str, rank: int, host: str, port: int, limit_s: float) -> None:
        """See ``DeviceLinks``."""
        limit = datetime.timedelta(seconds=limit_s)
        try:
            store = self._store if rank == 0 else TCPStore(host, port, is_master=False, timeout=limit)
            ours = PrefixStore(name, store)
            ours.set_timeout(limit)
            theirs = self._announce(ours, rank)
        except RuntimeError as error:  # as torch reports a store that is gone or a value that does not come
            raise NotBegun(str(error).partition("\n")[0]) from error
        for index, device in enumerate(self._devices[:theirs]):
            group = PrefixStore(f"{name}/{index}", store)
            dist.init_process_group(self._backend, store=group, rank=rank, world_size=2, timeout=limit)
            try:
                _gather(device, rank, index)
            finally:
                dist.destroy_process_group()
        ours.set(f"done {rank}", "")
        ours.get(f"done {1 - rank}")  # the store's side must not go on, and perhaps end, before the other is done

    def _announce(self, ours: PrefixStore, rank: int) -> int:
        """Say that this side begins, and wait for the other; returns the number of its devices."""
        mine = f"devices {rank}"
        ours.set(mine, str(len(self._devices)))
        try:
            return int(ours.get(f"devices {1 - rank}"))
        except RuntimeError:
            ours.delete_key(mine)  # one that comes later must not wait for this side
            raise


def _gather(device: torch.device, rank: int, index: int) -> None:
    """Gather what both devices send, and compare. Raises ``ExchangeFailed``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mine = _pattern(rank, device)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    for sender, arrived in enumerate(both):
        if not torch.equal(arrived, _pattern(sender, device)):
            raise ExchangeFailed(f"device {index}: other numbers arrived than were sent")


def _pattern(sender: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(ELEMENTS, dtype=torch.int64) * (7919 + sender) % 1_000_003
    return numbers.to(torch.int32).to(device)
