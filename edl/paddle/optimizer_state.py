"""An optimizer's state under names that are the same in every process.

Paddle's own keys (``linear_0.w_0_moment1_0``) depend on how many layers and optimizers a process has created. Here they
are ``{"parameters": {"model.weight": {"moment1": …}}}``: the layer's name in ``State``, and the parameter's name in the
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import paddle
from paddle.base import framework
from paddle.optimizer.lr import LRScheduler

from edl.errors import StateError
from edl.paddle import scheduler_state
from edl.paddle.arrays import check_fit

_MASTER = "master_weight"


def capture(optimizer: Any, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that determines how the optimizer continues. Parameters without a step so far have no entry."""
    if isinstance(optimizer, paddle.optimizer.LBFGS):
        return {"lbfgs": dict(optimizer.state), **_capture_rate(optimizer)}  # Paddle cannot load it
    if not optimizer._accumulators and optimizer._accumulators_holder:
        # It was loaded with set_state_dict and has not made a step since; Paddle would unpack it at the first step.
        _create(optimizer, [each for each in _parameters(optimizer) if _is_held(optimizer, each)])
    names = _names(optimizer, layers)
    kept: dict[str, dict[str, Any]] = {}
    for kind, values in sorted(optimizer._accumulators.items()):
        for own, tensor in values.items():
            kept.setdefault(_name(names, own), {})[kind] = tensor
    for own, tensor in _masters(optimizer).items():
        kept.setdefault(_name(names, own), {})[_MASTER] = tensor
    return {"parameters": kept, **_capture_rate(optimizer)}


def load(
    optimizer: Any,
    layers: Mapping[str, Any],
    state: Mapping[str, Any],
    owned: Callable[[Any], Any] = lambda part: part,
) -> None:
    """The inverse of ``capture``, also for an optimizer that has made no step yet. Copies into existing tensors;
    receivers that may keep their argument get the result of ``owned``. Raises ``ValueError`` if the state does not
    fit."""
    if isinstance(optimizer, paddle.optimizer.LBFGS):
        optimizer.state.clear()
        optimizer.state.update(owned(state["lbfgs"]))
        _load_rate(optimizer, state, owned)
        return
    names = _names(optimizer, layers)
    parameters = {names[parameter.name]: parameter for parameter in _parameters(optimizer)}
    kept = state["parameters"]
    unknown = sorted(kept.keys() - parameters.keys())
    if unknown:
        raise ValueError(f"it no longer has the parameters {', '.join(unknown[:5])}")
    _forget(optimizer, {names[own] for own in names} - kept.keys(), names)
    _create(optimizer, [parameters[name] for name in kept])
    names = _names(optimizer, layers)  # again: now it has its master weights
    places: dict[tuple[str, str], Any] = {}
    for kind, values in optimizer._accumulators.items():
        places.update({(_name(names, own), kind): tensor for own, tensor in values.items()})
    places.update({(_name(names, own), _MASTER): tensor for own, tensor in _masters(optimizer).items()})
    for name, saved in kept.items():
        for kind, value in saved.items():
            place = places.get((name, kind))
            if place is None:
                raise ValueError(f"it has no {kind} for {name}")
            check_fit(place, value, f"{kind} of {name}")
            place.set_value(value)
    _load_rate(optimizer, state, owned)


def _capture_rate(optimizer: Any) -> dict[str, Any]:
    if isinstance(optimizer._learning_rate, LRScheduler):
        return {"scheduler": scheduler_state.capture(optimizer._learning_rate)}
    return {"learning_rate": float(optimizer.get_lr())}


def _load_rate(optimizer: Any, state: Mapping[str, Any], owned: Callable[[Any], Any]) -> None:
    if isinstance(optimizer._learning_rate, LRScheduler):
        if "scheduler" in state:
            scheduler_state.load(optimizer._learning_rate, owned(state["scheduler"]))
    elif "learning_rate" in state:
        optimizer.set_lr(state["learning_rate"])


def _parameters(optimizer: Any) -> list[Any]:
    groups = optimizer._parameter_list
    if groups and isinstance(groups[0], dict):
        return [parameter for each in groups for parameter in each["params"]]
    return list(groups)


def _names(optimizer: Any, layers: Mapping[str, Any]) -> dict[str, str]:
    """Maps Paddle's name of a parameter, or of its master weight, to the stable name."""
    kept = names_in(layers)
    found = {
        parameter.name: kept.get(parameter.name, f"parameter {number}")
        for number, parameter in enumerate(_parameters(optimizer))
    }
    masters = _masters(optimizer)
    return found | {masters[own].name: name for own, name in found.items() if own in masters}


def names_in(layers: Mapping[str, Any]) -> dict[str, str]:
    """Maps Paddle's name of a parameter to the stable name, for all parameters of these layers."""
    return {
        parameter.name: f"{layer_name}.{name}"
        for layer_name, layer in reversed(list(layers.items()))  # the first layer that has it determines the name
        for name, parameter in layer.named_parameters()
    }


def _name(names: Mapping[str, str], own: str) -> str:
    if own not in names:
        raise StateError(f"the optimizer keeps values for {own}, which is not one of its parameters")
    return names[own]


def _masters(optimizer: Any) -> dict[str, Any]:
    return getattr(optimizer, "_master_weights", None) or {}


def _is_held(optimizer: Any, parameter: Any) -> bool:
    return any(key.startswith(f"{parameter.name}_") for key in optimizer._accumulators_holder)


def _create(optimizer: Any, parameters: list[Any]) -> None:
    """Create the tensors that the first step would create. Does nothing for parameters that have them."""
    if parameters:
        base: Any = framework
        with base.dygraph_guard_if_declarative():
            optimizer._create_accumulators(base.default_main_program().global_block(), parameters)


def forget_all(optimizer: Any) -> None:
    """Make the optimizer as it was before its first step."""
    optimizer._accumulators.clear()
    optimizer._master_weights.clear()
    optimizer._already_create_accumulator.clear()


def _forget(optimizer: Any, unsaved: set[str], names: Mapping[str, str]) -> None:
    """Reset parameters that had made no step when the state was saved, in case they have made steps since."""
    own_names = {own for own, name in names.items() if name in unsaved}
    for values in optimizer._accumulators.values():
        for own in own_names & values.keys():
            del values[own]
    for own in own_names & _masters(optimizer).keys():
        del optimizer._master_weights[own]
    created = getattr(optimizer, "_already_create_accumulator", None)
    if created:
        created.difference_update(own_names)
    if own_names and getattr(optimizer, "_use_multi_tensor", False):
        _empty_lists(optimizer)


def _empty_lists(optimizer: Any) -> None:
    """Let the next step of an optimizer with ``use_multi_tensor`` collect its tensors anew. It keeps them in lists, by
    group, which it fills when they are empty."""
    kinds = optimizer._create_multi_tensor_dict().keys()
    for held in vars(optimizer).values():
        if isinstance(held, dict) and held.keys() == kinds:
            for by_group in held.values():
                for tensors in by_group or ():
                    tensors.clear()
