"""Long lists of integers as arrays, which a commit copies as they are; entry by entry they would take as long as a
step."""

from __future__ import annotations

from typing import Any

import numpy as np

_LONG = 32
_INTEGERS = "edl integers"
_LIMIT = 2**63


def pack(value: Any) -> Any:
    """The same structure with an array in place of each long list of integers."""
    if isinstance(value, dict):
        return {key: pack(part) for key, part in value.items()}
    if type(value) is list:
        if len(value) >= _LONG and all(type(one) is int and -_LIMIT <= one < _LIMIT for one in value):
            return {_INTEGERS: np.array(value, np.int64)}
        return [pack(part) for part in value]
    return value


def unpack(value: Any) -> Any:
    """The structure that was given to ``pack``."""
    if isinstance(value, dict):
        if value.keys() == {_INTEGERS}:
            return value[_INTEGERS].tolist()
        return {key: unpack(part) for key, part in value.items()}
    return [unpack(part) for part in value] if type(value) is list else value
