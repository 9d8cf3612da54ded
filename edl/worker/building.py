"""Objects of a state that cannot outlive their world, such as a model whose parameters are spread over its mesh: a
function of the script builds them anew in each world, in the same process, and then they are restored."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from edl.errors import StateError


class Buildable(Protocol):
    """What the builder needs of a ``State``."""

    _objects: dict[str, Any]
    _values: dict[str, Any]
    _layouts: dict[str, Any]

    def _add(self, name: str, value: Any) -> None: ...
    def _load_object(self, name: str, obj: Any, plain: Any) -> None: ...
    def _load_value(self, name: str, live: Any, plain: Any) -> Any: ...


class Builder:
    """Calls the script's ``build`` function, which returns objects by name."""

    def __init__(self, build: Callable[[], Mapping[str, Any]]) -> None:
        self._build = build
        self._names: tuple[str, ...] = ()
        self._initial: _Initial | None = None

    def rebuild(self, state: Buildable) -> None:
        """Replace the objects of the last world. Raises ``StateError`` for a result that a state cannot keep."""
        for name in self._names:
            del state._objects[name]
        self._names = ()
        if self._initial is None:
            self._initial = _Initial(state)
        state._layouts.clear()
        gc.collect()  # a model refers to itself, and there may be no room for a second one
        built = self._build()
        if not isinstance(built, Mapping):
            raise StateError(f"build returned a {type(built).__name__}; it must return a dict of objects by name")
        for name, obj in built.items():
            if name in state._objects or name in state._values:
                raise StateError(f"build returned {name!r}, which the State has already")
            state._add(name, obj)
            if name not in state._objects:
                raise StateError(
                    f"build returned {name!r}, a {type(obj).__name__}: values are given to State, which keeps them "
                    "through every world; build returns objects with state_dict() and load_state_dict()"
                )
            self._names = (*self._names, name)

    def begin_from_nothing(self, state: Buildable) -> None:
        """The state begins with new objects: set the values and the other objects to those with which the script
        began."""
        assert self._initial is not None, "only called after rebuild"  # noqa: S101
        self._initial.restore(state)


class _Initial:
    """What the script gave to its state, before anything was restored or trained."""

    def __init__(self, state: Buildable) -> None:
        self._values = copy.deepcopy(state._values)
        self._objects = {name: copy.deepcopy(obj.state_dict()) for name, obj in state._objects.items()}

    def restore(self, state: Buildable) -> None:
        for name, value in self._values.items():
            state._values[name] = state._load_value(name, state._values[name], copy.deepcopy(value))
        for name, kept in self._objects.items():
            state._load_object(name, state._objects[name], copy.deepcopy(kept))
