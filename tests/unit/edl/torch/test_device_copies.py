"""Copies between a device and the agent's memory, on a device whose copies happen late."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edl.torch import cuda  # noqa: E402
from edl.torch import device_copies as module  # noqa: E402
from edl.torch.arrays import TorchArrays  # noqa: E402
from edl.torch.cuda import CudaRuntime, CudaStream, wait_for  # noqa: E402
from edl.torch.device_copies import DeviceCopies  # noqa: E402
from tests.support.fake_device import FakeDevice  # noqa: E402

pytestmark = pytest.mark.torch
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors meet all limits."""
    for name, value in (("STAGE_BYTES", 1000), ("PACKED_BYTES", 300), ("JOINED_BYTES", 900), ("GAP_BYTES", 40)):
        monkeypatch.setattr(module, name, value)


def copies_with(device: FakeDevice) -> DeviceCopies:
    def move(moves: Sequence[tuple[int, int, int]]) -> None:
        for one in moves:
            ctypes.memmove(*one)

    made = DeviceCopies(device, move)
    made.device = DEVICE
    return made


def address_of(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def a_tensor(draw: random.Random) -> Any:
    """Of any type and layout."""
    count = draw.choice([1, 2, 7, 24, 60, 120, 600])
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    plain = (torch.arange(count) * draw.randrange(1, 99) % 251).to(dtype)
    match draw.randrange(6):
        case 0:
            return torch.complex(torch.arange(count * 1.0), torch.full((count,), 3.0)).conj()
        case 1:
            return (
                torch.complex(torch.arange(count * 1.0), torch.full((count,), 3.0)).conj().imag
            )  # the bit for "negative"
        case 2:
            return torch.stack([plain, plain]).t()
        case 3:
            return plain[:1].expand(5)
        case 4:
            return torch.nn.Parameter(plain.float())
        case _:
            return plain.view(1, count)


def exact(tensor: Any) -> bytes:
    """The bytes by another way: element by element."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.untyped_storage().tolist())


def laid_out(draw: random.Random) -> tuple[bytearray, list[tuple[int, Any]], bytearray]:
    """Memory in which the host has written its part, where the device's tensors belong, and what is to come of it."""
    places, at = [], draw.randrange(8)
    for _ in range(draw.randrange(1, 30)):
        tensor = a_tensor(draw)
        places.append((at, tensor))
        at += tensor.nbytes + draw.choice([0, 0, 4, 40, 41, 500])
    memory = bytearray(draw.randbytes(at + 8))
    wanted = bytearray(memory)
    for place, tensor in places:
        wanted[place : place + tensor.nbytes] = exact(tensor)
    draw.shuffle(places)
    return memory, places, wanted


@pytest.mark.slow
@pytest.mark.parametrize("locked", [True, False])
def test_every_byte_arrives_and_what_the_host_has_written_stays(locked: bool) -> None:
    for seed in range(60):
        memory, places, wanted = laid_out(random.Random(seed))
        device = FakeDevice("" if locked else "out of memory")
        copies = copies_with(device)
        unlock = copies.lock(memoryview(memory))
        assert (unlock is not None) == locked
        begin = address_of(memory)
        copies.copy_out(DEVICE, [(begin + place, tensor) for place, tensor in places])
        assert memory == wanted, seed
        assert bool(device.stages) != locked and not device.pending
        for _, tensor in places:
            if tensor.is_leaf:
                with torch.no_grad():
                    tensor.zero_()  # the next step; nothing may be read any more
        assert memory == wanted, seed
        if unlock is not None:
            unlock()
        assert not device.locked


def test_the_device_shows_a_copy_that_nobody_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests the fake: without the wait the assertions above fail."""
    monkeypatch.setattr("tests.support.fake_device.FakeEvent.synchronize", lambda self: None)
    memory, places, wanted = laid_out(random.Random(1))
    copies = copies_with(FakeDevice())
    assert copies.lock(memoryview(memory)) is not None
    copies.copy_out(DEVICE, [(address_of(memory) + place, tensor) for place, tensor in places])
    assert memory != wanted


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("locked", [True, False])
def test_after_a_failure_no_copy_is_under_way(
    locked: bool, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a late one would change the next commit, which goes to the same memory."""
    monkeypatch.setattr(module, "PACKED_BYTES", 1 << 10)
    device = FakeDevice("" if locked else "out of memory")
    copies = copies_with(device)
    memory = bytearray(3000)
    copies.lock(memoryview(memory))

    join = device.joined

    def joined(pieces: Any) -> Any:
        if device.copies:
            raise error
        return join(pieces)

    monkeypatch.setattr(device, "joined", joined)
    begin = address_of(memory)
    places = [(begin, torch.ones(2000, dtype=torch.uint8)), (begin + 2000, torch.ones(500, dtype=torch.uint8))]
    with pytest.raises(type(error)):
        copies.copy_out(DEVICE, places)
    assert device.copies == 1 and not device.pending


def test_small_tensors_travel_together_although_counters_of_the_host_lie_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "JOINED_BYTES", 32 << 20)
    monkeypatch.setattr(module, "PACKED_BYTES", 1 << 20)
    tensors = [torch.full((3000,), number % 251, dtype=torch.uint8) for number in range(2000)]
    memory = bytearray(b"\x01\x02\x03\x04") * ((3004 * len(tensors)) // 4)
    device = FakeDevice()
    copies = copies_with(device)
    copies.lock(memoryview(memory))
    copies.copy_out(DEVICE, [(address_of(memory) + 3004 * number, tensor) for number, tensor in enumerate(tensors)])
    assert (device.copies, device.uploads) == (1, 1)
    for number in range(2000):
        assert memory[3004 * number] == number % 251 == memory[3004 * number + 2999]
        assert memory[3004 * number + 3000 : 3004 * (number + 1)] == b"\x01\x02\x03\x04"


@pytest.mark.parametrize("seed", range(40))
def test_tensors_are_made_bytes_by_the_real_calls(seed: int) -> None:
    """They are torch's own, which do the same on the host."""
    draw = random.Random(seed)
    stream = CudaStream(None)
    mixed = [a_tensor(draw) for _ in range(draw.randrange(1, 9))]
    same = [tensor for tensor in mixed if tensor.dtype == mixed[0].dtype]
    with torch.no_grad():
        for pieces in (mixed, same):
            assert bytes(stream.joined(pieces).tolist()) == b"".join(map(exact, pieces))
            assert [bytes(stream.dense(piece).tolist()) for piece in pieces] == list(map(exact, pieces))


def filled(pairs: list[tuple[Any, Any]]) -> bool:
    return all(exact(place) == exact(part) for place, part in pairs)


def to_restore(draw: random.Random, memory: Any) -> list[tuple[Any, Any]]:
    """Tensors of the device's, each with the view of the bytes that belong there."""
    pairs, at = [], 8
    while at + 5000 < len(memory):
        place = a_tensor(draw)
        if place.is_conj() or place.is_neg() or not place.is_contiguous():
            continue
        place = torch.full_like(place.detach(), 1)
        if place.dtype != torch.bool:  # of whose bytes only 0 and 1 mean something
            bytes_ = torch.frombuffer(memory, dtype=torch.uint8, count=place.nbytes, offset=at)
            pairs.append((place, bytes_.view(place.dtype).view(place.shape)))
        at += -(-place.nbytes // 8) * 8 + draw.choice([0, 64])
    draw.shuffle(pairs)
    return pairs


def test_a_single_element_of_any_stride() -> None:
    """It counts as dense."""
    place = torch.zeros(6)[1:2].as_strided((1, 1), (3, 5))
    copies = copies_with(FakeDevice())
    copies.copy_in([(place, torch.full((1, 1), 7.0))])
    assert float(place) == 7
    memory = bytearray(4)
    copies.copy_out(DEVICE, [(address_of(memory), place)])
    assert bytes(memory) == exact(place)


@pytest.mark.parametrize("kind", ["locked", "alias", "pageable"])
def test_existing_tensors_of_the_device_are_filled(kind: str) -> None:
    for seed in range(15):
        draw = random.Random(seed)
        memory = bytearray(draw.randbytes(12_000))
        twin = bytearray(memory)
        device = FakeDevice()
        copies = copies_with(device)
        if kind != "pageable":
            copies.lock(memoryview(memory if kind == "locked" else twin))
        pairs = to_restore(draw, memory)
        if kind == "alias":
            with copies.alias(memoryview(memory), memoryview(twin)):
                copies.copy_in(pairs)
        else:
            copies.copy_in(pairs)
        assert filled(pairs) and not device.pending, seed
        assert bool(device.stages) == (kind == "pageable")


def test_an_alias_ends_with_its_context() -> None:
    memory, twin = bytearray(5000), bytearray(5000)
    device = FakeDevice()
    copies = copies_with(device)
    copies.lock(memoryview(twin))
    with copies.alias(memoryview(memory), memoryview(twin)):
        pass
    memory[:] = b"\x07" * 5000
    place = torch.zeros(5000, dtype=torch.uint8)
    copies.copy_in([(place, torch.frombuffer(memory, dtype=torch.uint8))])
    assert device.stages and int(place.min()) == 7


def test_memory_that_cannot_be_locked_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    copies = copies_with(FakeDevice("out of memory"))
    for _ in range(3):
        assert copies.lock(memoryview(bytearray(123_456))) is None
    said = capfd.readouterr().err
    assert said.count("123,456 bytes of memory for commits could not be page-locked (out of memory") == 1
    assert "`ulimit -l` is" in said and "LimitMEMLOCK=" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device, which locks it")
def test_a_torch_without_the_calls_says_so() -> None:
    assert CudaRuntime().lock(torch.device("cuda", 0), 4096, 4096)


def test_without_a_device_nothing_is_locked() -> None:
    device = FakeDevice()
    copies = copies_with(device)
    copies.device = None
    assert copies.lock(memoryview(bytearray(10))) is None and not device.locked


def test_locked_memory_is_found_by_address() -> None:
    device = FakeDevice()
    copies = copies_with(device)
    maps = [mmap.mmap(-1, 8192) for _ in range(5)]
    unlocks = [copies.lock(memoryview(one)) for one in maps]
    for one in maps:
        assert copies._locked_bytes(address_of(one) + 100, 8092) is not None
    assert unlocks[2] is not None
    unlocks[2]()
    assert copies._locked_bytes(address_of(maps[2]), 1) is None
    assert copies._locked_bytes(address_of(maps[3]), 8192) is not None


class Mixed(TorchArrays):
    """Takes tensors of more than one dimension for those of a device."""

    def copy_out(self, values: Any, buffers: Any) -> None:
        pairs = list(zip(values, buffers, strict=True))
        super().copy_out([v for v, _ in pairs if v.dim() < 2], [b for v, b in pairs if v.dim() < 2])
        there = [(address_of(b), v) for v, b in pairs if v.dim() > 1]
        if there:
            self.device_copies.copy_out(DEVICE, there)


def test_the_arrays_copy_their_own_part_first() -> None:
    arrays = Mixed()
    device = FakeDevice()
    arrays.device_copies = copies_with(device)
    values = [torch.full((3, 4), 5.0), torch.full((1,), 9.0), torch.full((2, 2), 6.0), torch.arange(9)]
    memory = bytearray(sum(value.nbytes for value in values))
    arrays.device_copies.lock(memoryview(memory))
    buffers, at = [], 0
    for value in values:
        buffers.append(memoryview(memory)[at : at + value.nbytes])
        at += value.nbytes
    arrays.copy_out(values, buffers)
    assert bytes(memory) == b"".join(map(exact, values))
    assert device.uploads == 1


def test_only_a_card_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))
    )
    wait_for(torch.device("cuda", 1))
    wait_for(DEVICE)
    assert waited == [torch.device("cuda", 1)]


