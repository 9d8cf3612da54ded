"""Random numbers that restarts neither repeat nor change: before each step the generators are seeded from the job's
seed, the rank and the number of the commit.

No generator state has to survive a worker, so a new process, or one that had not committed yet, gets exactly the
numbers of that step. Saving the generators' states would be less safe: a worker that dies between its peers' commit and
its own takes its state with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

from edl.errors import StateError

SEED = "_random_seed"
"""The name under which a ``State`` keeps the seed. Scripts cannot use it."""
KEY_BYTES = 64
_AGREED, _PROPOSED = b"=", b"?"


class Generators(Protocol):
    """Generators that ``State`` does not save but seeds at each boundary: a framework's ``RandomState``.

    With an attribute ``edl_model_parallel`` so many consecutive ranks get the same key.
    """

    def edl_seed(self) -> str:
        """This worker's proposal for the seed of the whole job, used if it is rank 0 and the job begins."""
        ...

    def edl_reseed(self, key: bytes) -> None:
        """Seed all generators from this key of ``KEY_BYTES``."""
        ...


def is_generators(value: object) -> TypeGuard[Generators]:
    """Whether a value of a ``State`` is a set of generators."""
    return hasattr(value, "edl_reseed")


def key(*words: object) -> bytes:
    """A key to seed generators with; equal for equal words, unrelated otherwise."""
    text = ":".join(["edl", *map(str, words)])
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class RandomNumbers:
    """The random numbers of one ``State``."""

    def __init__(self) -> None:
        self.generators: dict[str, Generators] = {}
        """By name in the state; at most one."""
        self._seed = ""
        self._proposal = ""

    def add(self, name: str, generators: Generators) -> None:
        """Add the generators. Raises ``StateError`` for a second set, since both would seed the same generators."""
        if self.generators:
            known = ", ".join(self.generators)
            raise StateError(f"state.{name}: one RandomState sets all generators, and this state has {known} already")
        self.generators[name] = generators

    def begin(self, kept: str, exchange: Callable[[bytes], list[bytes]]) -> str:
        """The seed of the job: the committed one, or else one that all ranks agree on. A collective if ``kept`` is
        empty, which must be so on all ranks or on none."""
        if kept:
            self._seed = kept
            return kept
        if not self._proposal:  # asked once: later this process has trained, and its generators have advanced
            (one,) = self.generators.values()
            self._proposal = one.edl_seed()
        mine = _AGREED + self._seed.encode() if self._seed else _PROPOSED + self._proposal.encode()
        said = exchange(mine)
        # Workers that began this job know the seed; a replacement worker may not.
        chosen = next((one for one in said if one.startswith(_AGREED)), said[0])
        self._seed = chosen[1:].decode()
        return self._seed

    def derive(self, rank: int, commit: int) -> None:
        """Seed the generators for what follows this commit."""
        for generators in self.generators.values():
            replica = rank // getattr(generators, "edl_model_parallel", 1)
            generators.edl_reseed(key("step", self._seed, replica, commit))


def reseed_numpy(generator: Any, key: bytes) -> None:
    """Seed a ``numpy.random.Generator`` with any bit generator."""
    bits = generator.bit_generator
    bits.state = type(bits)(int.from_bytes(key, "little")).state
