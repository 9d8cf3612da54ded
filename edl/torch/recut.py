"""Restores a sharded state from the parts of a world of any size; each worker reads what its own tensors need."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from edl.checkpoint.reading.assembly import (
    NAMES,
    Box,
    Missing,
    Spread,
    StoredArray,
    Whole,
    is_tensor_part,
    merged,
)
from edl.checkpoint.reading.memory_parts import MemoryParts
from edl.checkpoint.reading.reader import Folder
from edl.checkpoint.reading.saved_parts import ReadRequest, SavedParts
from edl.errors import CheckpointError
from edl.torch import loading
from edl.torch.arrays import TorchArrays
from edl.torch.boxes import box_of
from edl.torch.saved_optimizers import OF_PARAMETERS, SavedOptimizer, check_groups, find_homes
from edl.torch.sharded import (
    DTensor,
    entry_of,
    give_module,
    like,
    local_of,
    names_of_parameters,
    own_piece,
    parameter_names,
    parameters_of,
)
from edl.wire.snapshot import Meta
from edl.worker import tree
from edl.worker.framework import ArrayInfo
from edl.worker.modes import CHANGED
from edl.worker.modes import merged as merged_modes

__all__ = ["Folder", "MemoryParts", "load_sharded"]

Loading = Callable[[str, Meta], AbstractContextManager[None]]
"""Adds to errors raised inside it which object of which commit was being restored."""
_arrays = TorchArrays()


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
        return like(value.live, value.part)
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
        mine = {name for name, obj in objects.items() if hasattr(obj, "state_dict")}
        if found != mine and len(self.shards) < self.stored.shards:
            raise Missing(f"worker {self.shards[0]} of {self.stored.what} had {sorted(found)}, this one {sorted(mine)}")
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
                    self._other(name, obj, objects)
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
        return tree.map_entries(value, lambda key, part: self.plain(part, entry_of(live, value, key), f"{where}.{key}"))

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
        kept_by = {frozenset(kept) for kept in self._having(name).values()}
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
            mine, read = local_of(place), self._read(kept, place)
            if loading.fits(mine, read):
                pairs.append((mine, read))
                filled[path] = place
            else:
                rest[path] = _LocalPart(place, read) if isinstance(place, DTensor) else read

        def give() -> None:
            loading.fill(pairs)
            give_module(module, own, filled, {path: _made(part) for path, part in rest.items()})

        self._then.append((name, give))

    def _read(self, kept: Spread | Whole, target: Any) -> torch.Tensor:
        """The part of a tensor that this worker holds."""
        if isinstance(kept, Spread):
            return self._tensor(kept, box_of(target) if isinstance(target, DTensor) else kept.box)
        whole = torch.as_tensor(self._array(kept.copies[0]), device="cpu")
        return own_piece(whole, target, "") if isinstance(target, DTensor) else whole

    def _optimizer(self, name: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> None:
        names = parameter_names(name, optimizer, objects)
        homes = find_homes(names, self._saved(name))
        unknown = sorted(set(names) - homes.keys())
        saved = list(dict.fromkeys(homes.values())) or list(itertools.islice(self._saved(name), 1))
        if unknown or not saved:
            raise self._misfit(name, f"nothing was kept of its parameters {unknown[:5]}")
        own = optimizer.state_dict()["param_groups"]
        groups = [[names[number] for number in group["params"]] for group in own]
        check_groups(saved, groups, frozenset(names_of_parameters(objects).values()))
        beside = {one.worker: one.beside for one in saved}
        kept = self._same(name, beside, "and this worker now has parameters of both: divide the stages as they were")
        state = {**self._states(name, names, parameters_of(optimizer)), **kept["state"]}
        renewed = [
            self._group(name, number, paths, homes, new)
            for number, (paths, new) in enumerate(zip(groups, own, strict=True))
        ]

        def give() -> None:
            made = {**kept, "state": _made(state), "param_groups": renewed}
            loading.give_optimizer(optimizer, loading.formatted(made, optimizer))

        self._then.append((name, give))

    def _saved(self, name: str) -> Iterator[SavedOptimizer]:
        """What each worker has saved of an optimizer."""
        for shard, kept in self._having(name).items():
            if isinstance(kept, dict) and NAMES in kept:
                yield SavedOptimizer(shard, kept)

    def _having(self, name: str) -> dict[int, Any]:
        """What each worker has saved of an object. Stages of a pipeline may have objects of their own, so only some
        workers may have it."""
        parts = zip(self.shards, self.stored.parts(self.shards), strict=True)
        return {shard: part.objects[name] for shard, part in parts if name in part.objects}

    def _group(
        self, name: str, number: int, paths: Sequence[str], homes: Mapping[str, SavedOptimizer], own: dict[str, Any]
    ) -> dict[str, Any]:
        """A group of this worker's optimizer with the options that its parameters (``paths``) were saved with. One
        without parameters keeps its own."""
        by_home: dict[SavedOptimizer, list[str]] = {}
        for path in paths:
            by_home.setdefault(homes[path], []).append(path)
        if not by_home:
            return own
        first = ", ".join(of_one[0] for of_one in by_home.values())
        options = self._same(
            name,
            {home.worker: home.options(number, of_one) for home, of_one in by_home.items()},
            f"and one group now has parameters of both ({first}): give those of each stage a group of their own",
        )
        return {**options, **{key: own[key] for key in OF_PARAMETERS & own.keys()}}

    def _states(self, name: str, names: Sequence[str], parameters: Sequence[Any]) -> dict[Any, Any]:
        """The state of each parameter, by number."""
        found: dict[Any, Any] = {}
        by_name = self._by_name(name)
        for index, (path, parameter) in enumerate(zip(names, parameters, strict=True)):
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
            found[index] = {key: self.plain(value, parameter, key) for key, value in values.items()}
        return found

    def _by_name(self, name: str) -> dict[str, Any]:
        """The saved state of each parameter; None if it had no gradient yet."""
        found: dict[str, list[Any]] = {}
        for kept in self._having(name).values():
            # An older edl kept names that changed with activation checkpointing.
            for index, path in enumerate(map(loading.key_of, kept.get(NAMES, ()))):
                found.setdefault(path, [])
                if index in kept["state"]:
                    found[path].append(kept["state"][index])
        return {
            path: merged(parts, union=True, where=f".{name} of {path}") if parts else None
            for path, parts in found.items()
        }

    def _other(self, name: str, obj: Any, objects: Mapping[str, Any]) -> None:
        stored = self.stored.object(name, self._order(name, obj, objects), union=getattr(obj, "edl_union", False))
        plain = self.plain(stored, obj.state_dict(), name)
        self._then.append((name, lambda: obj.load_state_dict(loading.placed_in(obj, _made(plain)))))

    def _order(self, name: str, obj: Any, objects: Mapping[str, Any]) -> tuple[int, ...]:
        """The workers in the order in which they count: plain values of an object come from the first one. For an LR
        scheduler, and whatever else has an optimizer, that is one which had the optimizer's parameters, since stages
        of a pipeline may have rates of their own."""
        optimizer = getattr(obj, "optimizer", None)
        of = next((other for other, one in objects.items() if one is optimizer), None)
        if of is None or not isinstance(optimizer, torch.optim.Optimizer):
            return self.shards
        homes = find_homes(parameter_names(of, optimizer, objects), self._saved(of))
        saved = {one.worker: one for one in homes.values()}
        for one in saved.values() if isinstance(obj, torch.optim.lr_scheduler.LRScheduler) else ():
            if len(one.groups) != len(optimizer.param_groups):
                raise self._misfit(
                    name,
                    f"it was kept for {len(one.groups)} groups of parameters, and state.{of} now has "
                    f"{len(optimizer.param_groups)}: divide the stages as they were, or set the rates from the step",
                )
        having = self._having(name)
        kept = {worker: having[worker] for worker in saved if worker in having}
        if len(kept) > 1:
            whole = {worker: _without_pieces(value) for worker, value in kept.items()}
            self._same(name, whole, "and this worker now has parameters of both: divide the stages as they were")
        return (*kept, *(shard for shard in self.shards if shard not in kept))

    def _same(self, name: str, kept: Mapping[int, Any], why: str) -> Any:
        """A value that some workers have saved, by worker. Tensors are filled later; then the restore is refused if
        the value is not the same for all of them."""
        (first, value), *others = kept.items()
        found = self.plain(_as_whole(value), None, name)
        for worker, other in others:
            theirs = self.plain(_as_whole(other), None, name)
            who = f"state.{name}: workers {first} and {worker} of {self.stored.what}"
            self._checks.append(functools.partial(_check_same, found, theirs, who, why))
        return found

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


def _without_pieces(value: Any) -> Any:
    """The same structure without the pieces of sharded tensors, which differ."""
    return None if is_tensor_part(value) else tree.map_entries(value, lambda _, part: _without_pieces(part))


def _check_same(one: Any, other: Any, who: str, why: str) -> None:
    """Raise ``CheckpointError`` if two values, or some of their entries, differ."""
    both = isinstance(one, dict) and isinstance(other, dict)
    pairs = {key: (one.get(key), other.get(key)) for key in {**one, **other}} if both else {"value": (one, other)}
    differing = [str(key) for key, pair in pairs.items() if _bits(pair[0]) != _bits(pair[1])]
    if differing:
        raise CheckpointError(f"{who} differ in {', '.join(differing)}, {why}")


def _bits(value: Any) -> tuple[Any, list[ArrayInfo], int]:
    """Equal for equal values."""
    structure, _, arrays = tree.walk(value, _arrays.is_array)
    return structure, [_arrays.info(one) for one in arrays], _arrays.digest(arrays)
