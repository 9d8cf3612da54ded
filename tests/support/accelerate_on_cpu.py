"""Accelerate's FSDP2 for tests without a GPU.

Accelerate uses FSDP on accelerators only: with several processes on CPUs it ignores the plugin. Here it takes it there,
too. gloo cannot average, so gradients are added up and divided. All else is Accelerate as it is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

Patch = Any
"""Sets an attribute: ``setattr``, or ``monkeypatch.setattr``."""


def shard_on_cpu(patch: Patch = setattr) -> None:
    """Let Accelerate shard models on CPUs in this process."""
    begin, prepare = AcceleratorState.__init__, Accelerator._prepare_fsdp2

    def begun(self: Any, *arguments: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    def prepared(self: Any, *arguments: Any) -> Any:
        made = prepare(self, *arguments)
        for model in made:
            for part in model.modules() if isinstance(model, torch.nn.Module) else ():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)
        return made

    patch(AcceleratorState, "__init__", begun)
    patch(Accelerator, "_prepare_fsdp2", prepared)
