"""The random number generators of a worker."""

from __future__ import annotations

import hashlib
import random  # noqa: TID251  the script's generators are what is kept here
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from edl.errors import StateError
from edl.worker.numbers import reseed_numpy


class RandomState:
    """Paddle's generators, numpy's global one and Python's, as an object for ``State``.

    ``State(random=edl.RandomState())`` seeds all of them at every step boundary from the job's seed, the rank and the
    number of the commit, so the random numbers of a step do not depend on earlier steps. ``generators``: additional
    ``numpy.random.Generator`` objects that the script uses. ``seed``: the job's seed; by default it is derived from the
    state of Paddle's generator on rank 0 when training begins, so ``paddle.seed`` determines it.
    """

    def __init__(self, *generators: Any, seed: int | None = None) -> None:
        """Raises ``StateError`` for a generator of an unknown kind."""
        for one in generators:
            if not hasattr(one, "bit_generator"):
                raise StateError(
                    f"RandomState({one!r}): a {type(one).__name__} cannot be set; give numpy.random.Generator"
                )
        self._seed = seed
        self._more = generators

    def edl_seed(self) -> str:
        """The job's seed as text; see ``edl.worker.numbers.Generators``."""
        if self._seed is not None:
            origin = str(self._seed).encode()
        else:
            origin = repr(_plain(paddle.get_rng_state()[0])).encode()
        return hashlib.blake2b(origin, digest_size=16).hexdigest()

    def edl_reseed(self, key: bytes) -> None:
        """Seed all generators from a key; see ``edl.worker.numbers.Generators``."""
        reseed(key)
        for number, one in enumerate(self._more):
            reseed_numpy(one, hashlib.blake2b(key, digest_size=32, salt=number.to_bytes(8, "little")).digest())

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators."""
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, internal, gauss_next = random.getstate()
        return {
            "paddle": [_plain(state) for state in paddle.get_rng_state()],
            "numpy": [str(name), np.array(keys), int(position), int(has_gauss), float(gauss)],
            "python": [version, np.array(internal, np.int64), gauss_next],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states. Paddle's generators stay unchanged when the number of devices differs."""
        saved = [_generator_state(*plain) for plain in state["paddle"]]
        if len(saved) == len(paddle.get_rng_state()):  # otherwise saved on a machine with other devices
            paddle.set_rng_state(saved)
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
        version, internal, gauss_next = state["python"]
        random.setstate((version, tuple(int(word) for word in np.asarray(internal)), gauss_next))


def reseed(key: bytes) -> None:
    """Seed Paddle's, Python's and numpy's generators; each from its own part of 64 bytes."""
    paddle.seed(int.from_bytes(key[:8], "little") >> 1)
    random.seed(key[8:40])
    np.random.seed(int.from_bytes(key[40:44], "little"))


def _plain(state: Any) -> list[Any]:
    device, seed, offset, engine = state.__getstate__()
    return [int(device), int(seed), int(offset), bytes(engine)]


def _generator_state(device: int, seed: int, offset: int, engine: bytes) -> Any:
    state = core.GeneratorState.__new__(core.GeneratorState)
    state.__setstate__((device, seed, offset, list(engine)))
    return state
