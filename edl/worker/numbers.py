"""Random numbers that no restart repeats or invents: before each step the generators are set to where the seed of the
job, the rank and the number of the commit say.

Nothing of a generator has to survive a worker, so a new process, or one that had not committed yet, gets exactly the
numbers that the step would have had. The generators' own positions could not be kept as surely: a worker that dies
between the commit of its peers and its own takes its position with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

from edl.errors import StateError

SEED = "_random_seed"
"""The value under which a ``State`` keeps the seed. Scripts cannot take this name."""
KEY_BYTES = 64
_AGREED, _PROPOSED = b"=", b"?"


class Generators(Protocol):
    """What ``State`` does not save but sets anew at each boundary: a framework's ``RandomState``."""

    def edl_seed(self) -> str:
        """What this worker would take as the seed of the whole job, if it is rank 0 and the job begins."""
        ...

    def edl_reseed(self, key: bytes) -> None:
        """Go on with the numbers that belong to this key of ``KEY_BYTES``."""
        ...


def is_generators(value: object) -> TypeGuard[Generators]:
    """Whether a value of a ``State`` is one of these."""
    return hasattr(value, "edl_reseed")


def key(*words: object) -> bytes:
    """Bytes to seed generators with; equal for equal words, unrelated otherwise."""
    text = ":".join(["edl", *map(str, words)])
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class Numbers:
    """The random numbers of one ``State``."""

    def __init__(self) -> None:
        self.generators: dict[str, Generators] = {}
        """By name in the state; one at most."""
        self._seed = ""
        self._proposal = ""

    def add(self, name: str, generators: Generators) -> None:
        """Raises ``StateError`` for a second one: both would set the same generators."""
        if self.generators:
            known = ", ".join(self.generators)
            raise StateError(f"state.{name}: one RandomState sets all generators, and this state has {known} already")
        self.generators[name] = generators

    def begin(self, kept: str, exchange: Callable[[bytes], list[bytes]]) -> str:
        """The seed of the job: the one that was committed, or else one that all ranks agree on. A collective where
        ``kept`` is empty, which must be so on all ranks or on none."""
        if kept:
            self._seed = kept
            return kept
        if not self._proposal:  # asked once: later on this process has trained, and its generators have moved
            (one,) = self.generators.values()
            self._proposal = one.edl_seed()
        mine = _AGREED + self._seed.encode() if self._seed else _PROPOSED + self._proposal.encode()
        said = exchange(mine)
        # Whoever has begun this job knows the seed; a worker that has taken the place of another may not.
        chosen = next((one for one in said if one.startswith(_AGREED)), said[0])
        self._seed = chosen[1:].decode()
        return self._seed

    def derive(self, rank: int, commit: int) -> None:
        """Set the generators for what follows this commit."""
        for generators in self.generators.values():
            generators.edl_reseed(key("step", self._seed, rank, commit))


def reseed_numpy(generator: Any, key: bytes) -> None:
    """Set a ``numpy.random.Generator``, whatever its kind of bits."""
    bits = generator.bit_generator
    bits.state = type(bits)(int.from_bytes(key, "little")).state
