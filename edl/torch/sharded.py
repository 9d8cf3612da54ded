"""State that is distributed over the workers: DTensors, as created by FSDP2's ``fully_shard``.

Each worker saves its own parts, and for each part its place in the whole tensor. That is enough to restore the state at
any world size, so the files in the checkpoint directory contain the parts as they were in memory.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4, where it is the same and not public yet; others import it from here
    from torch.distributed._tensor import DTensor  # type: ignore[attr-defined]

from edl.checkpoint.reading.assembly import (
    LOCAL,
    NAMES,
    OFFSET,
    SHAPE,
    Box,
    Missing,
    Spread,
    StoredArray,
    Whole,
    holds_tensor_parts,
    is_tensor_part,
    merged,
)
from edl.checkpoint.reading.memory_parts import MemoryParts
from edl.checkpoint.reading.reader import Folder
from edl.checkpoint.reading.saved_parts import ReadRequest, SavedParts
from edl.errors import CheckpointError, StateError
from edl.torch import loading, same_pieces
from edl.torch.arrays import TorchArrays
from edl.torch.boxes import box_of
from edl.wire.snapshot import Meta
from edl.worker import tree
from edl.worker.contents import OtherPart
from edl.worker.framework import ArrayInfo
from edl.worker.modes import CHANGED
from edl.worker.modes import merged as merged_modes

__all__ = [
    "DTensor",
    "Folder",
    "MemoryParts",
    "capture",
    "load_local_parts",
    "load_sharded",
]

Loading = Callable[[str, Meta], AbstractContextManager[None]]
"""Adds to errors raised inside it which object of which commit was being restored."""
_arrays = TorchArrays()

# --- what is kept ----------------------------------------------------------------------------------------------------


def capture(name: str, obj: Any, objects: Mapping[str, Any]) -> Any:
    """This worker's part of ``obj.state_dict()``. Raises ``StateError`` for a part that could not be restored."""
    kept = obj.state_dict()
    if isinstance(obj, torch.nn.Module):
        return _module_parts(name, obj, kept)
    if isinstance(obj, torch.optim.Optimizer):
        return _optimizer_parts(name, obj, kept, _parameter_names(name, obj, objects))
    return local_parts(kept)


def _module_parts(name: str, module: torch.nn.Module, kept: Mapping[str, Any]) -> dict[str, Any]:
    for key, place in loading.places(module).items():
        if key not in kept or not isinstance(place, DTensor):
            continue
        shape = tuple(kept[key].shape) if isinstance(kept[key], torch.Tensor) else type(kept[key]).__name__
        if shape != tuple(place.shape):
            raise StateError(
                f"state.{name}: state_dict() has {key} as {shape}, the parameter is a sharded tensor of "
                f"{tuple(place.shape)}: it could not be restored. Do not change its shape in a hook, or load it in one"
            )
    return {key: local_parts(part) for key, part in kept.items()}


def _optimizer_parts(
    name: str, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any], names: list[str]
) -> dict[str, Any]:
    """A sharded entry is restored with the layout of its parameter, which another world finds by name. Other sharded
    entries cannot be restored, so they raise ``StateError``."""
    found: dict[str, Any] = {key: local_parts(part) for key, part in kept.items()}
    for key, part in found.items():
        if key != "state" and holds_tensor_parts(part):
            raise _not_restorable(
                name, key, "the optimizer as a whole", "a sharded tensor that belongs to no parameter"
            )
    parameters = _parameters(optimizer)
    for number, of_one in found.get("state", {}).items():
        at = number if isinstance(number, int) and 0 <= number < len(parameters) else None
        if at is None or not isinstance(of_one, dict):
            if holds_tensor_parts(of_one):
                whose = str(number) if at is None else names[at]
                raise _not_restorable(name, "its state", whose, "a sharded tensor that belongs to no parameter")
            continue
        for key, part in of_one.items():
            if is_tensor_part(part) and not _is_spread_like(part, parameters[at]):
                why = (
                    f"a sharded tensor of shape {tuple(part[SHAPE])}, the parameter's is {tuple(parameters[at].shape)}"
                    if tuple(part[SHAPE]) != tuple(parameters[at].shape)
                    else "distributed in another way than the parameter"
                )
                raise _not_restorable(name, key, names[at], why)
            if not is_tensor_part(part) and holds_tensor_parts(part):
                raise _not_restorable(name, key, names[at], "a sharded tensor inside another object")
    found[NAMES] = names
    return found


