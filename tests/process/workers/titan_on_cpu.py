"""torchtitan for tests without a GPU. Import this before the rest of it.

torchtitan has no CPU device: it takes CUDA where it finds no accelerator. Here its device is the CPU, with the functions
that ``torch.cpu`` lacks, and its attention is calculated with a dense mask, because FlexAttention has no backward pass
for CPUs. All else is torchtitan as it is installed.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torchtitan.tools.utils as utils
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for what only an accelerator needs."""


utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
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

from torchtitan.distributed import utils as dist_utils  # noqa: E402  # imports the device by value
from torchtitan.models.common import attention  # noqa: E402


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: BlockMask, scale: float | None,
               enable_gqa: bool, **_: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    ), None  # fmt: skip


attention.FlexAttention._compiled_flex_attn = _attention
attention._compiled_create_block_mask = create_block_mask
dist_utils.set_pg_timeouts = _nothing  # its barrier names a device, which gloo refuses