class Stream:
    """Of a card."""

    def __init__(self, device: Any, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


def test_a_card_has_one_stream_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is freed in one of them is kept for it."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current one of {device}")
    runtime, used = CudaRuntime(), []
    for device in (0, 0, 1):
        with runtime.stream(torch.device("cuda", device)) as stream:
            used.append(stream._stream)
    first, again, other = used
    assert first is again and first is not other
    assert first.waited == ["the current one of cuda:0"] * 2
    assert first.priority == -1, "not from the pool of which NCCL's groups take theirs"


class Driver:
    """``libcuda.so.1``: the capture mode of this thread, 0 for global."""

    def __init__(self, status: int = 0) -> None:
        self.mode, self.status = 0, status
        self.seen: list[int] = []

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        if not self.status:
            self.mode, mode._obj.value = mode._obj.value, self.mode
        return self.status

    def note(self, *arguments: int) -> int:
        self.seen.append(self.mode)
        return 0


@pytest.mark.parametrize(
    ("driver", "mode"), [(Driver(), 2), (Driver(status=3), 0), (SimpleNamespace(), None), (None, None)]
)
def test_locking_leaves_captures_of_other_threads_alone(
    driver: Any, mode: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    called: list[int] = []
    note = getattr(driver, "note", lambda *arguments: 0)

    def call(*arguments: int) -> int:
        called.append(arguments[0])
        return int(note())

    runtime = SimpleNamespace(
        cudaHostRegister=call, cudaHostUnregister=call, cudaError=SimpleNamespace(success=0), cudaGetErrorString=str
    )
    cuda._exchange_capture_mode.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    try:
        assert CudaRuntime().lock(torch.device("cuda", 0), 4096, 8192) == ""
        CudaRuntime().unlock(torch.device("cuda", 0), 4096)
    finally:
        cuda._exchange_capture_mode.cache_clear()
    assert called == [4096, 4096]
    if mode is not None:
        assert (driver.seen, driver.mode) == ([mode, mode], 0)
