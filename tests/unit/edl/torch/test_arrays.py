"""Conversion of tensors to bytes and back."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from edl.errors import StateError  # noqa: E402
from edl.torch import arrays as module  # noqa: E402
from edl.torch.arrays import _DTYPES, PART_BYTES, SHORT_BYTES, TorchArrays  # noqa: E402

pytestmark = pytest.mark.torch
arrays = TorchArrays()


def there_and_back(value: Any) -> Any:
    info = arrays.info(value)
    buffer = bytearray(info.size)
    arrays.copy_out([value], [memoryview(buffer)])
    return arrays.copy(arrays.view(info, memoryview(bytes(buffer))))


@pytest.mark.parametrize("name", sorted(_DTYPES))
def test_every_type_comes_back_bit_for_bit(name: str) -> None:
    size = torch.empty(0, dtype=_DTYPES[name]).element_size()
    raw = torch.arange(6 * size, dtype=torch.uint8) % 2 if name == "BOOL" else torch.arange(6 * size, dtype=torch.uint8)
    value = raw.view(_DTYPES[name]).view(2, 3)
    back = there_and_back(value)
    assert arrays.info(value).dtype == name
    assert back.dtype == value.dtype and back.shape == value.shape
    assert torch.equal(back.contiguous().view(-1).view(torch.uint8), raw)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(3.5), torch.empty(0, 4), torch.arange(12).view(3, 4).t(), torch.arange(10)[::3],
     torch.ones(1).expand(5), torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()],
)  # fmt: skip
def test_every_layout_comes_back(value: Any) -> None:
    assert torch.equal(there_and_back(value), value.detach())


def test_large_and_scattered_arrays_are_shared_between_threads() -> None:
    large = torch.arange(PART_BYTES // 2, dtype=torch.int32).view(-1, 128)
    values = [large, large.t(), torch.arange(5), large[:, ::2]]
    buffers = [memoryview(bytearray(arrays.info(value).size)) for value in values]
    arrays.copy_out(values, buffers)
    for value, buffer in zip(values, buffers, strict=True):
        assert torch.equal(arrays.view(arrays.info(value), buffer), value)


def test_numpy_arrays() -> None:
    value = numpy.arange(6, dtype=numpy.uint32).reshape(2, 3).T
    assert arrays.is_array(value) and not arrays.is_array([1])
    back = there_and_back(value)
    assert back.dtype == torch.uint32 and back.tolist() == value.tolist()
    value.flags.writeable = False
    assert there_and_back(value).tolist() == value.tolist()


@pytest.mark.parametrize(
    "value",
    [torch.ones(2, dtype=torch.complex128), torch.ones(2).to_sparse(), torch.ones(2, device="meta"),
     numpy.array(["text"]), numpy.array([object()])],
)  # fmt: skip
def test_what_has_no_plain_bytes_is_refused(value: object) -> None:
    with pytest.raises(StateError, match=r"cannot be kept|no data"):
        arrays.info(value)


def test_a_view_is_no_copy_and_a_copy_is_one() -> None:
    memory = bytearray(8)
    view = arrays.view(arrays.info(torch.zeros(2)), memoryview(memory))
    copy = arrays.copy(view)
    memory[:4] = b"\x00\x00\x80\x3f"
    assert view[0] == 1.0 and copy[0] == 0.0


@pytest.mark.parametrize("size", [SHORT_BYTES - 1, SHORT_BYTES, PART_BYTES + 5])
def test_buffers_of_another_size_are_refused(size: int) -> None:
    tensor = torch.ones(size, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"a tensor of {size} bytes and a buffer of {size - 1}"):
        arrays.copy_out([tensor], [memoryview(bytearray(size - 1))])


class FakeStream:
    """A stream on which copies complete at once."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TorchArrays:
    """The way from CUDA, with tensors of the host's."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(module, "STAGE_BYTES", 1000)
    monkeypatch.setattr(module, "PACKED_BYTES", 300)
    made = TorchArrays()
    made._stages = [torch.empty(1000, dtype=torch.uint8) for _ in range(2)]
    return made


def test_all_bytes_come_from_a_device_through_the_stages(device: TorchArrays) -> None:
    complex_ones = torch.arange(20.0).view(4, 5) + 1j
    values = [
        torch.arange(3.0), torch.arange(700, dtype=torch.int32), torch.tensor(True), complex_ones.conj(),
        complex_ones.conj().imag, torch.arange(60.0).view(6, 10).t(), torch.arange(11, dtype=torch.uint8),
        torch.ones(1).expand(9), torch.arange(200, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(2)),
    ]  # fmt: skip
    memory = bytearray(sum(value.nbytes for value in values))
    place, pairs, views = ctypes.addressof(ctypes.c_char.from_buffer(memory)), [], []
    at = 0
    for value in values:
        pairs.append((place + at, value))
        views.append((value, memoryview(memory)[at : at + value.nbytes]))
        at += value.nbytes
    device._copy_from_cuda(torch.device("cpu"), pairs[::-1])  # in any order
    for value, view in views:
        assert (
            bytes(view) == value.detach().resolve_conj().resolve_neg().contiguous().numpy(force=True).tobytes()
            if (value.dtype != torch.bfloat16)
            else bytes(view) == value.view(torch.int16).numpy().tobytes()
        )


def test_small_tensors_on_a_device_travel_together(device: TorchArrays) -> None:
    tensors = [torch.full((10,), number, dtype=torch.uint8) for number in range(50)]
    pieces = [(1000 + 10 * number, tensor) for number, tensor in enumerate(tensors)]
    groups = list(module._stagings(pieces, 1000))
    assert len(groups) == 1
    assert len(list(module._packed([source for _, source in groups[0]]))) == 1
    assert module._moves(7, groups[0]) == [(1000, 7, 500)]
    assert module._moves(7, groups[0][::2]) == [(1000 + 20 * number, 7 + 10 * number, 10) for number in range(25)]
