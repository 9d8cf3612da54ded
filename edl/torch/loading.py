"""Restores modules, optimizers and values from a snapshot.

The arrays of a snapshot are views of memory that will soon be reused. Two rules ensure that they do not escape.

- An existing tensor is filled in place, so restoring needs no additional memory. This is done here, not by
  ``load_state_dict``, which then receives the filled tensor itself.
- Everything else that a ``load_state_dict``, hook or ``set_extra_state`` receives is a separate copy, which it may
  keep.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from edl.errors import StateError
from edl.torch.framework import current
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
"""Loading hooks that do not change the loaded values: FSDP2's ensures that parameters are sharded, and that of
activation checkpointing renames keys."""
_CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name under which activation checkpointing wraps a module; it does not appear in the keys of a state dict."""
_CHECKPOINTED_PREFIX = f"{_CHECKPOINTED}."
_LOADING_HOOKS = "_optimizer_load_state_dict_pre_hooks"
_CAPTURING_HOOKS = "_optimizer_state_dict_post_hooks"


# --- modules ---------------------------------------------------------------------------------------------------------


def capture_module(module: torch.nn.Module) -> dict[str, Any]:
    """``state_dict()`` as a plain dict. Buffers of a subclass of ``Tensor`` are saved as plain tensors: they are
    restored in place, so they keep their type."""
    return {
        key: part.as_subclass(torch.Tensor) if _is_subclass(part) else part for key, part in module.state_dict().items()
    }


def load_module(module: torch.nn.Module, plain: Mapping[str, Any], owned: Owned) -> None:
    """Like ``load_state_dict``, but fills the existing parameters and buffers."""
    own, live = places(module), module.state_dict()
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
            given[key] = placed(owned(part), live.get(key))
    fill(filled)
    for key in own.keys() & given.keys():
        if given[key] is own[key]:
            given[key] = own[key].detach()  # copying it onto itself does nothing
    # Layers read the version of their format from here. The state was written by this process or by one that ran the
    # same script.
    metadata = getattr(live, "_metadata", None)
    if metadata is not None:
        given._metadata = metadata  # type: ignore[attr-defined]
    module.load_state_dict(given)


