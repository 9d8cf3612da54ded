"""The random number generators of a worker."""

from __future__ import annotations

import random  # noqa: TID251  the script's generators are what is kept here
from typing import Any

import numpy as np
import paddle
from paddle.base import core


class RandomState:
    """Paddle's generators, numpy's global one and Python's, as something that ``State`` can keep."""

    edl_per_rank = True
    """Each rank has its own: its values are not those of the others."""

    def state_dict(self) -> dict[str, Any]:
        """Where all of them stand."""
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, internal, gauss_next = random.getstate()
        return {
            "paddle": [_plain(state) for state in paddle.get_rng_state()],
            "numpy": [str(name), np.array(keys), int(position), int(has_gauss), float(gauss)],
            "python": [version, np.array(internal, np.int64), gauss_next],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        saved = [_generator_state(*plain) for plain in state["paddle"]]
        if len(saved) == len(paddle.get_rng_state()):  # else from a machine with other devices
            paddle.set_rng_state(saved)
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
        version, internal, gauss_next = state["python"]
        random.setstate((version, tuple(int(word) for word in np.asarray(internal)), gauss_next))

    def derive(self, rank: int) -> None:
        """Go on with numbers of this rank's own, which depend on where the generators stand and on nothing else."""
        origin = paddle.get_rng_state()[0]
        _, seed, offset, engine = origin.__getstate__()
        words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, offset, len(engine), *engine[-64:], rank]
        fresh = np.random.SeedSequence(words).generate_state(4)
        paddle.seed(int(fresh[0]) << 16 | int(fresh[1]) & 0xFFFF)
        np.random.seed(int(fresh[2]))
        random.seed(int(fresh[3]))


def _plain(state: Any) -> list[Any]:
    device, seed, offset, engine = state.__getstate__()
    return [int(device), int(seed), int(offset), bytes(engine)]


def _generator_state(device: int, seed: int, offset: int, engine: bytes) -> Any:
    state = core.GeneratorState.__new__(core.GeneratorState)
    state.__setstate__((device, seed, offset, list(engine)))
    return state
