"""State that is spread over the workers: DTensors, as FSDP2's ``fully_shard`` makes them.

In memory each worker keeps its own parts. In the checkpoint directory ``torch.distributed.checkpoint`` writes them so
that they are read at any world size; what is no tensor goes into ``structure.json`` beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from edl.errors import CheckpointError
from edl.torch.arrays import TorchArrays
from edl.worker import tree

STRUCTURE = "structure.json"
_LOCAL = "edl_local"
"""Marks the local part of a DTensor in what is kept in memory."""
_arrays = TorchArrays()


def local_parts(value: Any) -> Any:
    """The same structure with each DTensor replaced by this worker's part of it."""
    if isinstance(value, DTensor):
        return {_LOCAL: value.to_local()}
    if isinstance(value, dict):
        return {key: local_parts(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(local_parts(part) for part in value)
    return value


def load_local_parts(obj: Any, plain: Any, owned: Callable[[Any], Any]) -> None:
    """Give an object back what ``local_parts(obj.state_dict())`` was, in a world of the same size and order."""
    if isinstance(obj, torch.nn.Module):
        _copy_module_parts(obj, plain)
    elif isinstance(obj, torch.optim.Optimizer):
        parameters = [parameter for group in obj.param_groups for parameter in group["params"]]
        kept = owned(plain)
        kept["state"] = {
            index: {key: _joined(part, parameters[index]) for key, part in of_one.items()}
            for index, of_one in kept["state"].items()
        }
        obj.load_state_dict(kept)
    else:
        obj.load_state_dict(owned(plain))


def _copy_module_parts(module: torch.nn.Module, plain: Any) -> None:
    own = module.state_dict()
    if own.keys() != plain.keys():
        lacking, unknown = sorted(own.keys() - plain.keys())[:5], sorted(plain.keys() - own.keys())[:5]
        raise ValueError(f"the model has {lacking}, which were not kept, and lacks {unknown}")
    with torch.no_grad():
        for name, tensor in own.items():
            part = plain[name]
            if isinstance(tensor, DTensor):
                mine, theirs = tensor.to_local(), part[_LOCAL]
            else:
                mine, theirs = tensor, part
            if mine.shape != theirs.shape:
                raise ValueError(f"{name}: kept as {tuple(theirs.shape)}, now {tuple(mine.shape)}")
            mine.copy_(theirs)


def _joined(part: Any, parameter: Any) -> Any:
    """The DTensor of an optimizer's value, spread like its parameter."""
    if not (isinstance(part, dict) and _LOCAL in part):
        return part
    return DTensor.from_local(
        part[_LOCAL].to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def save_sharded(objects: Mapping[str, Any], folder: str) -> None:
    """Write modules, optimizers, other objects and values. On all ranks at once; returns when all have written."""
    plain = {name: _full(name, obj, objects) for name, obj in objects.items()}
    structure, leaves = tree.flatten(plain, _arrays.is_array)
    if dist.get_rank() == 0:
        path = os.path.join(folder, STRUCTURE)
        with open(path, "w") as file:
            json.dump(structure, file)
            file.flush()
            os.fsync(file.fileno())
    save({name: _as_tensor(leaf) for name, leaf in leaves}, checkpoint_id=folder)


def load_sharded(objects: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Read what ``save_sharded`` wrote, at any world size. On all ranks at once. Returns the values that are no
    objects; raises ``CheckpointError`` for what cannot be read."""
    try:
        with open(os.path.join(folder, STRUCTURE)) as file:
            structure = json.load(file)
        reader = FileSystemReader(folder)
        stored = reader.read_metadata().state_dict_metadata
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the sharded checkpoint in {folder} cannot be read: {error}") from error
    targets = _targets(objects, stored, folder)
    load(targets, storage_reader=reader)

    def array(name: str, is_numpy: bool) -> Any:
        if name not in targets:
            raise CheckpointError(f"the sharded checkpoint in {folder} has no {name}")
        return targets[name].numpy() if is_numpy else targets[name]

    plain = tree.unflatten(structure, array)
    values = {}
    for name, part in plain.items():
        if name in objects and hasattr(objects[name], "state_dict"):
            _give(name, part, objects)
        else:
            values[name] = part
    return values


def _targets(objects: Mapping[str, Any], stored: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Where each stored tensor is read to: spread as this world spreads it if it belongs to a model, else whole."""
    live = {
        name: _full(name, obj, objects)
        for name, obj in objects.items()
        if isinstance(obj, (torch.nn.Module, torch.optim.Optimizer))
    }
    _, leaves = tree.flatten(live, _arrays.is_array)
    targets = {name: _empty_like(leaf) for name, leaf in leaves}
    lacking = sorted(targets.keys() - stored.keys())
    if lacking:
        raise CheckpointError(f"the sharded checkpoint in {folder} has no {', '.join(lacking[:5])}")
    for name, kind in stored.items():
        if name not in targets and isinstance(kind, TensorStorageMetadata):
            targets[name] = torch.empty(kind.size, dtype=kind.properties.dtype)
    return targets


def _full(name: str, obj: Any, objects: Mapping[str, Any]) -> Any:
    if isinstance(obj, torch.nn.Module):
        return get_model_state_dict(obj)
    if isinstance(obj, torch.optim.Optimizer):
        return get_optimizer_state_dict(_model_of(name, obj, objects), obj)
    return obj.state_dict() if hasattr(obj, "state_dict") else obj


def _give(name: str, plain: Any, objects: Mapping[str, Any]) -> None:
    obj = objects[name]
    if isinstance(obj, torch.nn.Module):
        set_model_state_dict(obj, plain)
    elif isinstance(obj, torch.optim.Optimizer):
        set_optimizer_state_dict(_model_of(name, obj, objects), obj, plain)
    else:
        obj.load_state_dict(plain)


def _model_of(name: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> torch.nn.Module:
    """The module whose parameters it changes: their names are what makes its values readable at another size."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for obj in objects.values():
        if isinstance(obj, torch.nn.Module) and wanted <= {id(parameter) for parameter in obj.parameters()}:
            return obj
    raise CheckpointError(f"state.{name}: a sharded optimizer needs its model in the same State")


def _as_tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf)


def _empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf.copy())
