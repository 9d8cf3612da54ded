"""What a script keeps, as JSON with references to arrays, and back.

A dict with text keys is a JSON object, a list a JSON list, a scalar itself. Everything else is an object with one key
that begins with ``$``: ``$array`` and ``$numpy`` (a name), ``$tuple``, ``$bytes`` (base64), ``$float`` (``nan``,
``inf``, ``-inf``), ``$dict`` (pairs, where keys are no texts or could be taken for one of these).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

from edl.errors import StateError

_DEEPEST = 100
_KEYS = (str, int, float, bool, type(None))
_KINDS = "None, bool, int, float, str, bytes, list, tuple, dict, an array, or an object with state_dict()"

Leaves = list[tuple[str, Any]]


def flatten(value: Any, is_array: Callable[[object], bool], prefix: str = "") -> tuple[Any, Leaves]:
    """The structure as JSON, and the arrays in it with a name each, in order.

    Names are the paths to the arrays, such as ``model.layer1.weight``; where two would be the same, the later one gets
    ``#2`` behind it. ``prefix`` begins each. Raises ``StateError`` with the path of what cannot be kept.
    """
    flattener = _Flattener(is_array)
    return flattener.encode(value, prefix, 0), flattener.leaves


def unflatten(tree: Any, array: Callable[[str, bool], Any]) -> Any:
    """The inverse of ``flatten``. ``array(name, is_numpy)`` returns an array. Raises ``StateError`` for what
    ``flatten`` does not make."""
    if isinstance(tree, dict):
        tag = next(iter(tree), "")
        if not tag.startswith("$"):
            return {key: unflatten(part, array) for key, part in tree.items()}
        return _untag(tag, tree[tag], array)
    if isinstance(tree, list):
        return [unflatten(part, array) for part in tree]
    return tree


def map_arrays(value: Any, is_array: Callable[[object], bool], change: Callable[[Any], Any]) -> Any:
    """The same structure with every array replaced by what ``change`` makes of it."""
    if is_array(value):
        return change(value)
    if isinstance(value, dict):
        return {key: map_arrays(part, is_array, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([map_arrays(part, is_array, change) for part in value])
    return value


def is_plain(value: object, is_array: Callable[[object], bool]) -> bool:
    """Whether a value is of a kind that can be kept; what is inside a list or dict is not looked at."""
    return is_array(value) or isinstance(value, (*_KEYS, bytes, list, tuple, dict)) or _is_numpy_scalar(value)


def is_numpy(value: object) -> bool:
    """Whether it is numpy's own kind of array; does not import numpy."""
    return type(value).__module__ == "numpy"


class _Flattener:
    """One walk through a structure."""

    def __init__(self, is_array: Callable[[object], bool]) -> None:
        self._is_array = is_array
        self._taken = {"__metadata__"}
        self.leaves: Leaves = []

    def encode(self, value: Any, path: str, depth: int) -> Any:
        """The JSON of one part."""
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind is str or kind is int:
            return value
        if self._is_array(value):
            return {"$numpy" if is_numpy(value) else "$array": self._name(value, path)}
        if depth > _DEEPEST:
            raise StateError(f"state{_dotted(path)[:200]}: nested more than {_DEEPEST} deep; does it contain itself?")
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            parts = [self.encode(part, f"{path}.{index}", depth + 1) for index, part in enumerate(value)]
            return {"$tuple": parts} if isinstance(value, tuple) else parts
        return self._scalar(value, path)

    def _name(self, array: Any, path: str) -> str:
        name = path = _readable(path)
        number = 1
        while name in self._taken:
            number += 1
            name = f"{path}#{number}"
        self._taken.add(name)
        self.leaves.append((name, array))
        return name

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        parts = []
        texts = True
        for key, part in value.items():
            if not isinstance(key, _KEYS):
                raise StateError(
                    f"state{_dotted(path)}: a dict with a key of type {_type_name(key)} ({key!r:.50}) cannot be kept; "
                    "keys are str, int, float, bool or None"
                )
            texts = texts and type(key) is str and not key.startswith("$")
            parts.append((key, self.encode(part, f"{path}.{key}" if path else str(key), depth + 1)))
        if texts:
            return dict(parts)
        return {"$dict": [[self._scalar(key, path), part] for key, part in parts]}

    def _scalar(self, value: Any, path: str) -> Any:
        if _is_numpy_scalar(value):
            value = value.item()
        if isinstance(value, float):
            value = float(value)
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, (bytes, bytearray)) and type(value) in (bytes, bytearray):
            return {"$bytes": base64.b64encode(value).decode()}
        if value is None or type(value) in (bool, int, str):
            return value
        raise StateError(f"state{_dotted(path)}: a {_type_name(value)} cannot be kept; {_advice(value)}")


def _untag(tag: str, content: Any, array: Callable[[str, bool], Any]) -> Any:
    if tag in ("$array", "$numpy"):
        return array(content, tag == "$numpy")
    if tag == "$tuple":
        return tuple(unflatten(part, array) for part in content)
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$float":
        return float(content)
    if tag == "$dict":
        return {unflatten(key, array): unflatten(part, array) for key, part in content}
    raise StateError(f"the structure of a snapshot holds {tag!r}, which this edl does not know")


def _is_numpy_scalar(value: object) -> bool:
    return is_numpy(value) and hasattr(value, "item") and not hasattr(value, "__setitem__")


def _readable(path: str) -> str:
    """Nothing in it that a terminal or another reader of the format could stumble over."""
    return path if path.isprintable() else "".join(c if c.isprintable() else f"\\{ord(c):x}" for c in path)


def _dotted(path: str) -> str:
    return f".{path}" if path else ""


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _advice(value: object) -> str:
    if isinstance(value, (set, frozenset)):
        return "use a list"
    if isinstance(value, (str, int)):
        return "use its plain value"  # an enum, or another kind of str or int that would come back as a plain one
    if isinstance(value, tuple):
        return "use a plain tuple or a dict"
    return f"it must be {_KINDS}"
