"""Which kinds of Accelerate's sharding edl can keep."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from edl.errors import StateError


def refuse(accelerator: Any, what: str) -> None:
    """Raise ``StateError`` for an ``Accelerator`` that shards in a way that edl cannot keep, or not at all. ``what`` is
    named in it."""
    state = accelerator.state
    kind, plugin = state.distributed_type.value, getattr(state, "fsdp_plugin", None)
    if plugin is None or kind != "FSDP":
        raise StateError(
            f"{what} is to keep a model that FSDP2 shards, and Accelerate does not shard here ({kind}): give it an "
            "fsdp_plugin with fsdp_version=2, which it uses on GPUs only, or train without FSDP"
        )
    reasons = {
        f"fsdp_version={plugin.fsdp_version}: use 2": plugin.fsdp_version != 2,
        "cpu_offload: set it to False": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "activation_checkpointing by Accelerate: set it to False": plugin.activation_checkpointing,
        "ignored_modules, whose gradients nobody averages: leave them out": plugin.ignored_modules is not None,
        "a parallelism_config: leave it out, and the model is sharded over the whole world":
        accelerator.parallelism_config is not None,
        "torch.compile by Accelerate: leave it out": state.dynamo_plugin.backend.value != "NO",
        "mixed_precision=fp8: use bf16": accelerator.mixed_precision == "fp8",
    }  # fmt: skip
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise StateError(f"{what} cannot keep a sharded model with {'; '.join(found)}")
