"""The moment at which a backward pass has computed all gradients, and begins to wait for those of the other ranks.

DistributedDataParallel waits for its collectives in C++, in a callback at the end of the backward pass. A hook on one
parameter queues another callback, which the engine calls before that one: DDP queues its own with the last gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from edl.worker.waits import now

computed = (0.0, 0.0)
"""The moment (``edl.worker.waits.now``) at which the gradients of the last backward pass through a DDP were
complete."""
_hooks: list[Any] = []


def note(ddp: Any) -> None:
    """Note the time in each backward pass through this DDP until ``forget``. Only on the CPU: on a device, the host
    has long left the backward pass when the gradients are complete."""
    first = next((one for one in ddp.parameters() if one.requires_grad and one.device.type == "cpu"), None)
    if first is not None and hasattr(first, "register_post_accumulate_grad_hook"):  # since torch 2.1
        _hooks.append(first.register_post_accumulate_grad_hook(_queue))


def forget() -> None:
    """Remove all hooks: the parameters outlive their DDP."""
    while _hooks:
        _hooks.pop().remove()


def _queue(_: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(_complete)


def _complete() -> None:
    global computed
    computed = now()
