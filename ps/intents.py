"""Push intents: which records a trainer is about to push, kept by pservers until the push is acknowledged.

Each trainer has a home bucket, by its number. Before a push is sent, its records are written there, and copied like
rows. When a trainer is gone, whoever takes over its records *fences* it there first: from then on the trainer can push
nothing new, and its last intent says which records may be in some of the rows already. They are trained on once more
under the same (trainer, number), so that every bucket takes them exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ps.hashing import buckets_of

MOST_TEXT = 1 << 19
"""Bytes of one intent."""


@dataclass(frozen=True, slots=True)
class Intent:
    """The last one of a trainer."""

    seq: int = -1
    text: str = ""
    """As the trainer wrote it."""
    fenced: bool = False
    """The trainer pushes nothing new."""


class Fenced(Exception):
    """Others have taken over this trainer's records."""


def home_key(trainer: int) -> NDArray[np.int64]:
    """The key whose bucket is the trainer's home."""
    return np.array([trainer], np.int64)


def home(trainer: int) -> int:
    """The bucket that a trainer's intents belong to."""
    return int(buckets_of(home_key(trainer))[0])


class Intents:
    """Those of one store. Call everything with the lock of the home bucket's shard held."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Intent]] = {}
        """By home bucket and trainer: images of buckets ask for a bucket's own."""

    def declare(self, trainer: int, seq: int, text: str) -> Intent:
        """Replace the trainer's intent. Raises ``Fenced``."""
        here = self._held.setdefault(home(trainer), {})
        known = here.get(trainer, Intent())
        if known.fenced:
            raise Fenced
        if seq >= known.seq:
            here[trainer] = Intent(seq, text)
        return here[trainer]

    def fence(self, trainer: int) -> Intent:
        """Let the trainer declare nothing any more; its last intent."""
        here = self._held.setdefault(home(trainer), {})
        here[trainer] = found = replace(here.get(trainer, Intent()), fenced=True)
        return found

    def take(self, given: Mapping[int, Intent]) -> None:
        """What the owner of their home buckets has."""
        for trainer, intent in given.items():
            here = self._held.setdefault(home(trainer), {})
            known = here.get(trainer, Intent())
            if not known.fenced and (intent.fenced or intent.seq >= known.seq):
                here[trainer] = intent

    def of(self, bucket: int) -> dict[int, Intent]:
        """All whose home this is."""
        return dict(self._held.get(bucket, {}))

    def drop(self, mask: NDArray[np.bool_]) -> None:
        """Forget those of some buckets."""
        for bucket in [one for one in list(self._held) if mask[one]]:
            self._held.pop(bucket, None)

    def forget(self, trainer: int) -> None:
        """Forget one trainer's."""
        self._held.get(home(trainer), {}).pop(trainer, None)
