"""What Accelerate keeps of a world in its process."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState


def forget_world() -> None:
    """Clear the singletons with rank, size and device, so that the next ``Accelerator`` takes those of its world."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
