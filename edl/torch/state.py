"""``State`` and ``run`` for PyTorch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from edl.torch import loading, refusals
from edl.torch.ddp import check_trained
from edl.torch.ddp import plain as unwrapped
from edl.torch.device_mesh import begin_world, mesh
from edl.torch.first_size import missing_bytes
from edl.torch.framework import current
from edl.wire.local import Seat
from edl.worker import loop
from edl.worker import state as core
from edl.worker.contents import is_own
from edl.worker.link import Link
from edl.worker.local_steps import OuterSteps
from edl.worker.loop import make_run
from edl.worker.modes import TRAINING, Mode

run = make_run(current())
Build = Callable[[DeviceMesh], Mapping[str, Any]]
"""Builds the objects of a world on its device mesh."""


def connect() -> None:
    """Wait for a world and form its group before ``run``, for a model that cannot be built without one, such as a model
    with ``fully_shard``. Such a worker has to be restarted to join the next world."""
    loop.connect(current(), "its model was built with the group of one world")


class State(core.BaseState):
    """The state of a training script that must not be lost: ``State(model=model, optimizer=optimizer, epoch=0)``.

    It accepts modules, optimizers, LR schedulers, other objects with ``state_dict``, tensors, arrays and plain values.
    ``sharded=True``: parameters are distributed over the workers (FSDP2, ``fully_shard``), and each worker saves its
    part; the result can be restored at any world size. ``build``: such a model cannot outlive its world, so this
    function is called in each world with its device mesh (``edl.mesh``), and returns the model, the optimizer and the
    like by name; with it workers keep their processes. ``copy_every``: number of commits between copies to other nodes.
    """

    def __init__(
        self, *, sharded: bool = False, build: Build | None = None, copy_every: int = 1, **values: Any
    ) -> None:
        builds = None if build is None else functools.partial(_build, build)
        sharded = sharded or build is not None
        super().__init__(current(), values, sharded=sharded, build=builds, copy_every=copy_every)

    def _add(self, name: str, value: Any) -> None:
        super()._add(name, value)
        if name in self._objects:
            refusals.check(name, unwrapped(value), sharded=self._sharded)

    def _structure(self, obj: Any) -> str:
        obj = unwrapped(obj)
        if not isinstance(obj, torch.nn.Module):
            return ""
        lazy = torch.nn.parameter.is_lazy
        return "\n".join(
            f"{name} {'lazy' if lazy(one) else (tuple(one.shape), one.dtype)}" for name, one in obj.named_parameters()
        )

    def _capture_object(self, name: str, obj: Any) -> Any:
        obj = unwrapped(obj)
        if self._sharded:
            return _shards().capture(name, obj, self._shared())
        return loading.capture_module(obj) if isinstance(obj, torch.nn.Module) else obj.state_dict()

    def _comparable(self, name: str, obj: Any) -> Any:
        kept = self._capture_object(name, obj)
        of_optimizer = self._sharded and isinstance(unwrapped(obj), torch.optim.Optimizer)
        return _shards().by_name(kept) if of_optimizer else kept

    def _load_object(self, name: str, obj: Any, plain: Any) -> None:
        obj = unwrapped(obj)
        if self._sharded:
            _shards().load_local_parts(name, obj, plain, self._owned)
        elif isinstance(obj, torch.nn.Module):
            loading.load_module(obj, plain, self._owned)
        elif isinstance(obj, torch.optim.Optimizer):
            loading.load_optimizer(obj, plain, self._owned)
        else:
            super()._load_object(name, obj, plain)
        _forget_step(obj)

    def _given(self, obj: Any, plain: Any) -> Any:
        return loading.placed_in(obj, self._owned(plain))

    def _load_value(self, name: str, live: Any, plain: Any) -> Any:
        return loading.load_value(plain, live, self._owned)

    def _growth_bytes(self) -> int:
        objects = (obj for obj in self._objects.values() if not is_own(obj))
        return sum(missing_bytes(obj) for obj in objects if isinstance(obj, torch.optim.Optimizer))

    def _strict(self, name: str, obj: Any) -> frozenset[str]:
        obj = unwrapped(obj)
        if isinstance(obj, torch.nn.Module):
            parameters = obj.named_parameters(remove_duplicate=False)
            return frozenset(f"{name}.{loading.key_of(path)}" for path, _ in parameters)
        return frozenset({name}) if isinstance(obj, (torch.optim.Optimizer, OuterSteps)) else frozenset()

    def _keeps(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether these are all restored with it, the same on all workers."""
        kept = {id(value) for value in self._values.values()}
        for obj in self._objects.values():
            if isinstance(model := unwrapped(obj), torch.nn.Module) and not is_own(obj):
                kept.update(map(id, model.parameters()))
        return all(id(one) in kept for one in parameters)

    def _modes(self) -> Iterator[Mode]:
        for name, obj in self._objects.items():
            if isinstance(model := unwrapped(obj), torch.nn.Module):
                yield from ((f"{name}.{path}", part, TRAINING) for path, part in model.named_modules())
                yield from ((f"{name}.{path}", part, "requires_grad") for path, part in model.named_parameters())

    def _check_equal(self, event: str) -> None:
        check_trained(event)
        super()._check_equal(event)

    def _is_part(self, path: str) -> bool:
        return self._sharded and _shards().is_local_part(path)

    def _ranks_alike(self) -> frozenset[int]:
        return frozenset(_shards().ranks_alike(self._shared()))

    def _replicated(self, structure: Any) -> Any:
        return _shards().without_parts(structure) if self._sharded else structure

    def _restore_sharded(self, folder: str) -> None:
        self._load_parts(_recuts().Folder(folder))

    def _recut(self, link: Link, seat: Seat, job: str) -> None:
        self._load_parts(_recuts().MemoryParts(link, seat, job))

    def _load_parts(self, parts: Any) -> None:
        compare = functools.partial(self._compare_parts, parts.what)
        shared = self._shared()
        meta, values = _recuts().load_sharded(shared, parts, compare, self._loading)
        for obj in shared.values():
            _forget_step(obj)
        for name in self._values.keys() & values.keys():
            with self._loading(name, meta):
                self._values[name] = self._load_value(name, self._values[name], values[name])
        self._reset_lacking(values)

    def _shared(self) -> dict[str, Any]:
        objects = {name: unwrapped(obj) for name, obj in self._objects.items() if not is_own(obj)}
        return {**self._values, **objects}


def _forget_step(obj: Any) -> None:
    """Remove what an interrupted step may have left in an object that has been restored."""
    if isinstance(obj, torch.nn.Module):
        obj.zero_grad(set_to_none=True)
    if isinstance(obj, torch.amp.GradScaler):
        obj._per_optimizer_states.clear()  # otherwise the next step's gradients would count as unscaled


def _build(build: Build) -> Mapping[str, Any]:
    begin_world()
    return build(mesh())


def _shards() -> ModuleType:
    """Imported on demand, because it imports DTensors."""
    return importlib.import_module("edl.torch.sharded")


def _recuts() -> ModuleType:
    """Imported on demand, as above."""
    return importlib.import_module("edl.torch.recut")
