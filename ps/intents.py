"""Push intents: which data records a trainer is about to push, stored by pservers until the push is acknowledged.

Each trainer has a home bucket, derived from its number. Before a push is sent, its records are stored there and
replicated like rows. The trainer that takes over a lost trainer's records first *fences* it at its home: from then on
the lost trainer cannot push anything new, and its last intent tells which records may be in some of the rows already.
Those are trained on again under the same (trainer, sequence number), so that every bucket applies them exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ps.hashing import buckets_of

MOST_TEXT = 1 << 19
"""Most bytes of an intent's text."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A trainer's last intent."""

    seq: int = -1
    text: str = ""
    """The records, in the trainer's own format."""
    fenced: bool = False
    """Whether further intents of the trainer are refused."""


class IntentFenced(Exception):
    """Raised when other trainers have taken over this trainer's records."""


def home_key(trainer: int) -> NDArray[np.int64]:
    """A key in the trainer's home bucket."""
    return np.array([trainer], np.int64)


def home(trainer: int) -> int:
    """The home bucket of a trainer's intents."""
    return int(buckets_of(home_key(trainer))[0])


class Intents:
    """The intents in one store. All methods require the lock of the home bucket's shard."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Intent]] = {}
        """Intents by home bucket and trainer; images of buckets need them by bucket."""

    def declare(self, trainer: int, seq: int, text: str) -> Intent:
        """Replace the trainer's intent; return the current one. Raises ``IntentFenced``."""
        here = self._held.setdefault(home(trainer), {})
        known = here.get(trainer, Intent())
        if known.fenced:
            raise IntentFenced
        if seq >= known.seq:
            here[trainer] = Intent(seq, text)
        return here[trainer]

    def fence(self, trainer: int) -> Intent:
        """Refuse further intents of a trainer; return its last one."""
        here = self._held.setdefault(home(trainer), {})
        here[trainer] = found = replace(here.get(trainer, Intent()), fenced=True)
        return found

    def take(self, given: Mapping[int, Intent]) -> None:
        """Merge intents received from the owner of their home buckets."""
        for trainer, intent in given.items():
            here = self._held.setdefault(home(trainer), {})
            known = here.get(trainer, Intent())
            if not known.fenced and (intent.fenced or intent.seq >= known.seq):
                here[trainer] = intent

    def of(self, bucket: int) -> dict[int, Intent]:
        """The intents whose home is this bucket, by trainer."""
        return dict(self._held.get(bucket, {}))

    def drop(self, mask: NDArray[np.bool_]) -> None:
        """Drop the intents of the buckets in ``mask``."""
        for bucket in [one for one in list(self._held) if mask[one]]:
            self._held.pop(bucket, None)

    def forget(self, trainer: int) -> None:
        """Drop one trainer's intent."""
        self._held.get(home(trainer), {}).pop(trainer, None)
