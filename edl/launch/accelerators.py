"""How many accelerators this node has, found out without importing a framework."""

from __future__ import annotations

import contextlib
from importlib import metadata
from pathlib import Path

from edl.config import environment


def visible_gpus() -> tuple[str, ...]:
    """Ids of the NVIDIA GPUs workers may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = environment().get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(device.strip() for device in chosen.split(",") if device.strip() and device.strip() != "-1")
    return tuple(str(index) for index in range(len(list(Path("/proc/driver/nvidia/gpus").glob("*")))))


def paddle_gpus() -> int:
    """Number of GPUs Paddle may use: none unless the installed Paddle was built for them."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("paddlepaddle-gpu")
        return count_gpus()
    return 0


def count_gpus() -> int:
    """Number of NVIDIA GPUs workers may use."""
    return len(visible_gpus())
