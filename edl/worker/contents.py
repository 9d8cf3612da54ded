"""The content of a ``State``: named objects and values, and their conversion to and from snapshots."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from edl.errors import CheckpointError, StateError
from edl.wire import snapshot
from edl.wire.local import OWN, STATE
from edl.wire.snapshot import Layout, Leaf, Meta, SnapshotHeader, SnapshotPlan
from edl.worker import alike, tree
from edl.worker.framework import ArrayInfo, Framework
from edl.worker.modes import CHANGED, Mode, Modes
from edl.worker.numbers import SEED, RandomNumbers, is_generators
from edl.worker.session import note
from edl.worker.verify import Held

NUMPY_KINDS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
"""Kinds of arrays that plain NumPy supports; others become the framework's tensors."""
HIDDEN = frozenset({SEED, CHANGED})
"""Values that scripts do not see."""
_LOADERS = ("load_state_dict", "set_state_dict")
"""Method names for loading state; the second is Paddle's."""


class Contents:
    """Objects have ``state_dict()`` and ``load_state_dict()`` and are changed in place; values can be assigned. Both
    are attributes. Subclasses define how a framework's objects are captured and loaded."""

    def __init__(self, framework: Framework, values: Mapping[str, Any], *, sharded: bool) -> None:
        """Raises ``StateError`` for an impossible name or value."""
        self._framework = framework
        self._sharded = sharded
        self._objects: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._numbers = RandomNumbers()
        self._layouts: dict[str, tuple[tuple[list[str], list[ArrayInfo]], Layout]] = {}
        self._noted: set[str] = set()
        self._initial_values: dict[str, Any] = {}
        """Of the values that a restored snapshot lacked: copies of what the script began with."""
        self._model_modes = Modes()
        for name, value in values.items():
            self._add(name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for kept in (self._objects, self._values, self._numbers.generators):
                if name in kept:
                    return kept[name]
        built = ", and what build returns while train runs" if self.__dict__.get("_builder") is not None else ""
        raise AttributeError(f"this state has no {name!r}; it has {self._names()}{built}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._objects or name in self._numbers.generators:
            raise AttributeError(f"state.{name} is an object, which cannot be replaced; change it in place")
        elif name in self._values:
            if not tree.is_plain(value, self._framework.arrays.is_array):
                raise StateError(f"state.{name}: a {type(value).__name__} cannot be kept")
            self._values[name] = value
        else:
            raise AttributeError(f"this state has no {name!r} to set; it has {self._names()}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"state.{name} cannot be deleted")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._all_names()]

    # --- for frameworks ----------------------------------------------------------------------------------------------

    def _capture_object(self, name: str, obj: Any) -> Any:
        """The saved values of an object: nested dicts, lists, tuples, scalars, bytes, arrays."""
        return obj.state_dict()

    def _comparable(self, name: str, obj: Any) -> Any:
        """What ranks compare of an object, in place of ``_capture_object``."""
        return self._capture_object(name, obj)

    def _structure(self, obj: Any) -> str:
        """A model's parameters as text; empty for other objects. Must be the same on all workers."""
        return ""

    def _load_object(self, name: str, obj: Any, plain: Any) -> None:
        """Load what ``_capture_object`` returned into an object. Arrays in ``plain`` are views of memory that is reused
        afterwards: any receiver that may keep them must get ``self._owned(plain)``."""
        take = next(getattr(obj, method) for method in _LOADERS if hasattr(obj, method))
        take(self._given(obj, plain))

    def _given(self, obj: Any, plain: Any) -> Any:
        """What the script's own object gets to load; it may keep it."""
        return self._owned(plain)

    def _load_value(self, name: str, live: Any, plain: Any) -> Any:
        """The restored value that replaces ``live``; ``plain`` as in ``_load_object``."""
        return self._owned(plain)

    def _owned(self, plain: Any) -> Any:
        """A copy of ``plain`` in which every array is copied."""
        arrays = self._framework.arrays
        # NumPy's own arrays are already copies.
        return tree.map_arrays(plain, arrays.is_array, lambda one: one if tree.is_numpy(one) else arrays.copy(one))

    def _strict(self, name: str, obj: Any) -> frozenset[str]:
        """Paths below ``name`` that must be equal on all ranks at every step; ``{name}`` means all of them."""
        return frozenset()

    def _modes(self) -> Iterator[Mode]:
        """The parts of models that have a mode which the script may change."""
        return iter(())

    def _is_part(self, path: str) -> bool:
        """Whether the array at this path is this rank's part of sharded data."""
        return False

    def _replicated(self, structure: Any) -> Any:
        """A flattened structure without its description of such parts."""
        return structure

    # --- modes -------------------------------------------------------------------------------------------------------

    def _begin_modes(self) -> None:
        """All objects of this world exist, and nothing has been restored yet."""
        self._model_modes.built(self._modes())
        self._values[CHANGED] = {}

    def _restore_modes(self) -> None:
        """The values of this world's commit have been restored."""
        self._model_modes.restore(self._values[CHANGED])

    def _put_modes_back(self, commit: int) -> None:
        """The values of an earlier commit have been restored in the middle of this world."""
        self._model_modes.put_back(self._values[CHANGED], commit)

    def _keep_modes(self, commit: int) -> None:
        """A commit is about to be made: put the changed modes beside the values."""
        self._values.pop(CHANGED, None)
        if changed := self._model_modes.changed(commit):
            self._values[CHANGED] = changed

    # --- writing -----------------------------------------------------------------------------------------------------

    def _write(self, stream: str, meta: Meta, room: Callable[[int], memoryview]) -> int:
        """Copy a stream's part of the state into memory from ``room``; returns its size in bytes."""
        parts, names, leaves = self._flattened(stream)
        plan = self._layout(stream, names, leaves).plan(meta, parts)
        try:
            view = room(plan.size)
        except CheckpointError as error:
            raise NoRoom(str(error)) from error
        self._fill(plan, leaves, view)
        return plan.size

    def _flattened(
        self, stream: str, capture: Callable[[str, Any], Any] | None = None
    ) -> tuple[dict[str, dict[str, Any]], list[str], list[Any]]:
        """Structure, array paths, and arrays of a stream; of all streams if ``stream`` is empty. ``capture`` is called
        in place of ``_capture_object``."""
        capture = capture or self._capture_object
        objects = {name: obj for name, obj in self._objects.items() if is_own(obj) == (stream == OWN) or not stream}
        values = {} if stream == OWN else self._values
        paths: list[str] = []
        leaves: list[Any] = []
        parts: dict[str, dict[str, Any]] = {"objects": {}, "values": {}}
        for kind, names in (("objects", objects), ("values", values)):
            for name, value in names.items():
                kept = capture(name, value) if kind == "objects" else value
                parts[kind][name], found_paths, found = tree.walk(kept, self._framework.arrays.is_array, name)
                paths += found_paths
                leaves += found
        return parts, paths, leaves

    def _fill(self, plan: SnapshotPlan, leaves: list[Any], view: memoryview) -> None:
        plan.write_header(view)
        # Created lazily: many objects at once trigger Python's garbage collector.
        buffers = (view[offset : offset + size] for _, offset, size in plan.leaves)
        self._framework.arrays.copy_out(leaves, buffers)

    def _infos(self, names: list[str], leaves: list[Any]) -> list[ArrayInfo]:
        describe = self._framework.arrays.info
        try:
            return [describe(array) for array in leaves]
        except StateError:
            for name, array in zip(names, leaves, strict=True):
                try:
                    describe(array)
                except StateError as error:
                    raise StateError(f"state.{name}: {error}") from error
            raise

    def _layout(self, stream: str, names: list[str], leaves: list[Any]) -> Layout:
        """The layout, reused as long as the arrays are the same: each commit only compares names and infos."""
        found = names, self._infos(names, leaves)
        known = self._layouts.get(stream)
        if known is None or known[0] != found:
            self._layouts[stream] = known = (found, _layout_of(*found))
        return known[1]

    # --- reading -----------------------------------------------------------------------------------------------------

    def _load(
        self, found: SnapshotHeader, data: memoryview, objects: frozenset[str], own: Mapping[str, Any] | None = None
    ) -> None:
        """Load a snapshot into these objects, and into the values that it contains. ``own``: arrays that it refers to
        but does not contain."""
        kept, values = _parts(found)
        _compare(found.meta, set(kept), set(values), objects, self._values)

        def array(name: str, is_numpy: bool) -> Any:
            entry = found.entries.get(name)
            if entry is None and own is not None and name in own:
                return own[name]
            if entry is None:
                raise CheckpointError(f"damaged: array {name!r} is missing")
            part = data[entry.offset : entry.offset + entry.size]
            if is_numpy and entry.dtype in NUMPY_KINDS:
                numpy = importlib.import_module("numpy")
                count = math.prod(entry.shape)
                flat = (
                    numpy.frombuffer(part, NUMPY_KINDS[entry.dtype])
                    if count
                    else numpy.empty(0, NUMPY_KINDS[entry.dtype])
                )
                return flat.reshape(entry.shape).copy()
            return self._framework.arrays.view(ArrayInfo(entry.dtype, entry.shape, entry.size), part)

        for name in [name for name in self._objects if name in objects]:
            with self._loading(name, found.meta):
                self._load_object(name, self._objects[name], tree.unflatten(kept[name], array))
        for name in self._values.keys() & values.keys():
            with self._loading(name, found.meta):
                plain = tree.unflatten(values[name], array)
                self._values[name] = self._load_value(name, self._values[name], plain)
        unknown = sorted(values.keys() - self._values.keys() - HIDDEN)
        if unknown:
            self._note(f"ignoring values in the snapshot that this script's state lacks: {', '.join(unknown)}")

    def _reset_lacking(self, kept: Collection[str]) -> None:
        """Called once a snapshot with the values ``kept`` has been restored: others get what the script gave them. The
        first time they still have it, and it is copied."""
        for name in sorted(self._values.keys() - kept - HIDDEN):
            live = self._values[name]
            if name in self._initial_values:
                initial = self._copied(self._initial_values[name])
                self._values[name] = self._load_value(name, live, initial)
            else:
                self._initial_values[name] = self._copied(live)

    def _copied(self, value: Any) -> Any:
        """A copy that shares nothing with the value."""
        arrays, copies = self._framework.arrays, dict[int, Any]()

        def add(array: Any) -> Any:
            copies[id(array)] = array.copy() if tree.is_numpy(array) else arrays.copy(array)
            return array

        tree.map_arrays(value, arrays.is_array, add)
        return copy.deepcopy(value, copies)  # which cannot copy every tensor itself

    def _load_part(self, found: SnapshotHeader, data: memoryview, objects: frozenset[str]) -> bool:
        """Like ``_load``. Returns False if this worker's part of a sharded state is another one now."""
        try:
            self._load(found, data, objects)
        except OtherPart:
            if any(is_own(self._objects[name]) for name in objects):
                raise  # nobody else has it
            return False
        return True

    def _compare_parts(self, what: str, meta: Meta, objects: set[str], values: set[str]) -> None:
        """Raise ``CheckpointError`` if the parts of a sharded commit do not match this script's state. ``what`` names
        the commit in messages."""
        shared = frozenset(name for name, obj in self._objects.items() if not is_own(obj))
        _compare(meta, objects, values, shared, self._values)
        unknown = sorted(values - self._values.keys() - HIDDEN)
        if unknown:
            self._note(f"ignoring values in {what} that this script's state lacks: {', '.join(unknown)}")

    @contextlib.contextmanager
    def _loading(self, name: str, meta: Meta) -> Iterator[None]:
        """Add to errors what was being restored. Errors about lost peers and memory are passed on unchanged."""
        which = f"commit {meta.commit} (era {meta.era})"
        try:
            yield
        except OtherPart:
            raise
        except StateError as error:
            raise StateError(f"state.{name} cannot load its saved value of {which}: {error}") from error
        except (RuntimeError, ValueError, KeyError, TypeError, MemoryError) as error:
            if self._framework.lost_peers(error):
                raise
            if self._framework.out_of_memory(error):
                note(f"out of memory while restoring state.{name} from {which}")
                raise
            raise CheckpointError(
                f"state.{name} does not fit {which}; has the model or the script changed? "
                f"{type(error).__name__}: {error}"
            ) from error

    def _derive(self, names: frozenset[str], rank: int) -> None:
        for name in sorted(names):
            derive = getattr(self._objects[name], "derive", None)
            if derive is not None:
                derive(rank)

    # --- comparing ---------------------------------------------------------------------------------------------------

    def _held(self) -> Held:
        """This rank's current replicated state, for ``edl.worker.state_comparison``."""
        parts, names, arrays = self._flattened(STATE, self._comparable)
        infos = zip(names, arrays, self._infos(names, arrays), strict=True)
        whole = [(name, array, info) for name, array, info in infos if not self._is_part(name)]
        kinds = {name: f"{info.dtype}{list(info.shape)}" for name, _, info in whole}
        strict = [self._strict(name, obj) for name, obj in self._objects.items() if not is_own(obj)]
        leaves = [(name, array) for name, array, _ in whole]
        structure = self._replicated({**parts["objects"], **parts["values"]})
        return Held(structure, leaves, kinds, frozenset().union(*strict), whole=not self._sharded)

    def _digests(self) -> dict[str, str]:
        """By name, a digest of this rank's replicated state."""
        held = self._held()
        leaves: dict[str, list[tuple[str, Any]]] = {name: [] for name in held.tree}
        for path, array in held.leaves:
            leaves[path.partition(".")[0]].append((path, array))
        digest = self._framework.arrays.digest
        texts = {
            name: json.dumps([held.tree[name], [held.kinds[path] for path, _ in of], digest([one for _, one in of])])
            for name, of in leaves.items()
        }
        return {name: alike.digest(text) for name, text in texts.items()}

    def _may_adopt(self, path: str) -> bool:
        """Whether another rank's value can be adopted at this path: not beside this rank's part of a sharded object."""
        return not self._sharded or path.partition(".")[0] in self._values

    def _pack(self, paths: Sequence[str]) -> bytes:
        """The arrays at these paths, and all non-array data of the objects and values that contain them, for ``_adopt``
        on another rank."""
        inside = {path.partition(".")[0] for path in paths}
        parts, names, arrays = self._flattened(STATE)
        parts = {kind: {name: part for name, part in of.items() if name in inside} for kind, of in parts.items()}
        chosen = [(name, array) for name, array in zip(names, arrays, strict=True) if name in paths]
        names, arrays = [name for name, _ in chosen], [array for _, array in chosen]
        meta = Meta("", 0, 0, 0, 0, 1, self._framework.name)  # only sent between processes
        plan = _layout_of(names, self._infos(names, arrays)).plan(meta, parts)
        data = bytearray(plan.size)
        self._fill(plan, arrays, memoryview(data))
        return bytes(data)

    def _adopt(self, data: bytes) -> None:
        """Adopt what another rank has packed; arrays that it did not send are already equal."""
        found = snapshot.parse(memoryview(data))
        _, names, arrays = self._flattened(STATE)
        own = dict(zip(names, arrays, strict=True))
        self._load(found, memoryview(data), frozenset(_parts(found)[0]), own)

    # --- names -------------------------------------------------------------------------------------------------------

    def _add(self, name: str, value: Any) -> None:
        if not name.isidentifier() or name.startswith("_") or hasattr(type(self), name):
            raise StateError(f"state.{name}: this name is reserved or invalid; choose another one")
        if is_generators(value):
            self._numbers.add(name, value)
            return
        gives, takes = hasattr(value, "state_dict"), any(hasattr(value, method) for method in _LOADERS)
        if gives and takes:
            self._objects[name] = value
        elif tree.is_plain(value, self._framework.arrays.is_array):
            self._values[name] = value
        else:
            lacking = "load_state_dict()" if gives else "state_dict() and load_state_dict()"
            raise StateError(
                f"state.{name}: a {type(value).__module__}.{type(value).__qualname__} cannot be kept; it is no number, "
                f"text, list, dict or array, and it has no {lacking}"
            )

    def _names(self) -> str:
        return ", ".join(self._all_names()) or "nothing"

    def _all_names(self) -> list[str]:
        return [*self._objects, *self._numbers.generators, *(name for name in self._values if name not in HIDDEN)]

    def _note(self, text: str, *, again: bool = False) -> None:
        if again or text not in self._noted:
            self._noted.add(text)
            note(text)


class OtherPart(ValueError):
    """A part was made in another place of the mesh, or by a worker with other layers, than this worker is now."""


def may_be_own(found: SnapshotHeader, objects: frozenset[str], world_size: int) -> bool:
    """Whether a part of a sharded state may be this worker's own: made in a world of this size, by a worker with these
    objects. Stages of a pipeline may have objects of their own."""
    kept, _ = _parts(found)
    return found.meta.workers in (0, world_size) and kept.keys() == objects


class NoRoom(CheckpointError):
    """There is no memory for a snapshot."""


def _layout_of(names: Sequence[str], infos: Sequence[ArrayInfo]) -> Layout:
    return Layout([Leaf(name, one.dtype, one.shape, one.size) for name, one in zip(names, infos, strict=True)])


def is_own(obj: Any) -> bool:
    """Whether an object belongs to each worker individually."""
    return bool(getattr(obj, "edl_per_rank", False))


def _parts(found: SnapshotHeader) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = found.tree if isinstance(found.tree, dict) else {}
    objects, values = parts.get("objects"), parts.get("values")
    if not isinstance(objects, dict) or not isinstance(values, dict):
        raise CheckpointError("damaged: the structure of the state was not written by edl")
    return objects, values


def _compare(
    meta: Meta, objects: set[str], values: set[str], my_objects: frozenset[str], my_values: Mapping[str, Any]
) -> None:
    """Raise ``CheckpointError`` if a snapshot does not match this script's state."""
    which = f"commit {meta.commit} (era {meta.era})"
    lacking = sorted(my_objects - objects)
    if lacking:
        raise CheckpointError(f"{which} does not contain {', '.join(lacking)}, which this script's state has")
    unknown = sorted(objects - my_objects)
    if unknown:
        raise CheckpointError(
            f"{which} holds {', '.join(unknown)}, which this script's state does not have as an object of that kind"
        )
    turned = sorted((values & my_objects) | (objects & my_values.keys()))
    if turned:
        raise CheckpointError(f"{which} holds {', '.join(turned)} as values, this script's state as objects")
