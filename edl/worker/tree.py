"""Converts a script's values to JSON with references to arrays, and back.

A dict with string keys is a JSON object, a list a JSON list, a scalar itself. Everything else is an object with one key
that begins with ``$``: ``$array`` and ``$numpy`` (a name), ``$scalar`` (a NumPy scalar: type and base64), ``$tuple``,
``$bytes`` and ``$bytearray`` (base64), ``$float`` (``nan``, ``inf``, ``-inf``, or the bits of another NaN), ``$dict``
(pairs, if keys are not strings or could be mistaken for one of these), ``$ordered`` and ``$counter`` (pairs),
``$defaultdict`` (factory and pairs), ``$deque`` (maximum length and items), and what a framework adds with ``know``.

Types are preserved, or refused with path and type: a subclass of one of these is another type.
"""

from __future__ import annotations

import base64
import importlib
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from edl.errors import StateError

_DEEPEST = 100
_KEYS = (str, int, float, bool, type(None))
_PLAIN = frozenset({str, int, bool, type(None)})
"""Types that are valid JSON values."""
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "": None, "bool": bool, "int": int, "float": float, "str": str, "bytes": bytes, "list": list, "tuple": tuple,
    "dict": dict, "set": set, "deque": deque, "Counter": Counter, "OrderedDict": OrderedDict,
}  # fmt: skip
"""Allowed factories of a ``defaultdict``."""
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_NUMPY_SCALARS = re.compile(r"[<>|=]?(b1|[iufcSU]\d+|[mM]8(\[\w+\])?)", re.ASCII)
"""Types of NumPy scalars, in the form of ``dtype.str``."""
_KINDS = "None, bool, int, float, str, bytes, list, tuple, dict, an array, or an object with state_dict()"

Leaves = list[tuple[str, Any]]
_known: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_makers: dict[str, Callable[[Any], Any]] = {}


def know(tag: str, kind: type, to_json: Callable[[Any], Any], make: Callable[[Any], Any]) -> None:
    """Add a type of value, such as a framework's own. ``to_json`` returns plain JSON without arrays, ``make`` reads it.
    The type must also be known when a snapshot is read."""
    _known[kind] = (f"${tag}", to_json)
    _makers[f"${tag}"] = make


def flatten(value: Any, is_array: Callable[[object], bool], prefix: str = "") -> tuple[Any, Leaves]:
    """The structure as JSON, and its arrays with a name each, in order.

    Names are the paths of the arrays, such as ``model.layer1.weight``; a duplicate gets a suffix such as ``#2``.
    ``prefix`` begins each name. Raises ``StateError`` with the path of a value that cannot be saved.
    """
    found, names, arrays = walk(value, is_array, prefix)
    return found, list(zip(names, arrays, strict=True))


def walk(value: Any, is_array: Callable[[object], bool], prefix: str = "") -> tuple[Any, list[str], list[Any]]:
    """Like ``flatten``, but returns names and arrays separately, because many pairs would burden the garbage
    collector."""
    flattener = _Flattener(is_array)
    return flattener.encode(value, prefix, 0), flattener.names, flattener.arrays


def unflatten(tree: Any, array: Callable[[str, bool], Any]) -> Any:
    """Inverse of ``flatten``. ``array(name, is_numpy)`` returns an array. Raises ``StateError`` for input that
    ``flatten`` does not produce."""
    if isinstance(tree, dict):
        tag = next(iter(tree), "")
        if not tag.startswith("$"):
            return {key: unflatten(part, array) for key, part in tree.items()}
        return _untag(tag, tree[tag], array)
    if isinstance(tree, list):
        return [unflatten(part, array) for part in tree]
    return tree


def map_arrays(value: Any, is_array: Callable[[object], bool], change: Callable[[Any], Any]) -> Any:
    """The same structure, with the same types, in which every array is replaced by ``change(array)``."""
    if is_array(value):
        return change(value)
    if isinstance(value, dict):
        return like_dict(value, ((key, map_arrays(part, is_array, change)) for key, part in value.items()))
    if isinstance(value, (list, tuple, deque)):
        return like_list(value, [map_arrays(part, is_array, change) for part in value])
    return value


