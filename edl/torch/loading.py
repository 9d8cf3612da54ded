"""How modules, optimizers and values take back what a snapshot holds of them.

The arrays that come from a snapshot are views of memory that is used again soon. Two rules keep them in here.

- A tensor that exists is filled in place, so that restoring needs no memory beside it. This is done here, not by
  ``load_state_dict``, which is then given the filled tensor itself.
- Everything else that anybody's ``load_state_dict``, hook or ``set_extra_state`` is given is a copy of its own. It may
  be kept.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from edl.errors import StateError
from edl.worker import tree

Owned = Callable[[Any], Any]
"""Copies every array in a structure."""
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_OF_TORCH = ("torch.nn.modules.", "torch.nn.utils.")
_HARMLESS_HOOKS = (
    *_OF_TORCH,
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed._composable.fsdp.",  # the same, up to torch 2.5
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
)
"""Hooks into loading that leave what is loaded as it is: FSDP2's sees to it that parameters are cut, activation
checkpointing's renames keys."""
_CHECKPOINTED = "_checkpoint_wrapped_module"
"""What activation checkpointing wraps; keys of a state dict do not show it."""
_LOADING_HOOKS = "_optimizer_load_state_dict_pre_hooks"
_CAPTURING_HOOKS = "_optimizer_state_dict_post_hooks"


# --- modules ---------------------------------------------------------------------------------------------------------


def capture_module(module: torch.nn.Module) -> dict[str, Any]:
    """``state_dict()`` as a plain dict. Buffers of a subclass of ``Tensor`` are kept as what they are made of: they
    are filled in place, which leaves them what they are."""
    return {
        key: part.as_subclass(torch.Tensor) if _is_subclass(part) else part for key, part in module.state_dict().items()
    }


def load_module(module: torch.nn.Module, plain: Mapping[str, Any], owned: Owned) -> None:
    """``load_state_dict`` that fills the parameters and buffers there are."""
    own = places(module)
    given: OrderedDict[str, Any] = OrderedDict()
    filled = []
    for key, part in plain.items():
        place = own.get(key)
        if place is not None:
            check_memory(key, place)
        if place is not None and fits(place, part):
            filled.append((place, part))
            given[key] = place
        else:
            given[key] = owned(part)
    fill(filled)
    for key in own.keys() & given.keys():
        if given[key] is own[key]:
            given[key] = own[key].detach()  # which copies onto itself: nothing
    # Layers look there for the version of their own format; this process wrote it, or one that ran the same script.
    metadata = getattr(module.state_dict(), "_metadata", None)
    if metadata is not None:
        given._metadata = metadata  # type: ignore[attr-defined]
    module.load_state_dict(given)


