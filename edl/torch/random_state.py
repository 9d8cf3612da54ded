"""The random number generators of a worker."""

from __future__ import annotations

import hashlib
import random  # noqa: TID251  the script's generators are what is kept here
import sys
from collections.abc import Callable
from typing import Any

import torch

from edl.errors import StateError
from edl.worker.numbers import reseed_numpy


class RandomState:
    """torch's generators (CPU and CUDA), numpy's global one and Python's, as an object for ``State``.

    ``State(random=edl.RandomState())`` seeds all of them at every step boundary from the job's seed, the rank and the
    number of the commit, so the random numbers of a step do not depend on earlier steps. ``generators``: additional
    ones that the script uses, ``torch.Generator`` or ``numpy.random.Generator``. ``seed``: the job's seed; by default
    it is derived from the state of torch's generator on rank 0 when training begins, so ``torch.manual_seed``
    determines it. ``model_parallel``: number of consecutive ranks that draw the same numbers, such as a tensor-parallel
    group, which would otherwise drop out different values of the activations that all of them hold.
    """

    def __init__(self, *generators: Any, seed: int | None = None, model_parallel: int = 1) -> None:
        """Raises ``StateError`` for a generator of an unknown kind, and for an impossible ``model_parallel``."""
        if not isinstance(model_parallel, int) or model_parallel < 1:
            raise StateError(f"RandomState(model_parallel={model_parallel!r}): it must be an integer of at least 1")
        self._seed = seed
        self.edl_model_parallel = model_parallel
        self._more = [_seeding(one) for one in generators]

    def edl_seed(self) -> str:
        """The job's seed as text; see ``edl.worker.numbers.Generators``."""
        origin = bytes(torch.get_rng_state().tolist()) if self._seed is None else str(self._seed).encode()
        return hashlib.blake2b(origin, digest_size=16).hexdigest()

    def edl_reseed(self, key: bytes) -> None:
        """Seed all generators from a key; see ``edl.worker.numbers.Generators``."""
        reseed(key)
        for number, one in enumerate(self._more):
            one(hashlib.blake2b(key, digest_size=32, salt=number.to_bytes(8, "little")).digest())

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators; numpy's only if it has been imported."""
        version, words, gauss_next = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss_next],
        }
        if _cuda_runs():
            state["cuda"] = torch.cuda.get_rng_state()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, gauss = numpy.random.get_state()
            state["numpy"] = [str(name), keys, int(position), int(has_gauss), float(gauss)]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states. Generators without one, such as CUDA's if it was saved on a machine without CUDA, stay
        unchanged."""
        torch.set_rng_state(state["torch"].clone())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].clone())
        version, words, gauss_next = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss_next))
        if "numpy" in state:
            import numpy as np

            name, keys, position, has_gauss, gauss = state["numpy"]
            np.random.set_state((name, np.asarray(keys, np.uint32), position, has_gauss, gauss))


def reseed(key: bytes) -> None:
    """Seed torch's generators, Python's, and numpy's if it has been imported; each from its own part of 64 bytes."""
    torch.manual_seed(int.from_bytes(key[:8], "little") >> 1)
    random.seed(key[8:40])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(key[40:44], "little"))


def _seeding(generator: Any) -> Callable[[bytes], object]:
    """A function that seeds this generator. Raises ``StateError`` for an unknown kind."""
    if isinstance(generator, torch.Generator):
        return lambda key: generator.manual_seed(int.from_bytes(key[:8], "little") >> 1)
    if hasattr(generator, "bit_generator"):
        return lambda key: reseed_numpy(generator, key)
    raise StateError(
        f"RandomState({generator!r}): a {type(generator).__name__} cannot be set; give torch.Generator or "
        "numpy.random.Generator"
    )


def _cuda_runs() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
