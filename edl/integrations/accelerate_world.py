"""What Accelerate keeps of a world in its process."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, GradientState

from edl.errors import StateError


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
