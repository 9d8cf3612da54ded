"""Random orders of steps, commits, breaks and kills on a device whose copies happen late, against plain bytes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edl.torch import device_copies as module  # noqa: E402
from edl.torch.device_copies import DeviceCopies  # noqa: E402
from edl.wire import local  # noqa: E402
from edl.worker import prefault  # noqa: E402
from edl.worker.mapped_memory import MappedMemory  # noqa: E402
from tests.support.fake_agent import Buffers  # noqa: E402
from tests.support.fake_device import FakeDevice, FakeEvent  # noqa: E402

pytestmark = pytest.mark.torch
SEEDS = range(40)
STEPS = 30
DEVICE = torch.device("cpu")
SIZES = [3, 40, 299, 300, 17, 2500, 8, 8, 1300]
COUNTER = 4
"""Bytes of the host's between the first two tensors."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "LEAST_BYTES", 1)
    for name, value in (("STAGE_BYTES", 1000), ("PACKED_BYTES", 300), ("JOINED_BYTES", 900), ("GAP_BYTES", 40)):
        monkeypatch.setattr(module, name, value)


def move(moves: Sequence[tuple[int, int, int]]) -> None:
    for one in moves:
        ctypes.memmove(*one)


class Process:
    """A worker's process: what it trains, and the buffers that it has mapped."""

    def __init__(self, buffers: Buffers, refusal: str) -> None:
        self.buffers = buffers
        self.device = FakeDevice(refusal)
        self.copies = DeviceCopies(self.device, move)
        self.copies.device = DEVICE
        self.tensors = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
        self.counter = 0
        self.maps: dict[int, MappedMemory] = {}

    def step(self, draw: random.Random) -> None:
        self.counter += 1
        for tensor in self.tensors:
            tensor.copy_(torch.frombuffer(bytearray(draw.randbytes(tensor.numel())), dtype=torch.uint8))

    def content(self) -> bytes:
        first, *others = (bytes(tensor.tolist()) for tensor in self.tensors)
        return first + self.counter.to_bytes(COUNTER, "little") + b"".join(others)

    def offsets(self) -> list[int]:
        starts = [0]
        for number, size in enumerate(SIZES[:-1]):
            starts.append(starts[-1] + size + (COUNTER if number == 0 else 0))
        return starts

    def copy(self, number: int) -> int:
        """Write a commit into a buffer; returns its size."""
        if number not in self.maps:
            descriptor, capacity = self.buffers.files[number]
            self.maps[number] = MappedMemory(descriptor, capacity, private=False)
            self.maps[number].prepare(self.copies)
        memory = self.maps[number]
        memory.wait()
        memory.view[SIZES[0] : SIZES[0] + COUNTER] = self.counter.to_bytes(COUNTER, "little")
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory.view))
        places = [(begin + at, tensor) for at, tensor in zip(self.offsets(), self.tensors, strict=True)]
        self.copies.copy_out(DEVICE, places)
        return sum(SIZES) + COUNTER

    def restore(self, number: int) -> None:
        readable = os.open(f"/proc/self/fd/{self.buffers.files[number][0]}", os.O_RDONLY)
        piece = MappedMemory(readable, sum(SIZES) + COUNTER, private=True)
        os.close(readable)
        twin = next((one for one in self.maps.values() if one.file == piece.file), None)
        with contextlib.ExitStack() as stack:
            locked = stack.enter_context(twin.used()) if twin is not None else None
            if locked is not None:
                stack.enter_context(self.copies.alias(piece.view, locked))
            whole = torch.frombuffer(piece.view, dtype=torch.uint8)
            parts = [whole[at : at + size] for at, size in zip(self.offsets(), SIZES, strict=True)]
            stages = len(self.device.stages)
            self.copies.copy_in(zip(self.tensors, parts, strict=True))
            assert locked is None or len(self.device.stages) == stages, "read from the page-locked mapping"
            self.counter = int.from_bytes(piece.view[SIZES[0] : SIZES[0] + COUNTER], "little")
        del whole, parts
        assert piece.close()

    def forget(self, keep: set[int]) -> None:
        """Unmap what the agent has dropped."""
        for number in self.maps.keys() - keep:
            assert self.maps.pop(number).close()
        assert len(self.device.locked) == (0 if self.device.refusal else len(self.maps)), "unlocked with its mapping"


def play(seed: int) -> None:
    draw = random.Random(seed)
    buffers = Buffers()
    refusal = draw.choice(["", "", "out of memory"])
    process = Process(buffers, refusal)
    kept: tuple[int, bytes] | None = None
    commit = 0
    for _ in range(STEPS):
        match draw.choice(["step", "step", "commit", "commit", "break in a copy", "break", "kill"]):
            case "step":
                process.step(draw)
            case "commit" | "break in a copy" as what:
                number = buffers.room(local.STATE, sum(SIZES) + COUNTER)
                size = process.copy(number)
                content = process.content()
                process.step(draw)  # at once
                if what == "commit":
                    commit += 1
                    announced = local.Committed(local.STATE, number, size, 1, commit, 0, 1, save=False)
                    assert buffers.fill(announced) == content, "what was announced is whole"
                    kept = number, content
                elif kept is not None:
                    process.restore(kept[0])
                    assert process.content() == kept[1]
            case "kill":
                process.forget(set())
                process = Process(buffers, draw.choice(["", refusal]))
                if kept is not None:
                    process.restore(kept[0])
                    assert process.content() == kept[1]
            case _:
                if kept is not None:
                    process.restore(kept[0])
                    assert process.content() == kept[1]
        process.forget(set(buffers.files))
    process.forget(set())
    for descriptor, _ in buffers.files.values():
        os.close(descriptor)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_commit_is_whole_and_comes_back(seed: int) -> None:
    play(seed)


def test_a_copy_that_nobody_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: None)
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            play(seed)


def test_a_mapping_that_goes_without_being_unlocked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "unlock", lambda self, device, address: None)
    with pytest.raises(AssertionError, match=r"without being unlocked|unlocked with its mapping"):
        for seed in SEEDS:
            play(seed)


def test_a_restore_from_another_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(self: Any, descriptor: int, size: int, *, private: bool) -> None:
        real(self, descriptor, size, private=private)
        self.file = (0, 0)

    real = MappedMemory.__init__
    monkeypatch.setattr(MappedMemory, "__init__", same)
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            play(seed)
