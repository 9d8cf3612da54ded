"""The size that an optimizer's state will have.

Optimizers make their state in the first step. The buffer for the first commit is requested before it, and making its
pages takes seconds for gigabytes: with Adam one for the parameters alone would be a third of what is needed.
"""

from __future__ import annotations

from typing import Any

import torch

_PER_PARAMETER = {
    "Adadelta": 2, "Adam": 2, "AdamW": 2, "Adamax": 2, "ASGD": 1, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Rprop": 2,
    "SGD": 0,
}  # fmt: skip
"""Tensors of a parameter's size and type that an optimizer of torch makes in its first step."""
_OPTIONAL = ("amsgrad", "centered", "momentum")
"""Settings of a group that add another one."""


def missing_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the first step will add to the state, without counters; 0 for optimizers that are not known."""
    kind = type(optimizer)
    tensors = _PER_PARAMETER.get(kind.__name__) if kind.__module__.startswith("torch.optim.") else None
    if tensors is None:
        return 0
    return sum(
        parameter.nbytes * (tensors + _options(group))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter not in optimizer.state
    )


def _options(group: dict[str, Any]) -> int:
    return sum(bool(group.get(name)) for name in _OPTIONAL)