def _is_spread_like(part: Any, parameter: Any) -> bool:
    if not isinstance(parameter, DTensor) or tuple(part[SHAPE]) != tuple(parameter.shape):
        return False
    return (tuple(part[OFFSET]), tuple(part[LOCAL].shape)) == (box_of(parameter).offset, box_of(parameter).shape)


def _not_restorable(name: str, key: str, whose: str, why: str) -> StateError:
    return StateError(
        f"state.{name}: {key} of {whose} is {why}, and cannot be kept by a sharded State: use an optimizer whose state "
        "has the shapes of its parameters (SGD, Adam, AdamW, …), or leave the optimizer out of the State"
    )


def local_parts(value: Any) -> Any:
    """The same structure with each DTensor replaced by this worker's part and its place in the whole."""
    if isinstance(value, DTensor):
        box = box_of(value)
        return {LOCAL: value.to_local(), SHAPE: list(value.shape), OFFSET: list(box.offset)}
    return tree.map_entries(value, lambda _, part: local_parts(part))


def is_local_part(path: str) -> bool:
    """Whether the array at this path of a flattened state is this worker's part of a DTensor."""
    return path.endswith(f".{LOCAL}")


def by_name(kept: Mapping[str, Any]) -> dict[str, Any]:
    """What ``capture`` returns of an optimizer, as ranks compare it: by the names of the parameters, and groups by that
    of their first one. Stages of a pipeline give the same numbers to parameters of their own."""
    names = dict(enumerate(kept[NAMES]))
    found = {key: part for key, part in kept.items() if key != NAMES}
    if isinstance(state := kept.get("state"), dict):
        found["state"] = {names.get(key, key): part for key, part in state.items()}
    if isinstance(groups := kept.get("param_groups"), list) and all(isinstance(group, dict) for group in groups):
        found["param_groups"] = {
            next((names.get(one, "") for one in group.get("params", ())), ""): {
                key: part for key, part in group.items() if key not in ("params", "param_names")
            }
            for group in groups
        }
    return found


def without_parts(structure: Any) -> Any:
    """A flattened structure with the whole tensor's shape in place of each part, which is the same on all workers."""
    if isinstance(structure, dict):
        if LOCAL in structure:
            return {SHAPE: structure[SHAPE]}
        return {key: without_parts(part) for key, part in structure.items()}
    return [without_parts(part) for part in structure] if isinstance(structure, list) else structure


