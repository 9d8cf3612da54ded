"""Validation of the arguments of a script's embeddings, the same in both frameworks. Errors name what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import SettingError

COMBINERS = (None, "sum", "mean")
MODES = ("sum", "mean", "max")
"""How the rows of a bag become one."""

UNKNOWN_TO_NUMPY = ("bfloat16", "float8")
"""Parts of the names of types that NumPy lacks: torch refuses to convert them, and Paddle gives their bits as
integers."""


def checked_combiner(combiner: str | None) -> str | None:
    """Return ``combiner`` if it is valid. Raises ``SettingError``."""
    if combiner not in COMBINERS:
        raise SettingError("combiner", combiner, "must be None, sum or mean")
    return combiner


def checked_mode(mode: str) -> str:
    """Return the mode of an embedding bag if it is valid. Raises ``SettingError``."""
    if mode not in MODES:
        raise SettingError("mode", repr(mode), "must be sum, mean or max")
    return mode


def checked_every(every: int) -> int:
    """Return ``every`` if it is at least 1. Raises ``SettingError``."""
    if every < 1:
        raise SettingError("every", every, "must be at least 1")
    return every


def checked_padding(padding_key: int | None) -> int | None:
    """Return ``padding_key`` if a key may have that value. Raises ``SettingError``."""
    if padding_key is not None and (type(padding_key) is not int or not -(1 << 63) <= padding_key < 1 << 63):
        raise SettingError("padding_key", padding_key, "must be an integer from -2**63 to 2**63 - 1, or None")
    return padding_key


def integer_keys(keys: NDArray[Any], table: str = "") -> NDArray[np.int64]:
    """Convert keys to int64. Raises ``SettingError``, naming the table, for non-integers and values out of range."""
    name = f"keys of table {table}" if table else "keys"
    if keys.dtype == np.int64:
        return keys
    if keys.dtype.kind not in "iu":
        raise SettingError(name, keys.dtype, "must be integers (int64)")
    if keys.dtype == np.uint64 and keys.size and int(keys.max()) >= 1 << 63:
        raise SettingError(name, int(keys.max()), "must be below 2**63 (int64)", "Hash them, or view them as int64")
    return keys.astype(np.int64)


def plain_array(values: Any) -> NDArray[Any]:
    """The values of a number, an array, or a tensor of either framework on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if any(kind in str(values.dtype) for kind in UNKNOWN_TO_NUMPY):
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def table_name(table: Any) -> str:
    """Table name of a name or of a module that has a table."""
    return str(getattr(table, "table", table))
