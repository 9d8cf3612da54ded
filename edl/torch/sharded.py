"""State that is distributed over the workers: DTensors, as created by FSDP2's ``fully_shard``.

Each worker saves its own parts, and for each part its place in the whole tensor. That is enough to restore the state at
any world size (``edl.torch.recut``), so the files in the checkpoint directory contain the parts as they were in memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4, where it is the same and not public yet; others import it from here
    from torch.distributed._tensor import DTensor  # type: ignore[attr-defined]

from edl.checkpoint.reading.assembly import LOCAL, NAMES, OFFSET, SHAPE, Box, holds_tensor_parts, is_tensor_part
from edl.errors import StateError
from edl.torch import loading, same_pieces
from edl.torch.boxes import box_of
from edl.worker import tree
from edl.worker.contents import OtherPart

__all__ = ["DTensor", "capture", "load_local_parts"]

# --- what is kept ----------------------------------------------------------------------------------------------------


def capture(name: str, obj: Any, objects: Mapping[str, Any]) -> Any:
    """This worker's part of ``obj.state_dict()``. Raises ``StateError`` for a part that could not be restored."""
    kept = obj.state_dict()
    if isinstance(obj, torch.nn.Module):
        return _module_parts(name, obj, kept)
    if isinstance(obj, torch.optim.Optimizer):
        return _optimizer_parts(name, obj, kept, parameter_names(name, obj, objects))
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
    parameters = parameters_of(optimizer)
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


def parameter_names(name: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> list[str]:
    """By number, the names by which another world size or another split into stages finds the parameters."""
    parameters = parameters_of(optimizer)
    names = names_of_parameters(objects)
    if any(id(parameter) not in names for parameter in parameters):
        # After an evaluation FSDP2's model still has its parameters whole; this makes it take the sharded ones.
        for obj in objects.values():
            if isinstance(obj, torch.nn.Module):
                obj.state_dict()
        names = names_of_parameters(objects)
    if any(id(parameter) not in names for parameter in parameters):
        raise StateError(f"state.{name}: a sharded optimizer needs its model in the same State")
    return [names[id(parameter)] for parameter in parameters]


def names_of_parameters(objects: Mapping[str, Any]) -> dict[int, str]:
    """By the ``id`` of each parameter."""
    return {
        id(parameter): f"{other}.{loading.key_of(path)}"
        for other, obj in objects.items()
        if isinstance(obj, torch.nn.Module)
        for path, parameter in obj.named_parameters()
    }


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """By the numbers that ``state_dict()`` gives them."""
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
        parameters = parameters_of(obj)
        for number, of_one in kept.get("state", {}).items():
            for key, part in of_one.items() if isinstance(of_one, dict) else ():
                if is_tensor_part(part):
                    where = f"{name}.{key}"
                    of_one[key] = like(parameters[number], own_piece(part, parameters[number], where))
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
            mine, theirs = local_of(place), own_piece(part, place, key)
            if loading.fits(mine, theirs):
                pairs.append((mine, theirs))
                filled[key] = place
                continue
        rest[key] = _rejoined(owned(part), own[key], key)
    loading.fill(pairs)
    give_module(module, own, filled, rest)


def give_module(
    module: torch.nn.Module, own: Mapping[str, Any], filled: Mapping[str, Any], rest: Mapping[str, Any]
) -> None:
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


def local_of(tensor: Any) -> Any:
    """The part of a tensor that is in this worker's memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_piece(part: Any, live: Any, where: str) -> Any:
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


def like(tensor: Any, local: torch.Tensor) -> Any:
    """A DTensor that is distributed like another one, of this worker's part."""
    local = local.to(local_of(tensor).device)
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
        return like(live, own_piece(plain, live, where))
    return tree.map_entries(plain, lambda key, part: _rejoined(part, entry_of(live, plain, key), f"{where}.{key}"))


def entry_of(live: Any, plain: Any, key: Any) -> Any:
    """The entry in the same place now; None if there is none."""
    if isinstance(plain, dict):
        return live.get(key) if isinstance(live, dict) else None
    return live[key] if isinstance(live, (list, tuple, deque)) and key < len(live) else None