def _parameter_names(name: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> list[str]:
    """By number, the names by which another world size or another split into stages finds the parameters."""
    parameters = _parameters(optimizer)
    names = _names_of_parameters(objects)
    if any(id(parameter) not in names for parameter in parameters):
        # After an evaluation FSDP2's model still has its parameters whole; this makes it take the sharded ones.
        for obj in objects.values():
            if isinstance(obj, torch.nn.Module):
                obj.state_dict()
        names = _names_of_parameters(objects)
    if any(id(parameter) not in names for parameter in parameters):
        raise StateError(f"state.{name}: a sharded optimizer needs its model in the same State")
    return [names[id(parameter)] for parameter in parameters]


def _names_of_parameters(objects: Mapping[str, Any]) -> dict[int, str]:
    """By the ``id`` of each parameter."""
    return {
        id(parameter): f"{other}.{loading.key_of(path)}"
        for other, obj in objects.items()
        if isinstance(obj, torch.nn.Module)
        for path, parameter in obj.named_parameters()
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def ranks_alike(objects: Mapping[str, Any]) -> frozenset[int]:
    """Ranks that hold the same pieces of all DTensors in these objects and values; empty without a DTensor."""
    layouts: set[tuple[Any, Any]] = set()

    def collect(value: Any) -> None:
        if isinstance(value, DTensor):
            layouts.add((value.device_mesh, tuple(value.placements)))
        else:
            tree.map_entries(value, lambda _, part: collect(part))

    for obj in objects.values():
        collect(obj.state_dict() if hasattr(obj, "state_dict") else obj)
    return same_pieces.ranks_alike(layouts)


# --- back from memory ------------------------------------------------------------------------------------------------


def load_local_parts(name: str, obj: Any, plain: Any, owned: Callable[[Any], Any]) -> None:
    """Restore an object from the result of ``capture``, in a world of the same size and order."""
    if isinstance(obj, torch.nn.Module):
        _load_module(obj, plain, owned)
    elif isinstance(obj, torch.optim.Optimizer):
        kept = loading.formatted(owned(plain), obj)
        kept.pop(NAMES, None)
        own = obj.param_groups
        loading.check_groups(len(kept.get("param_groups", own)), len(own))
        parameters = _parameters(obj)
        for number, of_one in kept.get("state", {}).items():
            for key, part in of_one.items() if isinstance(of_one, dict) else ():
                if is_tensor_part(part):
                    where = f"{name}.{key}"
                    of_one[key] = _like(parameters[number], _piece(part, parameters[number], where))
        loading.give_optimizer(obj, kept)
    else:
        live = obj.state_dict() if holds_tensor_parts(plain) else None
        obj.load_state_dict(loading.placed_in(obj, _rejoined(owned(plain), live, f"state.{name}")))


def _load_module(module: torch.nn.Module, plain: Mapping[str, Any], owned: Callable[[Any], Any]) -> None:
    """Tensors that only torch loads are filled in place, which needs no additional memory. All others are passed to
    ``load_state_dict``: ``state_dict`` may return copies, and filling those would have no effect."""
    own = module.state_dict()
    if own.keys() != plain.keys():
        lacking, unknown = sorted(own.keys() - plain.keys())[:5], sorted(plain.keys() - own.keys())[:5]
        raise OtherPart(f"the model has {lacking}, which were not kept, and lacks {unknown}")
    places = loading.places(module)
    pairs: list[tuple[Any, Any]] = []
    filled: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, part in plain.items():
        place = places.get(key)
        if place is not None and (is_tensor_part(part) or isinstance(part, torch.Tensor)):
            loading.check_memory(key, place)
            mine, theirs = _local(place), _piece(part, place, key)
            if loading.fits(mine, theirs):
                pairs.append((mine, theirs))
                filled[key] = place
                continue
        rest[key] = _rejoined(owned(part), own[key], key)
    loading.fill(pairs)
    _give(module, own, filled, rest)


def _give(module: torch.nn.Module, own: Mapping[str, Any], filled: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Call ``load_state_dict``. A tensor that is already filled is copied onto itself, which does nothing. Raises
    ``ValueError`` when a value is not accepted."""
    given = OrderedDict(
        (key, filled[key].detach() if key in filled else loading.placed(rest[key], live)) for key, live in own.items()
    )
    metadata = getattr(own, "_metadata", None)
    if metadata is not None:  # layers read the version of their format from here
        given._metadata = metadata  # type: ignore[attr-defined]
    if not loading.loads_as_torch(module):
        module.load_state_dict(given)
        return
    # Not strict: keys that a hook takes out of each state_dict(), such as frozen weights, are missing on purpose.
    found = module.load_state_dict(given, strict=False)
    lost = [*found.unexpected_keys, *(key for key in found.missing_keys if key in own)]
    if lost:
        raise ValueError(f"state_dict() has {lost[:5]}, which load_state_dict() does not take")


def _local(tensor: Any) -> Any:
    """The part of a tensor that is in this worker's memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _piece(part: Any, live: Any, where: str) -> Any:
    """The part of a saved tensor, sharded or not, that this worker holds now. Raises ``OtherPart`` when it was saved
    differently."""
    sharded = is_tensor_part(part)
    shape = tuple(part[SHAPE] if sharded else part.shape)
    if shape != tuple(live.shape):
        raise OtherPart(f"{where}: saved as {shape}, now {tuple(live.shape)}")
    here = box_of(live) if isinstance(live, DTensor) else Box((0,) * len(shape), shape)
    if not sharded:
        return part[tuple(slice(at, at + n) for at, n in zip(here.offset, here.shape, strict=True))]
    kept = Box(tuple(part[OFFSET]), tuple(part[LOCAL].shape))
    if kept != here:
        raise OtherPart(f"{where}: saved as the part {kept.shape} at {kept.offset}, now {here.shape} at {here.offset}")
    return part[LOCAL]


def _like(tensor: Any, local: torch.Tensor) -> Any:
    local = local.to(_local(tensor).device)
    if local.device.type != tensor.device_mesh.device_type:
        # The model is offloaded to the host: from_local would move the part to the device, which has no room for all.
        made: Any = torch.empty_like(tensor, dtype=local.dtype, requires_grad=False)
        made._local_tensor = local
        return made
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _rejoined(plain: Any, live: Any, where: str) -> Any:
    """The same structure with DTensors, distributed like those in the same places of the object now. Raises
    ``ValueError`` if there is none."""
    if is_tensor_part(plain):
        if not isinstance(live, DTensor) or tuple(live.shape) != tuple(plain[SHAPE]):
            raise ValueError(f"{where} was a sharded tensor of shape {plain[SHAPE]}, and is not one now")
        return _like(live, _piece(plain, live, where))
    return tree.map_entries(plain, lambda key, part: _rejoined(part, _entry(live, plain, key), f"{where}.{key}"))


def _entry(live: Any, plain: Any, key: Any) -> Any:
    """The entry in the same place now; None if there is none."""
    if isinstance(plain, dict):
        return live.get(key) if isinstance(live, dict) else None
    return live[key] if isinstance(live, (list, tuple, deque)) and key < len(live) else None


# --- back from the parts of any world --------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_it_comes(_name: str, _meta: Meta) -> Iterator[None]:
    yield


def load_sharded(
    objects: Mapping[str, Any],
    stored: SavedParts,
    compare: Callable[[Meta, set[str], set[str]], None] = lambda _meta, _objects, _values: None,
    loading_of: Loading = _as_it_comes,
) -> tuple[Meta, dict[str, Any]]:
    """Restore a commit made by a world of any size; each worker reads its own parts. Returns the commit's metadata and
    the values that are not objects. Raises ``CheckpointError`` for unreadable data or data that does not fit.

    ``compare`` is called first with the names of the saved objects and values, and refuses a commit of another
    script.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == stored.shards:
        try:  # same world size: usually only the own part is needed
            return _Restore(stored, (rank,), loading_of).into(objects, compare)
        except Missing:
            everybody = (rank, *(other for other in range(world) if other != rank))
            return _Restore(stored, everybody, loading_of).into(objects, compare)
    return _Restore(stored, range(stored.shards), loading_of).into(objects, compare)


@dataclass(frozen=True, slots=True)
class _LocalPart:
    """A DTensor to be created after its part has been read: a copy to a device before that would be empty."""

    live: Any
    part: torch.Tensor


def _made(value: Any) -> Any:
    """The same structure with the DTensors, after everything has been read."""
    if isinstance(value, _LocalPart):
        return _like(value.live, value.part)
    return tree.map_entries(value, lambda _, part: _made(part))


class _Restore:
    """One restore. First it plans where everything goes, then it reads everything in the order of the parts, and then
    it passes it to the objects."""

    def __init__(self, stored: SavedParts, shards: Iterable[int], loading_of: Loading) -> None:
        """``shards``: whose parts to read. Values that are not sharded are taken from the first one."""
        self.stored = stored
        self.shards = tuple(shards)
        self._loading = loading_of
        self._wants: list[ReadRequest] = []
        self._checks: list[Callable[[], None]] = []
        self._then: list[tuple[str, Callable[[], None]]] = []

    def into(
        self, objects: Mapping[str, Any], compare: Callable[[Meta, set[str], set[str]], None]
    ) -> tuple[Meta, dict[str, Any]]:
        """Restore these objects. Returns the commit's metadata and the values that are not objects."""
        home, *_ = self.stored.parts(self.shards[:1])
        kept_by = [part.objects.keys() for part in self.stored.parts(self.shards)]
        # Objects that only some workers have saved are not required by the others.
        common, found = set.intersection(*map(set, kept_by)), set().union(*kept_by)
        compare(home.meta, common | (found & objects.keys()), set(home.values))
        for name, obj in objects.items():
            if not hasattr(obj, "state_dict"):
                continue
            with self._loading(name, home.meta):
                if isinstance(obj, torch.nn.Module):
                    self._module(name, obj)
                elif isinstance(obj, torch.optim.Optimizer):
                    self._optimizer(name, obj, objects)
                else:
                    self._other(name, obj)
        values = {
            name: self.plain(_as_whole(value), None, name) for name, value in home.values.items() if name in objects
        }
        if CHANGED in objects:
            values[CHANGED] = merged_modes(part.values.get(CHANGED, {}) for part in self.stored.parts(self.shards))
        self.stored.fetch(self._wants)
        for check in self._checks:
            check()
        for name, then in self._then:
            with self._loading(name, home.meta):
                then()
        return home.meta, values

    def plain(self, value: Any, live: Any, where: str) -> Any:
        """The structure with tensors that are filled later: sharded ones distributed like ``live``, others whole."""
        if isinstance(value, Spread):
            if isinstance(live, DTensor):
                if value.shape != tuple(live.shape):
                    raise ValueError(f"{where}: saved as {value.shape}, now {tuple(live.shape)}")
                return _LocalPart(live, self._tensor(value, box_of(live)))
            return self._tensor(value, value.box)
        if isinstance(value, Whole):
            return self._array(value.copies[0])
        return tree.map_entries(value, lambda key, part: self.plain(part, _entry(live, value, key), f"{where}.{key}"))

    def agreed(self, whole: Whole, where: str) -> None:
        """Check that an array that is not sharded is the same for all workers, if it is to be used by a world of
        another size. Each worker of this world compares some of the copies: together they may be large."""
        if len(whole.copies) < 2 or len(self.shards) != self.stored.shards or self._same_size():
            return
        copies = [whole.copies[0], *whole.copies[1 + dist.get_rank() :: dist.get_world_size()]]
        if len(copies) < 2:
            return
        read = [ReadRequest.all_of(copy) for copy in copies]
        self._wants += [want for want, _ in read]

        def compare() -> None:
            for (_, memory), copy in zip(read[1:], copies[1:], strict=True):
                if memory != read[0][1] or copy.entry.dtype != whole.entry.dtype:
                    raise CheckpointError(
                        f"{where} differs between workers {copies[0].shard} and {copy.shard} of "
                        f"{self.stored.what}: it can only be restored in a world of {self.stored.shards} workers"
                    )

        self._checks.append(compare)

    def _same_size(self) -> bool:
        return dist.get_world_size() == self.stored.shards

    def _module(self, name: str, module: torch.nn.Module) -> None:
        stored = self.stored.object(name, self.shards, union=True)
        own = module.state_dict()
        buffers = {loading.key_of(path) for path, _ in module.named_buffers(remove_duplicate=False)}
        lacking = sorted(own.keys() - stored.keys())
        kept_by = {frozenset(part.objects[name]) for part in self.stored.parts(self.shards)}
        # Workers that have saved different layers are stages of a pipeline, and none has all layers.
        unknown = sorted(next(iter(kept_by)) - own.keys()) if len(kept_by) == 1 else []
        if lacking or unknown:
            raise self._misfit(name, f"the model has {lacking[:5]}, which were not kept, and lacks {unknown[:5]}")
        places = loading.places(module)
        pairs: list[tuple[Any, Any]] = []
        filled: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for path, live in own.items():
            kept, place = stored[path], places.get(path)
            if isinstance(kept, Whole) and path not in buffers:
                self.agreed(kept, f"state.{name}.{path}")
            if place is None or not isinstance(kept, (Spread, Whole)):
                rest[path] = self.plain(kept, live, path)
                continue
            loading.check_memory(path, place)
            if _shape(kept) != tuple(place.shape):
                raise self._misfit(name, f"{path}: saved as {_shape(kept)}, now {tuple(place.shape)}")
            mine, read = _local(place), self._read(kept, place)
            if loading.fits(mine, read):
                pairs.append((mine, read))
                filled[path] = place
            else:
                rest[path] = _LocalPart(place, read) if isinstance(place, DTensor) else read

        def give() -> None:
            loading.fill(pairs)
            _give(module, own, filled, {path: _made(part) for path, part in rest.items()})

        self._then.append((name, give))

    def _read(self, kept: Spread | Whole, target: Any) -> torch.Tensor:
        """The part of a tensor that this worker holds."""
        if isinstance(kept, Spread):
            return self._tensor(kept, box_of(target) if isinstance(target, DTensor) else kept.box)
        whole = torch.as_tensor(self._array(kept.copies[0]), device="cpu")
        return _piece(whole, target, "") if isinstance(target, DTensor) else whole

    def _optimizer(self, name: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> None:
        stored = self.stored.object(name, self.shards[:1], union=False)
        groups, own = stored["param_groups"], optimizer.state_dict()["param_groups"]
        loading.check_groups(len(groups), len(own))
        state: dict[Any, Any] = {}
        by_name = self._by_name(name)
        names = _parameter_names(name, optimizer, objects)
        unknown = sorted(set(names) - by_name.keys())
        if unknown:
            raise self._misfit(name, f"nothing was kept of its parameters {unknown[:5]}")
        for index, (path, parameter) in enumerate(zip(names, _parameters(optimizer), strict=True)):
            values = by_name[path]
            if values is None:
                continue  # it had no gradient yet
            for key, value in values.items():
                if isinstance(value, Whole):
                    self.agreed(value, f"state.{name}, {key} of {path}")
                if isinstance(value, Spread) and (value.shape != tuple(parameter.shape)):
                    raise self._misfit(
                        name, f"{key} of {path} has the shape {value.shape}, now it is {tuple(parameter.shape)}"
                    )
            state[index] = {key: self.plain(value, parameter, key) for key, value in values.items()}
        # other entries, as some optimizers keep beside the state of their parameters
        for key, value in stored["state"].items():
            if not isinstance(key, int):
                state[key] = self.plain(value, None, key)
        rest = {key: value for key, value in stored.items() if key not in ("state", "param_groups", NAMES)}
        kept = {key: self.plain(value, None, key) for key, value in rest.items()}
        options = [self.plain(group, None, "param_groups") for group in groups]
        renewed = [{**old, "params": new["params"]} for old, new in zip(options, own, strict=True)]

        def give() -> None:
            made = {**kept, "state": _made(state), "param_groups": renewed}
            loading.give_optimizer(optimizer, loading.formatted(made, optimizer))

        self._then.append((name, give))

    def _by_name(self, name: str) -> dict[str, Any]:
        """The saved state of each parameter; None if it had no gradient yet."""
        found: dict[str, list[Any]] = {}
        for part in self.stored.parts(self.shards):
            kept = part.objects.get(name) or {}
            # An older edl kept names that changed with activation checkpointing.
            for index, path in enumerate(map(loading.key_of, kept.get(NAMES, ()))):
                found.setdefault(path, [])
                if index in kept["state"]:
                    found[path].append(kept["state"][index])
        return {
            path: merged(parts, union=True, where=f".{name} of {path}") if parts else None
            for path, parts in found.items()
        }

    def _other(self, name: str, obj: Any) -> None:
        stored = self.stored.object(name, self.shards, union=getattr(obj, "edl_union", False))
        plain = self.plain(stored, obj.state_dict(), name)
        self._then.append((name, lambda: obj.load_state_dict(loading.placed_in(obj, _made(plain)))))

    def _tensor(self, kept: Spread, box: Box) -> torch.Tensor:
        want, memory = ReadRequest.part_of(kept, box)
        self._wants.append(want)
        return _arrays.view(ArrayInfo(kept.dtype, box.shape, len(memory)), memoryview(memory))

    def _array(self, stored: StoredArray) -> Any:
        want, memory = ReadRequest.all_of(stored)
        self._wants.append(want)
        entry = stored.entry
        tensor = _arrays.view(ArrayInfo(entry.dtype, entry.shape, entry.size), memoryview(memory))
        return tensor.numpy() if stored.numpy else tensor

    def _misfit(self, name: str, why: str) -> CheckpointError:
        kind = CheckpointError if len(self.shards) == self.stored.shards else Missing  # perhaps others have it
        return kind(f"state.{name} does not fit {self.stored.what}; has the model or the script changed? {why}")


def _shape(kept: Any) -> tuple[int, ...]:
    return kept.shape if isinstance(kept, Spread) else kept.entry.shape if isinstance(kept, Whole) else ()


def _as_whole(value: Any) -> Any:
    """Values belong to each worker: convert references to arrays of a single file."""
    if isinstance(value, StoredArray):
        return Whole((value,))
    return tree.map_entries(value, lambda _, part: _as_whole(part))