def places(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that only torch's own layers load, by their keys in the state dict. They may be filled in
    place."""
    return dict(_places(module, "")) if loads_as_torch(module) else {}


def key_of(path: str) -> str:
    """The key in a state dict of the parameter or buffer that ``named_parameters()`` or ``named_buffers()`` gives this
    path."""
    return path.replace(_CHECKPOINTED_PREFIX, "")


def check_memory(key: str, place: torch.Tensor) -> None:
    """Raise ``StateError`` if a tensor has no memory to restore to."""
    if place.is_meta:
        raise StateError(f"{key} is on the meta device, which has no memory to restore to: call to_empty() first")


def loads_as_torch(module: torch.nn.Module) -> bool:
    """Whether the module's ``load_state_dict`` is torch's own."""
    return _is_of_torch(module, "load_state_dict")


def _places(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A module with its own way of loading, or with a loading hook, has to see everything below it, so its tensors are
    left out."""
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
    """Like ``load_state_dict``, but fills the existing tensors, and frees the others before it creates new ones."""
    if not keeps_as_torch(optimizer):
        optimizer.load_state_dict(formatted(owned(plain), optimizer))  # the meaning of its keys is unknown
        return
    check_groups(len(plain["param_groups"]), len(optimizer.param_groups))
    groups = [placed(part, live) for part, live in _pairs(plain["param_groups"], optimizer.param_groups, owned)]
    parameters = dict(
        zip(
            (number for group in plain["param_groups"] for number in group["params"]),
            (parameter for group in optimizer.param_groups for parameter in group["params"]),
            strict=False,  # load_state_dict reports a different number itself
        )
    )
    filling = _Filling(optimizer, owned)
    for number, part in plain["state"].items():
        if number in parameters:
            filling.match(part, optimizer.state.get(parameters[number]), parameters[number])
    _keep_apart(filling.matched, parameters.values())
    optimizer.state = defaultdict(dict)  # frees the tensors that are not filled
    fill(filling.matched.values())
    state = {number: filling.given(part, parameters.get(number)) for number, part in plain["state"].items()}
    rest = owned({key: part for key, part in plain.items() if key not in ("state", "param_groups")})
    give_optimizer(optimizer, {**rest, "state": state, "param_groups": groups})


def check_groups(saved: int, own: int) -> None:
    """Raise ``ValueError`` if an optimizer has another number of groups of parameters than was saved."""
    if saved != own:
        raise ValueError(
            f"it has {own} groups of parameters, {saved} were kept: give an optimizer all of its groups when it is "
            "created, those of frozen parameters too; a new process has none that add_param_group() adds later"
        )


def give_optimizer(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    """Call ``load_state_dict``, which converts the state of a parameter to the parameter's type, and put back what has
    another type for good; see ``_Types``."""
    optimizer.load_state_dict(dict(kept))
    if not keeps_as_torch(optimizer):
        return
    types = _Types(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, of_one in kept["state"].items():
        if isinstance(number, int):
            parameter = parameters[number]
            optimizer.state[parameter] = types.put_back(optimizer.state[parameter], of_one, parameter)


def keeps_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's state is kept and loaded by torch's own methods alone."""
    own_way = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return not (own_way or getattr(optimizer, _LOADING_HOOKS, None) or getattr(optimizer, _CAPTURING_HOOKS, None))


class _Types:
    """The types of an optimizer's state after loading.

    The state of torch's own optimizers has the parameter's type, except for single numbers, such as the product of
    NAdam's momenta: converted to 16 bits, what is rounded away would be lost to all further steps. Others may keep
    anything, such as averages in 32 bits of parameters in 16, or masks; all of it keeps its type.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._of_torch = type(optimizer).__module__.startswith("torch.optim.")

    def of(self, plain: torch.Tensor, parameter: torch.Tensor, key: Any) -> torch.dtype:
        """The type that a saved tensor has after loading."""
        number = plain.dim() == 0 and parameter.dim() > 0
        kept = key == "step" or number or not self._of_torch or not parameter.is_floating_point()
        return plain.dtype if kept else parameter.dtype

    def put_back(self, live: Any, kept: Any, parameter: torch.Tensor, key: Any = None) -> Any:
        """What torch has loaded (``live``), with the tensors that it was given where it has converted them."""
        if isinstance(kept, torch.Tensor) and isinstance(live, torch.Tensor):
            converted = key != "step" and live.dtype != self.of(kept, parameter, key)
            return kept.to(live.device) if converted else live
        if isinstance(kept, dict) and isinstance(live, dict):
            for name in kept.keys() & live.keys():
                live[name] = self.put_back(live[name], kept[name], parameter, name)
        elif isinstance(kept, (list, tuple)) and isinstance(live, (list, tuple)) and len(kept) == len(live):
            pairs = zip(live, kept, strict=True)
            return tree.like_list(live, [self.put_back(one, part, parameter) for one, part in pairs])
        return live


def formatted(kept: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A saved state whose tensors are as the optimizer would have them, which a snapshot does not keep. Changes
    ``kept``; an unknown structure is left as it is.

    Options of groups, such as a learning rate, are on the devices of those in their places. Tensors of parameters have
    the parameters' memory formats: fused optimizers read both as they lie in memory.
    """
    if not isinstance(kept, dict):
        return kept
    if isinstance(groups := kept.get("param_groups"), list):
        kept["param_groups"] = placed(groups, optimizer.param_groups)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = kept.get("state")
    for number, of_one in state.items() if isinstance(state, dict) else ():
        if not isinstance(of_one, dict) or not isinstance(number, int) or not 0 <= number < len(parameters):
            continue
        parameter = parameters[number]
        if not parameter.is_contiguous() and _is_dense(parameter) and not _is_wrapper(parameter):
            of_one.update({
                name: torch.empty_like(parameter, dtype=part.dtype, device=part.device, requires_grad=False).copy_(part)
                for name, part in of_one.items()
                if isinstance(part, torch.Tensor) and part.shape == parameter.shape
            })  # fmt: skip
    return kept


def _pairs(plain: Any, live: Any, owned: Owned) -> Iterator[tuple[Any, Any]]:
    for number, part in enumerate(plain):
        yield owned(part), live[number] if number < len(live) else None


class _Filling:
    """Fills the state of an optimizer, tensor by tensor."""

    def __init__(self, optimizer: torch.optim.Optimizer, owned: Owned) -> None:
        self._types = _Types(optimizer)
        self._owned = owned
        self.matched: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the ``id`` of a saved tensor (second): the existing one (first) into which it can be copied."""

    def match(self, plain: Any, live: Any, parameter: torch.Tensor, key: Any = None) -> None:
        """Find the existing tensors for a part of the saved state."""
        if isinstance(plain, torch.Tensor):
            wanted = self._types.of(plain, parameter, key)
            if isinstance(live, torch.Tensor) and fits(live, plain) and live.dtype == wanted:
                self.matched[id(plain)] = (live, plain)
        elif isinstance(plain, dict):
            for name, part in plain.items():
                self.match(part, live.get(name) if isinstance(live, dict) else None, parameter, name)
        elif isinstance(plain, (list, tuple)):
            for number, part in enumerate(plain):
                same = isinstance(live, (list, tuple)) and number < len(live)
                self.match(part, live[number] if same else None, parameter)

    def given(self, plain: Any, parameter: torch.Tensor | None, key: Any = None) -> Any:
        """The structure with the filled tensors, and with copies where there were none."""
        if isinstance(plain, torch.Tensor):
            if id(plain) in self.matched:
                return self.matched[id(plain)][0]
            return self._owned(plain) if parameter is None or key == "step" else self._beside(plain, parameter)
        if isinstance(plain, dict):
            return tree.like_dict(plain, ((name, self.given(part, parameter, name)) for name, part in plain.items()))
        if isinstance(plain, (list, tuple)):
            return tree.like_list(plain, [self.given(part, parameter) for part in plain])
        return self._owned(plain)

    def _beside(self, plain: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A copy on the parameter's device, as ``load_state_dict`` requires, in the memory format that an optimizer
        would use."""
        dtype = self._types.of(plain, parameter, None)
        if plain.shape == parameter.shape and _is_dense(parameter) and not _is_wrapper(parameter):
            new = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            new = torch.empty_like(plain, dtype=dtype, device=parameter.device)
        return new.copy_(plain)


def _keep_apart(matched: dict[int, tuple[torch.Tensor, torch.Tensor]], parameters: Iterable[torch.Tensor]) -> None:
    """Remove tensors that share memory with one another or with a parameter, since each saved tensor has its own
    values."""
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


# --- values ----------------------------------------------------------------------------------------------------------


def load_value(plain: Any, live: Any, owned: Owned) -> Any:
    """The restored value of a plain entry of the state. Tensors are placed on the device on which the script had put
    them.

    A trained tensor (a leaf that requires a gradient) is filled in place, because optimizers refer to it. Others are
    replaced by new ones, since the existing one may be part of anything, such as a data set. Raises ``ValueError`` for
    another shape.
    """
    return _with_trained(placed(owned(plain), live), live)


def _with_trained(plain: Any, live: Any) -> Any:
    if isinstance(plain, torch.Tensor) and isinstance(live, torch.Tensor) and live.is_leaf and live.requires_grad:
        if not fits(live, plain):
            raise ValueError(f"saved as a tensor of shape {list(plain.shape)}, now its shape is {list(live.shape)}")
        fill([(live, plain)])
        live.grad = None  # may be left by an interrupted backward pass
        return live
    return _beside_live(plain, live, _with_trained)


def placed(plain: Any, live: Any) -> Any:
    """The same structure, with each tensor on the device of the existing one in its place."""
    if isinstance(plain, torch.Tensor):
        return plain.to(live.device) if isinstance(live, torch.Tensor) and not live.is_meta else plain
    return _beside_live(plain, live, placed)


def placed_in(obj: Any, plain: Any) -> Any:
    """What a script's own object gets to load: each tensor is on the device of the one that the object has in its
    place."""
    return placed(plain, obj.state_dict()) if _holds_tensor(plain) else plain


def _holds_tensor(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return isinstance(value, torch.Tensor) or any(map(_holds_tensor, parts))


def _beside_live(plain: Any, live: Any, change: Callable[[Any, Any], Any]) -> Any:
    """The same structure, with each entry changed according to the entry in the same place of another structure."""
    if isinstance(plain, dict):
        found = live if isinstance(live, dict) else {}
        return tree.like_dict(plain, ((key, change(part, found.get(key))) for key, part in plain.items()))
    if isinstance(plain, (list, tuple, deque)):
        same = isinstance(live, (list, tuple, deque)) and len(live) == len(plain)
        return tree.like_list(plain, [change(part, live[place] if same else None) for place, part in enumerate(plain)])
    return plain


# --- tensors ---------------------------------------------------------------------------------------------------------


def fits(place: torch.Tensor, part: Any) -> bool:
    """Whether this tensor can be filled with the saved value."""
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
    """Whether its values are stored elsewhere, as in a DTensor or a quantized tensor."""
    return type(tensor) not in _ORDINARY and (
        type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    )


def _is_subclass(value: Any) -> bool:
    """Whether it is a tensor of a subclass, with its own values."""
    return (
        type(value) not in _ORDINARY
        and isinstance(value, torch.Tensor)
        and not torch.nn.parameter.is_lazy(value)
        and not _is_wrapper(value)
    )


def fill(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    copies = current().device_copies
    there = []
    with torch.no_grad():
        for place, part in pairs:
            if any(size > 1 and not stride for size, stride in zip(place.shape, place.stride(), strict=True)):
                # expanded: several elements share memory, but their saved values may differ
                place.data = torch.empty_like(place, memory_format=torch.contiguous_format)
            if not place.is_cpu and copies.is_there(place) and _same_bytes(place, part):
                there.append((place, part))
            else:
                place.copy_(part)
    copies.copy_in(there)


def _same_bytes(place: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether copying a tensor of the host's means copying its bytes."""
    plain = not (place.is_conj() or place.is_neg() or part.is_conj() or part.is_neg())
    return plain and part.is_cpu and place.dtype == part.dtype and place.is_contiguous() and part.is_contiguous()
