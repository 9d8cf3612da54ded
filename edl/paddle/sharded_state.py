"""The state of a layer and an optimizer that are sharded: each worker's rows, as they are kept and restored.

A commit of any world is first turned into what this worker would have committed in its present world; then it is
restored like a commit of its own.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from edl.checkpoint.reading.assembly import (
    LOCAL,
    OFFSET,
    SHAPE,
    Box,
    Missing,
    Spread,
    StoredArray,
    Whole,
    is_tensor_part,
)
from edl.checkpoint.reading.saved_parts import ReadRequest, SavedParts
from edl.paddle import optimizer_state
from edl.paddle.arrays import PaddleArrays, check_fit
from edl.paddle.sharding import NUMBERS
from edl.paddle.shards import ParameterRows, Shards, of
from edl.wire.snapshot import Meta
from edl.worker import tree
from edl.worker.contents import NUMPY_KINDS
from edl.worker.framework import ArrayInfo

Loading = Callable[[str, Meta], AbstractContextManager[None]]
_PARAMETERS = "parameters"
_arrays = PaddleArrays()

# --- what is kept ----------------------------------------------------------------------------------------------------


def capture_layer(shards: Shards, layer: Any) -> dict[str, Any]:
    """This worker's rows of the trained parameters, and everything else whole; all whole before the first step."""
    shards.enter()
    found = dict(layer.state_dict())
    if shards.fresh:
        return found
    of_whole = shards.level != "p_g_os"  # the script may have changed them since the step
    parts = {key: shards.part(value) for key, value in found.items()}
    return {
        key: value if (part := parts[key]) is None else part.kept(of_whole=of_whole)
        for key, value in found.items()
        if _is_here(parts[key])
    }


def capture_optimizer(shards: Shards, optimizer: Any, layers: Mapping[str, Any]) -> dict[str, Any]:
    """This worker's rows of the optimizer's state."""
    shards.enter()
    found = optimizer_state.capture(optimizer, layers)
    parts = parts_by_name(shards, layers)
    return {
        **found,
        _PARAMETERS: {
            name: {
                kind: value if is_number(optimizer, kind) else parts[name].placed(value)
                for kind, value in values.items()
            }
            for name, values in found[_PARAMETERS].items()
        },
    }


def is_number(optimizer: Any, kind: str) -> bool:
    """Whether the optimizer's values of this kind are one number for each parameter."""
    numbers = next((NUMBERS[one] for one in type(optimizer).__mro__ if one in NUMBERS), ())
    own = getattr(optimizer, "_name", None)
    return (kind.removeprefix(f"{own}_") if own else kind) in numbers


def parts_by_name(shards: Shards, layers: Mapping[str, Any]) -> dict[str, ParameterRows]:
    """The parts of an optimizer by the names of its state."""
    names = optimizer_state.names_in(layers)
    return {names[part.whole.name]: part for part in shards.parts if part.whole.name in names}


def _is_here(part: ParameterRows | None) -> bool:
    return part is None or part.box is not None


def without_parts(structure: Any) -> Any:
    """A flattened structure without the parts of sharded tensors, which not all workers have."""
    if isinstance(structure, dict):
        return {key: without_parts(part) for key, part in structure.items() if not _is_part(part)}
    return [without_parts(part) for part in structure] if isinstance(structure, list) else structure


def _is_part(structure: Any) -> bool:
    return isinstance(structure, dict) and LOCAL in structure


# --- back from memory ------------------------------------------------------------------------------------------------


def load_layer(shards: Shards, layer: Any, plain: Mapping[str, Any]) -> None:
    """Restore a layer from the result of ``capture_layer``, by the same rank of a world of the same size."""
    shards.enter()
    own = layer.state_dict()
    cut = [key for key, value in own.items() if shards.part(value) is not None]
    # A worker without rows lacks the parameter, so all workers come to the same.
    fresh = all(key in plain and not is_tensor_part(plain[key]) for key in cut)
    wanted = {key for key, value in own.items() if fresh or _is_here(shards.part(value))}
    if wanted != plain.keys():
        lacking, unknown = sorted(wanted - plain.keys())[:5], sorted(plain.keys() - wanted)[:5]
        raise ValueError(f"the model has {lacking}, which were not kept, and lacks {unknown}")
    for key, value in plain.items():
        part = shards.part(own[key])
        if is_tensor_part(value):
            rows = _at_place(part, value, key)
            if part is not None and part.row is not None:
                check_fit(part.row, rows, key)
                part.put(rows)
            continue
        check_fit(own[key], value, key)
        if part is not None:
            part.flat()
        own[key].set_value(value)
    for parameter in layer.parameters():
        parameter.clear_gradient(False)  # may be left by an interrupted backward pass
    shards.restored(fresh=fresh)


def load_optimizer(
    shards: Shards, optimizer: Any, layers: Mapping[str, Any], plain: Mapping[str, Any], owned: Callable[[Any], Any]
) -> None:
    """Restore an optimizer from the result of ``capture_optimizer``, as ``load_layer``."""
    shards.enter()
    parts = parts_by_name(shards, layers)
    kept = {
        name: {
            kind: _at_place(parts.get(name), value, f"{kind} of {name}") if is_tensor_part(value) else value
            for kind, value in values.items()
        }
        for name, values in plain[_PARAMETERS].items()
    }
    optimizer_state.load(optimizer, layers, {**plain, _PARAMETERS: kept}, owned)


def _at_place(part: ParameterRows | None, value: Mapping[str, Any], where: str) -> Any:
    """The values of a saved part. Raises ``ValueError`` if this rank has another part."""
    saved = Box(tuple(value[OFFSET]), tuple(value[LOCAL].shape))
    if part is None or list(part.shape) != list(value[SHAPE]) or part.box != saved:
        here = "nothing" if part is None or part.box is None else f"{part.box.shape} at {part.box.offset}"
        raise ValueError(f"{where}: saved as {saved.shape} at {saved.offset} of {value[SHAPE]}, here is {here}")
    return value[LOCAL]