def map_entries(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A container of the same type, with ``change(key or index, entry)`` in place of each entry. Other values are
    returned unchanged, including subclasses of containers, which ``flatten`` refuses."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return value
    if isinstance(value, dict):
        return like_dict(value, ((key, change(key, part)) for key, part in value.items()))
    return like_list(value, [change(index, part) for index, part in enumerate(value)])


def like_dict(value: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of the same type as ``value``; a plain dict for unknown types."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, pairs)
    return type(value)(dict(pairs)) if type(value) in (OrderedDict, Counter) else dict(pairs)


def like_list(value: Any, parts: list[Any]) -> Any:
    """A list, tuple or deque of the same type as ``value``."""
    return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)


def is_plain(value: object, is_array: Callable[[object], bool]) -> bool:
    """Whether a value is of a kind that can be saved; the content of lists and dicts is not checked."""
    plain = (*_KEYS, bytes, bytearray, list, tuple, dict, deque)
    return is_array(value) or isinstance(value, plain) or type(value) in _known or _is_numpy_scalar(value)


def is_numpy(value: object) -> bool:
    """Whether it is a NumPy array or scalar; does not import NumPy."""
    return type(value).__module__ == "numpy"


class _Flattener:
    """One traversal of a structure."""

    def __init__(self, is_array: Callable[[object], bool]) -> None:
        self._is_array = is_array
        self._taken = {"__metadata__"}
        self._array_tags: dict[type, str] = {}
        """Tag for arrays of each type; empty for other types."""
        self.names: list[str] = []
        self.arrays: list[Any] = []

    def encode(self, value: Any, path: str, depth: int) -> Any:
        """The JSON of one part."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        tag = self._array_tags.get(kind)
        if tag is None:
            tag = ("$numpy" if is_numpy(value) else "$array") if self._is_array(value) else ""
            self._array_tags[kind] = tag
        if tag:
            return {tag: self._name(value, path)}
        if depth > _DEEPEST:
            raise StateError(f"state{_dotted(path)[:200]}: nested more than {_DEEPEST} deep; does it contain itself?")
        container = _CONTAINERS.get(kind)
        return container(self, value, path, depth) if container is not None else self._scalar(value, path)

    def _name(self, array: Any, path: str) -> str:
        name = path = path if path.isprintable() else _readable(path)
        number = 1
        while name in self._taken:
            number += 1
            name = f"{path}#{number}"
        self._taken.add(name)
        self.names.append(name)
        self.arrays.append(array)
        return name

    def _list(self, value: Any, path: str, depth: int) -> list[Any]:
        return [
            part if type(part) in _PLAIN else self.encode(part, f"{path}.{index}", depth + 1)
            for index, part in enumerate(value)
        ]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if any(type(key) is not str or key.startswith("$") for key in value):
            return {"$dict": self._pairs(value, path, depth)}
        front = f"{path}." if path else ""
        return {
            key: part if type(part) in _PLAIN else self.encode(part, front + key, depth + 1)
            for key, part in value.items()
        }

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[Any]:
        pairs = []
        for key, part in value.items():
            if not isinstance(key, _KEYS) and not _is_numpy_scalar(key):
                raise StateError(
                    f"state{_dotted(path)}: a dict with a key of type {_type_name(key)} ({key!r:.50}) cannot be kept; "
                    "keys are str, int, float, bool or None"
                )
            inner = self.encode(part, f"{path}.{key}" if path else str(key), depth + 1)
            pairs.append([key if type(key) in _PLAIN else self._scalar(key, path), inner])
        return pairs

    def _defaultdict(self, value: defaultdict[Any, Any], path: str, depth: int) -> Any:
        factory: Any = value.default_factory
        name = _FACTORY_NAMES.get(factory) if factory is None or isinstance(factory, type) else None
        if name is None:
            raise StateError(
                f"state{_dotted(path)}: a defaultdict that makes its values with {factory!r:.80} cannot be kept; it "
                f"may use {', '.join(filter(None, _FACTORIES))} or None"
            )
        return {"$defaultdict": [name, self._pairs(value, path, depth)]}

    def _scalar(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": _special(value)}
        if kind is bytes or kind is bytearray:
            return {f"${kind.__name__}": base64.b64encode(value).decode()}
        if kind in _known:
            tag, to_json = _known[kind]
            return {tag: to_json(value)}
        if _is_numpy_scalar(value) and _NUMPY_SCALARS.fullmatch(value.dtype.str):
            return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        raise StateError(f"state{_dotted(path)}: a {_type_name(value)} cannot be kept; {_advice(value)}")


_CONTAINERS: dict[type, Callable[[_Flattener, Any, str, int], Any]] = {
    dict: _Flattener._dict,
    list: _Flattener._list,
    tuple: lambda walk, value, path, depth: {"$tuple": walk._list(value, path, depth)},
    OrderedDict: lambda walk, value, path, depth: {"$ordered": walk._pairs(value, path, depth)},
    Counter: lambda walk, value, path, depth: {"$counter": walk._pairs(value, path, depth)},
    defaultdict: _Flattener._defaultdict,
    deque: lambda walk, value, path, depth: {"$deque": [value.maxlen, walk._list(value, path, depth)]},
}


def _special(value: float) -> str:
    """The exact text of a float that JSON cannot represent."""
    bits = struct.pack(">d", value)
    return repr(value) if struct.pack(">d", float(repr(value))) == bits else f"0x{bits.hex()}"


def _float(text: str) -> float:
    if text.startswith("0x"):
        return float(struct.unpack(">d", bytes.fromhex(text[2:]))[0])
    return float(text)


def _numpy_scalar(content: Any) -> Any:
    kind, data = content
    if not _NUMPY_SCALARS.fullmatch(kind):
        raise StateError(f"the structure of a snapshot holds a numpy scalar of {kind!r}, which this edl does not know")
    numpy = importlib.import_module("numpy")
    dtype, content = numpy.dtype(kind), base64.b64decode(data)
    if dtype.kind in "SU":  # a NumPy scalar taken out of an array would lose its trailing NULs
        return _numpy_text(numpy, dtype, content[: dtype.itemsize])
    return numpy.ndarray((), dtype, content)[()]


def _numpy_text(numpy: Any, dtype: Any, content: bytes) -> Any:
    if dtype.kind == "S":
        return numpy.bytes_(content)
    return numpy.str_(content.decode("utf-32-be" if dtype.str.startswith(">") else "utf-32-le", "surrogatepass"))


_UNTAG: dict[str, Callable[[Any, Callable[[str, bool], Any]], Any]] = {
    "$array": lambda content, array: array(content, False),
    "$numpy": lambda content, array: array(content, True),
    "$scalar": lambda content, array: _numpy_scalar(content),
    "$tuple": lambda content, array: tuple(unflatten(part, array) for part in content),
    "$bytes": lambda content, array: base64.b64decode(content),
    "$bytearray": lambda content, array: bytearray(base64.b64decode(content)),
    "$float": lambda content, array: _float(content),
    "$dict": lambda content, array: _read_pairs(content, array),
    "$ordered": lambda content, array: OrderedDict(_read_pairs(content, array)),
    "$counter": lambda content, array: Counter(_read_pairs(content, array)),
    "$defaultdict": lambda content, array: defaultdict(_factory(content[0]), _read_pairs(content[1], array)),
    "$deque": lambda content, array: deque((unflatten(part, array) for part in content[1]), content[0]),
}


def _untag(tag: str, content: Any, array: Callable[[str, bool], Any]) -> Any:
    if tag in _UNTAG:
        return _UNTAG[tag](content, array)
    if tag in _makers:
        return _makers[tag](content)
    raise StateError(f"the structure of a snapshot holds {tag!r}, which this edl does not know")


def _read_pairs(pairs: Any, array: Callable[[str, bool], Any]) -> dict[Any, Any]:
    return {unflatten(key, array): unflatten(part, array) for key, part in pairs}


def _factory(name: str) -> Callable[[], Any] | None:
    if name not in _FACTORIES:
        raise StateError(f"the structure of a snapshot holds a defaultdict of {name!r}, which this edl does not know")
    return _FACTORIES[name]


def _is_numpy_scalar(value: object) -> bool:
    return is_numpy(value) and hasattr(value, "item") and not hasattr(value, "__setitem__")


def _readable(path: str) -> str:
    """A path without characters that could confuse a terminal or another reader of the format."""
    return "".join(c if c.isprintable() else f"\\{ord(c):x}" for c in path)


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
    for kind in (list, dict, float, bytes, bytearray, deque):
        if isinstance(value, kind):
            return f"it would come back as a plain {kind.__name__}: use one"
    return f"it must be {_KINDS}"
