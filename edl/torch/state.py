"""``State`` and ``run`` for PyTorch."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from types import ModuleType
from typing import Any

import torch

from edl.torch.ddp import plain as unwrapped
from edl.torch.framework import current
from edl.worker import loop
from edl.worker import state as core
from edl.worker.loop import make_run

run = make_run(current())


def connect() -> None:
    """Wait for a world and form its group ahead of ``run``, for a model that cannot be built without one, such as one
    cut by ``fully_shard``. Such a worker is restarted to join the next world."""
    loop.connect(current(), "its model was built on the group of one world")


class State(core.State):
    """What a training script must not lose: ``State(model=model, optimizer=optimizer, epoch=0)``.

    Modules, optimizers, LR schedulers, anything else with ``state_dict``, tensors, arrays and plain values.
    ``sharded=True``: parameters are spread over the workers (FSDP2, ``fully_shard``), each worker keeps its part.
    Saving then writes with ``torch.distributed.checkpoint``, which is read at any world size.
    """

    def __init__(self, *, sharded: bool = False, copy_every: int = 1, **values: Any) -> None:
        super().__init__(current(), values, sharded=sharded, copy_every=copy_every)

    def _capture_object(self, name: str, obj: Any) -> Any:
        plain = unwrapped(obj).state_dict()
        return _shards().local_parts(plain) if self._sharded else plain

    def _load_object(self, name: str, obj: Any, plain: Any) -> None:
        obj = unwrapped(obj)
        if self._sharded:
            _shards().load_local_parts(obj, plain, self._owned)
        elif isinstance(obj, torch.nn.Module):
            load_module(obj, self._extra_owned(plain))
        elif isinstance(obj, torch.optim.Optimizer):
            load_optimizer(obj, plain, self._owned)
        else:
            super()._load_object(name, obj, plain)
        if isinstance(obj, torch.nn.Module):
            obj.zero_grad(set_to_none=True)  # what an interrupted backward pass has left

    def _extra_owned(self, plain: Any) -> Any:
        """Parameters and buffers are copied into place; only what a module keeps beside them needs its own memory."""
        return {key: self._owned(part) if key.endswith("_extra_state") else part for key, part in plain.items()}

    def _store_sharded(self, folder: str) -> None:
        _shards().save_sharded(self._shared(), folder)

    def _restore_sharded(self, folder: str) -> None:
        values = _shards().load_sharded(self._shared(), folder)
        for name in self._values.keys() & values.keys():
            self._values[name] = values[name]

    def _shared(self) -> dict[str, Any]:
        objects = {name: unwrapped(obj) for name, obj in self._objects.items() if not core._is_own(obj)}
        return {**self._values, **objects}


def _shards() -> ModuleType:
    """Only for those who need it: it imports ``torch.distributed.checkpoint``, which takes as long as torch itself."""
    return importlib.import_module("edl.torch.sharded")


def load_module(module: torch.nn.Module, plain: Any) -> None:
    """``load_state_dict``, which copies into the parameters there are."""
    kept: OrderedDict[str, Any] = OrderedDict(plain)
    # Layers look there for the version of their own format; this process wrote it, or one that ran the same script.
    kept._metadata = getattr(module.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
    if kept._metadata is None:  # type: ignore[attr-defined]
        del kept._metadata  # type: ignore[attr-defined]
    module.load_state_dict(kept)


def load_optimizer(optimizer: torch.optim.Optimizer, plain: Any, owned: Any) -> None:
    """Load without keeping the snapshot's memory, and without copying what goes to another device anyway."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(owned(plain))
        return
    borrowed = {tensor.data_ptr() for tensor in _tensors(plain) if tensor.numel()}
    optimizer.load_state_dict(plain)
    for group in [*optimizer.state.values(), *optimizer.param_groups]:
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.data_ptr() in borrowed:
                group[key] = value.clone()
            elif isinstance(value, (dict, list, tuple)) and key != "params":
                group[key] = owned(value)


def _tensors(plain: Any) -> list[torch.Tensor]:
    if isinstance(plain, torch.Tensor):
        return [plain]
    parts = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
