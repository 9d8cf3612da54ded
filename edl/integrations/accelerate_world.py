"""What Accelerate keeps of a world in its process."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import extract_model_from_parallel

from edl.errors import StateError
from edl.torch import loading


def forget_world() -> None:
    """Clear the singletons with rank, size and device, so that the next ``Accelerator`` takes those of its world."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def is_current(accelerator: Any) -> bool:
    """Whether what it keeps of a world is there; ``forget_world`` clears it in all of them."""
    return hasattr(accelerator.state, "distributed_type")


def check_size(accelerator: Any, world_size: int, on_cpus: str) -> None:
    """Raise ``StateError`` unless the accelerator's processes are the workers of the world: each would train a model of
    its own. ``on_cpus``: what makes Accelerate use the group where there is no GPU."""
    if accelerator.num_processes != world_size:
        raise StateError(
            f"Accelerate found {accelerator.num_processes} process(es) on device {accelerator.device}, and the world "
            f"has {world_size} workers: without a GPU, Accelerate uses them with {on_cpus} only"
        )


def plain(model: Any) -> Any:
    """A model without the wrappers and marks of the last world, so that Accelerate prepares it for this one."""
    # Mixed precision has wrapped forward().
    found = extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    # Set on what had no wrapper, such as the model of a GPU alone. With it, Accelerate would not prepare the model.
    vars(found).pop("_is_accelerate_prepared", None)
    return found


def keep_types(accelerator: Any) -> None:
    """Have ``accelerator.prepare`` move an optimizer's restored state to its parameters, and change nothing else.

    By itself Accelerate loads the state once more: torch then converts it to the parameters' type, in which NAdam's
    products or averages in 32 bits are rounded, and the counts of steps move to the GPU.
    """
    prepare = accelerator.prepare_optimizer

    def prepare_optimizer(optimizer: Any, device_placement: bool | None = None) -> Any:
        if not loading.keeps_as_torch(optimizer):
            return prepare(optimizer, device_placement=device_placement)
        prepared = prepare(optimizer, device_placement=False)
        loading.give_optimizer(optimizer, optimizer.state_dict())
        return prepared

    accelerator.prepare_optimizer = prepare_optimizer
