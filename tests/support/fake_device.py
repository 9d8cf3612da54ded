"""A device whose copies happen late, as those of a real one may: when somebody waits for them, or a test drives it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from edl.torch.device_copies import as_bytes

GARBAGE = 0xA5


class FakeEvent:
    def __init__(self, device: FakeDevice, number: int) -> None:
        self._device = device
        self._number = number

    def synchronize(self) -> None:
        self._device.drive_to(self._number)


class FakeDevice:
    """``DeviceRuntime``; also its only stream. The tensors of the device are the host's own."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        """Why nothing can be locked."""
        self.locked: dict[int, int] = {}
        """Size by address."""
        self.stages: list[torch.Tensor] = []
        self.copies = self.uploads = 0
        self._queue: deque[Callable[[], object]] = deque()
        self._given = self._done = 0

    # --- DeviceRuntime -----------------------------------------------------------------------------------------------

    def lock(self, device: torch.device, address: int, size: int) -> str:
        if self.refusal:
            return self.refusal
        assert not any(begin < address + size and address < begin + length for begin, length in self.locked.items()), (
            "this memory is locked already: its mapping went without being unlocked"
        )
        self.locked[address] = size
        return ""

    def unlock(self, device: torch.device, address: int) -> None:
        del self.locked[address]

    def stage(self, size: int) -> torch.Tensor:
        self.stages.append(torch.full((size,), GARBAGE, dtype=torch.uint8))
        return self.stages[-1]

    @contextlib.contextmanager
    def stream(self, device: torch.device) -> Iterator[FakeDevice]:
        yield self

    # --- DeviceStream ------------------------------------------------------------------------------------------------

    def dense(self, source: torch.Tensor) -> torch.Tensor:
        plain = source.detach()
        if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
            return as_bytes(plain)
        made = torch.empty(plain.shape, dtype=plain.dtype)
        self._put(lambda: made.copy_(plain))
        return made.view(-1).view(torch.uint8)

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        pieces = [self.dense(piece) for piece in pieces]
        made = torch.full((sum(piece.numel() for piece in pieces),), GARBAGE, dtype=torch.uint8)
        self._put(lambda: torch.cat(pieces, out=made))
        return made

    def upload(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        made = torch.full_like(source, GARBAGE)
        self.uploads += 1
        self._start(made, source)
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        self._start(target, source)

    def record(self) -> FakeEvent:
        return FakeEvent(self, self._given)

    # --- for tests ---------------------------------------------------------------------------------------------------

    def drive_to(self, number: int) -> None:
        """Do what has been started, up to a point."""
        while self._done < number:
            self._queue.popleft()()
            self._done += 1

    @property
    def pending(self) -> int:
        """Calls that have not taken effect."""
        return len(self._queue)

    def _put(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self._given += 1

    def _start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.dtype == source.dtype == torch.uint8 and target.shape == source.shape

        def work() -> None:
            assert self._is_locked(target) != self._is_locked(source), "one end is page-locked memory of the host"
            target.copy_(source)

        self._put(work)

    def _is_locked(self, memory: torch.Tensor) -> bool:
        address, size = memory.data_ptr(), memory.numel()
        ranges = [*self.locked.items(), *((stage.data_ptr(), stage.numel()) for stage in self.stages)]
        return any(begin <= address and address + size <= begin + length for begin, length in ranges)
