"""Conversion of tensors to bytes and back."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from edl.errors import StateError  # noqa: E402
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