# --- back from the parts of any world --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowCommit:
    """A commit as this worker would have made it in its present world."""

    meta: Meta
    objects: dict[str, Any]
    values: dict[str, Any]


def read(
    stored: SavedParts,
    objects: Mapping[str, Any],
    values: Iterable[str],
    rank: int,
    size: int,
    compare: Callable[[Meta, set[str], set[str]], None],
    loading: Loading,
) -> RowCommit:
    """Read the commit that a world of any size has made; each worker reads what it needs. ``compare`` is called first
    with the names of the saved objects and values, and refuses a commit of another script. ``loading`` adds to errors
    raised inside it which object was being restored. Raises ``CheckpointError``."""
    everybody = range(stored.shards)
    if size != stored.shards:
        return _RowReading(stored, tuple(everybody), objects, loading).read(values, compare)
    try:  # usually only the own part is needed
        return _RowReading(stored, (rank,), objects, loading).read(values, compare)
    except Missing:
        shards = (rank, *(other for other in everybody if other != rank))
        return _RowReading(stored, shards, objects, loading).read(values, compare)


@dataclass(frozen=True, slots=True)
class _Pending:
    """An array that is being read."""

    memory: bytearray
    info: ArrayInfo
    numpy: bool

    def made(self) -> Any:
        if not self.numpy or self.info.dtype not in NUMPY_KINDS:
            return _arrays.view(self.info, memoryview(self.memory))
        numpy = importlib.import_module("numpy")
        flat = numpy.frombuffer(self.memory, NUMPY_KINDS[self.info.dtype], math.prod(self.info.shape))
        return flat.reshape(self.info.shape)


class _RowReading:
    """One reading: first it plans what to read, then it reads everything in the order of the parts."""

    def __init__(
        self, stored: SavedParts, shards: tuple[int, ...], objects: Mapping[str, Any], loading: Loading
    ) -> None:
        """``shards``: whose parts to read. What is not sharded is taken from the first one."""
        self._stored, self._shards, self._objects, self._loading = stored, shards, objects, loading
        self._wants: list[ReadRequest] = []

    def read(self, values: Iterable[str], compare: Callable[[Meta, set[str], set[str]], None]) -> RowCommit:
        home, *_ = self._stored.parts(self._shards[:1])
        found = set().union(*(part.objects.keys() for part in self._stored.parts(self._shards)))
        compare(home.meta, found, set(home.values))
        planned = {}
        for name, obj in self._objects.items():
            with self._loading(name, home.meta):
                planned[name] = self._object(name, obj)
        wanted = {name: self._plain(home.values[name]) for name in values if name in home.values}
        self._stored.fetch(self._wants)
        return RowCommit(home.meta, _made(planned), _made(wanted))

    def _object(self, name: str, obj: Any) -> Any:
        shards = of(obj)
        union = shards is not None or getattr(obj, "edl_union", False)
        stored = self._stored.object(name, self._shards, union=union)
        if shards is None:
            return self._plain(stored)
        shards.enter()
        return self._layer(shards, obj, stored) if obj is not shards.optimizer else self._optimizer(shards, obj, stored)

    def _layer(self, shards: Shards, layer: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
        parts = {key: shards.part(value) for key, value in layer.state_dict().items()}
        if not any(isinstance(value, Spread) for value in stored.values()):
            return {key: self._plain(value) for key, value in stored.items()}
        return {key: self._entry(value, parts.get(key)) for key, value in stored.items() if _is_here(parts.get(key))}

    def _optimizer(self, shards: Shards, optimizer: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
        layers = {name: obj for name, obj in self._objects.items() if hasattr(obj, "named_parameters")}
        parts = parts_by_name(shards, layers)
        kept = {
            name: {
                kind: self._plain(value) if is_number(optimizer, kind) else self._entry(value, parts.get(name))
                for kind, value in values.items()
            }
            for name, values in stored[_PARAMETERS].items()
            if _is_here(parts.get(name))
        }
        return {**{key: self._plain(value) for key, value in stored.items() if key != _PARAMETERS}, _PARAMETERS: kept}

    def _entry(self, value: Any, part: ParameterRows | None) -> Any:
        """The rows of a tensor; the whole of one that is not cut here."""
        if part is None or part.box is None or not isinstance(value, (Spread, Whole)):
            return self._plain(value)
        shape = value.shape if isinstance(value, Spread) else value.entry.shape
        if tuple(shape) != part.shape:
            raise ValueError(f"{part.whole.name}: saved as {list(shape)}, now {list(part.shape)}")
        return part.placed(self._box(value if isinstance(value, Spread) else value.copies[0], part.box))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Spread):
            return self._box(value, value.box)
        if isinstance(value, (Whole, StoredArray)):
            stored = value.copies[0] if isinstance(value, Whole) else value
            return self._box(stored, Box((0,) * len(stored.entry.shape), stored.entry.shape))
        return tree.map_entries(value, lambda _, part: self._plain(part))

    def _box(self, source: Spread | StoredArray, box: Box) -> _Pending:
        want, memory = ReadRequest.part_of(source, box)
        self._wants.append(want)
        dtype = source.dtype if isinstance(source, Spread) else source.entry.dtype
        numpy = isinstance(source, StoredArray) and source.numpy
        return _Pending(memory, ArrayInfo(dtype, box.shape, len(memory)), numpy)


def _made(value: Any) -> Any:
    if isinstance(value, _Pending):
        return value.made()
    return tree.map_entries(value, lambda _, part: _made(part))
