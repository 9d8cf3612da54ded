"""Refuses objects that distribute their state over the workers in their own way, before the first step.

A state that is not sharded is that of one worker and given to all others. For these objects it would contain only one
part, or reading it is a collective that all workers have to call.
"""

from __future__ import annotations

from typing import Any

import torch

from edl.errors import StateError

_SHARDED = "use fully_shard (FSDP2) with State(sharded=True)"
_ZERO = f"{_SHARDED}, or the optimizer itself on each worker"
_OWN_WAY = "it has checkpoints of its own: save and load those"
REFUSED: dict[tuple[str, str], str] = {
    ("torch", "ZeroRedundancyOptimizer"): _ZERO,
    ("torch", "FullyShardedDataParallel"): _SHARDED,
    ("torch", "_PipelineStageBase"): "keep the modules of all stages on each worker, or checkpoints of your own",
    ("fairscale", "OSS"): _ZERO,
    ("fairscale", "FullyShardedDataParallel"): _SHARDED,
    ("deepspeed", "DeepSpeedEngine"): _OWN_WAY,
    ("deepspeed", "ZeROOptimizer"): _OWN_WAY,
    ("megatron", "DistributedOptimizer"): _OWN_WAY,
    ("colossalai", "OptimizerWrapper"): _OWN_WAY,
}
"""By package and class (or base class): what to do instead."""


def check(name: str, obj: Any, *, sharded: bool) -> None:
    """Raise ``StateError`` for an object that cannot be saved."""
    parts = obj.modules() if isinstance(obj, torch.nn.Module) else [obj]
    for part in parts:
        for kind in type(part).__mro__:
            advice = REFUSED.get((kind.__module__.partition(".")[0], kind.__name__))
            if advice is not None:
                raise StateError(
                    f"state.{name}: a {type(part).__name__} spreads its state over the workers and cannot be kept; "
                    f"{advice}"
                )
    if not sharded and any(hasattr(tensor, "placements") for tensor in _parameters(obj)):
        raise StateError(f"state.{name} has sharded parameters (DTensor): use State(sharded=True)")


def _parameters(obj: Any) -> list[Any]:
    if isinstance(obj, torch.nn.Module):
        return list(obj.parameters())
    if isinstance(obj, torch.optim.Optimizer):
        return [parameter for group in obj.param_groups for parameter in group["params"]]
    return []
