"""16-bit number formats on the network: half precision, and bfloat16 (the upper half of a float32), which numpy
lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import SettingError
from ps.spec import TableSpec, UpdateRule

WIRE_DTYPES: dict[str, Any] = {"f4": np.dtype(np.float32), "f2": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}
"""The numpy type of a body, by the format's name in a head."""
_CHUNK = 1 << 16
"""Numbers converted at a time, so that intermediate results stay in the cache."""


def accept(name: str) -> str:
    """Return ``name`` if it is a known format. Raises ``SettingError``."""
    if name not in WIRE_DTYPES:
        raise SettingError("wire", repr(name), f"must be one of {', '.join(WIRE_DTYPES)}")
    return name


def wire_of(spec: TableSpec, wire: str) -> str:
    """The format for rows of a table, on the network or in an export: ``wire``, but float32 for counters, which must
    stay exact."""
    return "f4" if spec.optimizer.rule is UpdateRule.ADD else wire


def encode_half(rows: NDArray[np.float32], name: str) -> NDArray[Any]:
    """Convert rows to the network format; ``f4`` returns them unchanged. Values too large for half precision become
    infinite."""
    if name == "f4":
        return rows
    if name == "f2":
        with np.errstate(over="ignore"):
            return rows.astype(np.float16)
    out = np.empty(rows.shape, np.uint16)
    flat, target = rows.reshape(-1).view(np.uint32), out.reshape(-1)
    for begin in range(0, len(flat), _CHUNK):
        bits = flat[begin : begin + _CHUNK]
        # Round to nearest, ties to even. The addition must not carry a NaN into the sign bit.
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        if nan.any():
            rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
        target[begin : begin + _CHUNK] = rounded
    return out


def decode_half(values: NDArray[Any], name: str, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """The inverse of ``encode_half``, into ``out``, which has the same shape and is returned."""
    if name == "bf16":
        np.left_shift(values, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        out[...] = values
    return out