def places(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that nothing but torch's own layers load, by their keys in the state dict: they may be
    filled in place."""
    return dict(_places(module, "")) if loads_as_torch(module) else {}


def check_memory(key: str, place: torch.Tensor) -> None:
    """Raises ``StateError`` where there is no memory to fill."""
    if place.is_meta:
        raise StateError(f"{key} is on the meta device, where nothing can be restored to: to_empty() gives it memory")


def loads_as_torch(module: torch.nn.Module) -> bool:
    """Whether its ``load_state_dict`` is torch's own."""
    return _is_of_torch(module, "load_state_dict")


def _places(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Whoever loads in a way of its own, or hooks into loading, sees all that is below it."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    if not _is_of_torch(module, "_load_from_state_dict") or not all(_is_from(hook, _HARMLESS_HOOKS) for hook in hooks):
        return
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            yield from _places(child, prefix if name == _CHECKPOINTED else f"{prefix}{name}.")


def _is_of_torch(module: torch.nn.Module, method: str) -> bool:
    return _is_from(getattr(module, method), _OF_TORCH)


def _is_from(function: Any, modules: tuple[str, ...]) -> bool:
    return str(getattr(function, "__module__", "")).startswith(modules)


# --- optimizers ------------------------------------------------------------------------------------------------------


def load_optimizer(optimizer: torch.optim.Optimizer, plain: Mapping[str, Any], owned: Owned) -> None:
    """``load_state_dict`` that fills the tensors there are, and lets go of the others before it makes new ones."""
    own_way = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    if own_way or getattr(optimizer, _LOADING_HOOKS, None) or getattr(optimizer, _CAPTURING_HOOKS, None):
        optimizer.load_state_dict(owned(plain))  # its keys may mean anything
        return
    groups = [_placed(part, live) for part, live in _pairs(plain["param_groups"], optimizer.param_groups, owned)]
    parameters = dict(
        zip(
            (number for group in plain["param_groups"] for number in group["params"]),
            (parameter for group in optimizer.param_groups for parameter in group["params"]),
            strict=False,  # load_state_dict refuses that in its own words
        )
    )
    matched: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, part in plain["state"].items():
        if number in parameters:
            _match(part, optimizer.state.get(parameters[number]), parameters[number], matched)
    _keep_apart(matched, parameters.values())
    optimizer.state = defaultdict(dict)  # what is not filled makes room
    fill(matched.values())
    state = {number: _given(part, matched, parameters.get(number), owned) for number, part in plain["state"].items()}
    optimizer.load_state_dict({**owned({k: v for k, v in plain.items() if k not in ("state", "param_groups")}),
                               "state": state, "param_groups": groups})  # fmt: skip


def _pairs(plain: Any, live: Any, owned: Owned) -> Iterator[tuple[Any, Any]]:
    for number, part in enumerate(plain):
        yield owned(part), live[number] if number < len(live) else None


def _match(
    plain: Any,
    live: Any,
    parameter: torch.Tensor,
    matched: dict[int, tuple[torch.Tensor, torch.Tensor]],
    key: Any = None,
) -> None:
    """Note which tensor that exists (first) each kept one (second, by its ``id``) can be copied into."""
    if isinstance(plain, torch.Tensor):
        if isinstance(live, torch.Tensor) and fits(live, plain) and live.dtype == _dtype(plain, parameter, key):
            matched[id(plain)] = (live, plain)
    elif isinstance(plain, dict):
        for name, part in plain.items():
            _match(part, live.get(name) if isinstance(live, dict) else None, parameter, matched, name)
    elif isinstance(plain, (list, tuple)):
        for number, part in enumerate(plain):
            same = isinstance(live, (list, tuple)) and number < len(live)
            _match(part, live[number] if same else None, parameter, matched)


def _dtype(plain: torch.Tensor, parameter: torch.Tensor, key: Any) -> torch.dtype:
    """The type that ``load_state_dict`` gives it."""
    return parameter.dtype if key != "step" and parameter.is_floating_point() else plain.dtype


def _keep_apart(matched: dict[int, tuple[torch.Tensor, torch.Tensor]], parameters: Iterable[torch.Tensor]) -> None:
    """Take out tensors that share memory with one another or with a parameter: each kept one has values of its own."""
    spans: list[tuple[str, int, int, int | None]] = []
    spans += [(*_span(parameter), None) for parameter in parameters if _is_dense(parameter)]
    spans += [(*_span(live), number) for number, (live, _) in matched.items() if live.numel()]
    spans.sort(key=lambda span: span[:3])
    before: int | None = None
    reach = ("", 0)
    for device, begin, end, number in spans:
        if (device, begin) < reach:
            for one in (before, number):
                if one is not None:
                    matched.pop(one, None)
        if (device, end) > reach:
            before, reach = number, (device, end)


def _span(tensor: torch.Tensor) -> tuple[str, int, int]:
    """The device and the range of addresses."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + reach * tensor.element_size()


def _given(
    plain: Any,
    matched: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    parameter: torch.Tensor | None,
    owned: Owned,
    key: Any = None,
) -> Any:
    """The structure with filled tensors, and with copies where there were none."""
    if isinstance(plain, torch.Tensor):
        if id(plain) in matched:
            return matched[id(plain)][0]
        return owned(plain) if parameter is None or key == "step" else _beside(plain, parameter)
    if isinstance(plain, dict):
        return tree.like_dict(
            plain, ((key, _given(part, matched, parameter, owned, key)) for key, part in plain.items())
        )
    if isinstance(plain, (list, tuple)):
        return tree.like_list(plain, [_given(part, matched, parameter, owned) for part in plain])
    return owned(plain)


def _beside(plain: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy on the parameter's device, which is where ``load_state_dict`` wants it, in the memory format that it has
    when an optimizer makes it."""
    dtype = _dtype(plain, parameter, None)
    if plain.shape == parameter.shape and _is_dense(parameter) and not _is_wrapper(parameter):
        new = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    else:
        new = torch.empty_like(plain, dtype=dtype, device=parameter.device)
    return new.copy_(plain)


# --- values ----------------------------------------------------------------------------------------------------------


def load_value(plain: Any, live: Any, owned: Owned) -> Any:
    """What a value of the state becomes. Tensors come back on the device on which the script has put them before.

    A tensor that is trained (a leaf that requires a gradient) is filled: optimizers hold on to it. Others are new ones:
    what is there may be part of anything, such as a data set. Raises ``ValueError`` for another shape.
    """
    return _with_trained(_placed(owned(plain), live), live)


def _with_trained(plain: Any, live: Any) -> Any:
    if isinstance(plain, torch.Tensor) and isinstance(live, torch.Tensor) and live.is_leaf and live.requires_grad:
        if not fits(live, plain):
            raise ValueError(f"kept as a tensor of {list(plain.shape)}, it is one of {list(live.shape)} now")
        fill([(live, plain)])
        live.grad = None  # what an interrupted backward pass has left
        return live
    return _beside_live(plain, live, _with_trained)


def _placed(plain: Any, live: Any) -> Any:
    """The same structure, each tensor on the device of the one that is at its place."""
    if isinstance(plain, torch.Tensor):
        return plain.to(live.device) if isinstance(live, torch.Tensor) and not live.is_meta else plain
    return _beside_live(plain, live, _placed)


def _beside_live(plain: Any, live: Any, change: Callable[[Any, Any], Any]) -> Any:
    """The same structure, changed with what is at the same place of another one."""
    if isinstance(plain, dict):
        found = live if isinstance(live, dict) else {}
        return tree.like_dict(plain, ((key, change(part, found.get(key))) for key, part in plain.items()))
    if isinstance(plain, (list, tuple, deque)):
        same = isinstance(live, (list, tuple, deque)) and len(live) == len(plain)
        return tree.like_list(plain, [change(part, live[place] if same else None) for place, part in enumerate(plain)])
    return plain


# --- tensors ---------------------------------------------------------------------------------------------------------


def fits(place: torch.Tensor, part: Any) -> bool:
    """Whether this tensor can be filled with what was kept."""
    return (
        isinstance(part, torch.Tensor)
        and not torch.nn.parameter.is_lazy(place)
        and not _is_wrapper(place)
        and _is_dense(place)
        and place.shape == part.shape
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether its values are somewhere else: a DTensor, a quantized one, …"""
    return type(tensor) not in _ORDINARY and (
        type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    )


def _is_subclass(value: Any) -> bool:
    """Whether it is a tensor of another type, with values of its own."""
    return (
        type(value) not in _ORDINARY
        and isinstance(value, torch.Tensor)
        and not torch.nn.parameter.is_lazy(value)
        and not _is_wrapper(value)
    )


def fill(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy into each first tensor the second one."""
    with torch.no_grad():
        for place, part in pairs:
            if any(size > 1 and not stride for size, stride in zip(place.shape, place.stride(), strict=True)):
                # Expanded: its elements are one in memory, and need not be so in what is kept.
                place.data = torch.empty_like(place, memory_format=torch.contiguous_format)
            place.copy_(part)
