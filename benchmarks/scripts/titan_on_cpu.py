"""torchtitan without a GPU.

torchtitan has no CPU device: it takes CUDA where it finds no accelerator. Here its device is the CPU, with functions
that ``torch.cpu`` lacks, and its attention is calculated with a dense mask, because FlexAttention has no backward pass
for CPUs. All else is torchtitan as it is installed.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torchtitan.trainer  # with all modules that have imported the device by its value
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import attention


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for what only an accelerator needs."""


_DEVICE = types.SimpleNamespace(
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    reset_peak_memory_stats=_nothing,
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_name=lambda _: "CPU",
    get_device_properties=lambda _: types.SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda _: {},
)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: BlockMask, scale: float | None,
               enable_gqa: bool, **_: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    attended = torch.nn.functional.scaled_dot_product_attention
    return attended(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def use_cpu() -> None:
    """Let torchtitan train on the CPU in this process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_module"):
            vars(module).update(device_type="cpu", device_module=_DEVICE)
        elif name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module).update(device_type="cpu")
    flex: Any = attention.FlexAttention
    flex._compiled_flex_attn = _attention
    vars(attention).update(_compiled_create_block_mask=create_block_mask)
    vars(dist_utils).update(set_pg_timeouts=_nothing)  # its barrier names a device, which gloo refuses


assert torchtitan.trainer, "imported for what it imports"
