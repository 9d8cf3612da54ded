"""The random number generators of a worker."""

from __future__ import annotations

import hashlib
import random  # noqa: TID251  the script's generators are what is kept here
import sys
from typing import Any

import torch


class RandomState:
    """torch's generators (CPU and this worker's CUDA device), numpy's global one and Python's.

    ``State(random=edl.RandomState())`` keeps them, each worker its own.
    """

    edl_per_rank = True
    """Each rank has its own: its values are not those of the others."""

    def state_dict(self) -> dict[str, Any]:
        """Where all of them stand; numpy's only if it has been imported."""
        version, words, gauss_next = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss_next],
        }
        if _cuda_runs():
            state["cuda"] = torch.cuda.get_rng_state()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, gauss = numpy.random.get_state()
            state["numpy"] = [str(name), keys, int(position), int(has_gauss), float(gauss)]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. What is not in it, such as CUDA's from a machine without, stays as it is."""
        torch.set_rng_state(state["torch"].clone())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].clone())
        version, words, gauss_next = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss_next))
        if "numpy" in state:
            import numpy as np

            name, keys, position, has_gauss, gauss = state["numpy"]
            np.random.set_state((name, np.asarray(keys, np.uint32), position, has_gauss, gauss))

    def derive(self, rank: int) -> None:
        """Go on with numbers of this rank's own, which depend on where torch's generator stands and on nothing else."""
        origin = bytes(torch.get_rng_state().tolist()) + rank.to_bytes(8, "little")

        def seed(kind: str, size: int) -> int:
            return int.from_bytes(hashlib.blake2b(origin, digest_size=size, person=kind.encode()).digest(), "little")

        random.seed(seed("python", 32))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed("numpy", 4))
        torch.manual_seed(seed("torch", 8) >> 1)


def _cuda_runs() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
