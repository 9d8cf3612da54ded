"""The consumed records of an epoch: finished shards as a bitmap, begun ones with their number of consumed records.

In mode "steps" it is part of the model's state and the same on all ranks; in independent mode the Master owns it.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from typing import Any

from data_service.manifest import Manifest
from edl.errors import DataError

VERSION = 1
_ONES = bytes(bin(value).count("1") for value in range(256))


class Ledger:
    """The position in one data set, tied to a manifest (by digest), a seed and a shuffling rule.

    Records are counted in the shard's own order of the epoch, so "the first ``upto``" is a fixed set.
    """

    __slots__ = ("digest", "done", "done_shards", "epoch", "partial", "records", "seed", "shards", "shuffle")

    def __init__(self, digest: str, shards: int, *, seed: int = 0, shuffle: bool = True, epoch: int = 0) -> None:
        self.digest = digest
        self.shards = shards
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = epoch
        self.done = bytearray((shards + 7) // 8)
        """Bit ``shard % 8`` of byte ``shard // 8`` is set if the shard is consumed."""
        self.done_shards = 0
        self.partial: dict[int, int] = {}
        """Number of consumed records of begun shards, more than 0."""
        self.records = 0
        """Records consumed in this epoch, in finished and begun shards."""

    @classmethod
    def of(cls, manifest: Manifest, *, seed: int = 0, shuffle: bool = True) -> Ledger:
        """The position before the first record of this manifest."""
        return cls(manifest.digest, len(manifest), seed=seed, shuffle=shuffle)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return (
            f"Ledger(epoch={self.epoch}, {self.done_shards} of {self.shards} shards, {len(self.partial)} begun, "
            f"{self.records} records, digest={self.digest[:12]})"
        )

    def is_done(self, shard: int) -> bool:
        """True if all records of a shard are consumed. Raises ``DataError`` if there is no such shard."""
        self._check(shard)
        return bool(self.done[shard >> 3] >> (shard & 7) & 1)

    def count(self, shard: int) -> int:
        """Consumed records of an unfinished shard; 0 for a finished one, whose number is not kept."""
        self._check(shard)
        return self.partial.get(shard, 0)

    def take(self, shard: int, upto: int, complete: bool, begin: int = -1) -> int:
        """Mark the first ``upto`` records of a shard as consumed; with ``complete`` the shard is finished. Returns the
        number of new ones.

        ``begin``: the number consumed before, according to the caller. Raises ``DataError``, without any change, if
        records would count twice or be skipped.
        """
        self._check(shard)
        before = self.partial.get(shard, 0)
        if self.done[shard >> 3] >> (shard & 7) & 1:
            raise DataError(
                f"shard {shard} of epoch {self.epoch} is consumed; its records up to {upto} would count twice"
            )
        if begin not in (-1, before) or upto < before:
            first = before if begin == -1 else begin
            raise DataError(
                f"shard {shard} of epoch {self.epoch}: {before} records are consumed, so records {first} to {upto} "
                "would count twice or leave a gap"
            )
        if complete:
            self.partial.pop(shard, None)
            self.done[shard >> 3] |= 1 << (shard & 7)
            self.done_shards += 1
        elif upto:
            self.partial[shard] = upto
        self.records += upto - before
        return upto - before

    def extend(self, shards: int, digest: str) -> None:
        """Extend the position to a longer file list with this digest; new shards are not consumed. Raises ``DataError``
        if it is shorter."""
        if shards < self.shards:
            raise DataError(f"a position among {self.shards:,} shards cannot become one among {shards:,}")
        self.done.extend(bytes((shards + 7) // 8 - len(self.done)))
        self.shards, self.digest = shards, digest

    def next_epoch(self) -> None:
        """Start the next epoch with nothing consumed."""
        self.start(self.epoch + 1)

    def start(self, epoch: int) -> None:
        """Start an epoch with nothing consumed."""
        self.epoch = epoch
        self.done = bytearray(len(self.done))
        self.partial = {}
        self.done_shards = self.records = 0

    def belongs(self, digest: str, shards: int, seed: int, shuffle: bool) -> None:
        """Raise ``DataError`` unless this is a position in a data set with this digest and order."""
        if (self.digest, self.shards) != (digest, shards):
            raise DataError(
                f"the position belongs to data of digest {self.digest[:12]} with {self.shards:,} shards, these have "
                f"{digest[:12]} with {shards:,}; restore the same files, or start without that position"
            )
        if self.shuffle != shuffle or (shuffle and self.seed != seed):
            raise DataError(
                f"the position belongs to shuffle={self.shuffle}, seed={self.seed}; now it is shuffle={shuffle}, "
                f"seed={seed}: different records would count as consumed. Restore the previous values"
            )

    def copy(self) -> Ledger:
        """A copy that shares no data with this ledger."""
        other = Ledger(self.digest, 0, seed=self.seed, shuffle=self.shuffle, epoch=self.epoch)
        other.shards, other.done, other.partial = self.shards, self.done[:], dict(self.partial)
        other.done_shards, other.records = self.done_shards, self.records
        return other

    def state_dict(self) -> dict[str, Any]:
        """A compact plain form: numbers, text, bytes and a list."""
        return {
            "version": VERSION,
            "digest": self.digest,
            "shards": self.shards,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "epoch": self.epoch,
            "records": self.records,
            "done": zlib.compress(bytes(self.done), 1),
            "partial": [number for shard in sorted(self.partial) for number in (shard, self.partial[shard])],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Ledger:
        """The inverse of ``state_dict``. Raises ``DataError`` if it is damaged or of another version."""
        try:
            if state["version"] != VERSION:
                raise ValueError(f"version {state['version']}, this edl supports {VERSION}")
            return cls._loaded(state)
        except (ValueError, KeyError, TypeError, zlib.error, OverflowError) as error:
            raise DataError(f"cannot read a position in a data set: {type(error).__name__}: {error}") from None

    @classmethod
    def _loaded(cls, state: Mapping[str, Any]) -> Ledger:
        shards = _natural(state, "shards")
        digest = state["digest"]
        if not isinstance(digest, str):
            raise ValueError("its digest is not text")
        ledger = cls(digest, 0, seed=int(state["seed"]), shuffle=bool(state["shuffle"]), epoch=_natural(state, "epoch"))
        ledger.shards, ledger.records = shards, _natural(state, "records")
        size = (shards + 7) // 8
        unpack = zlib.decompressobj()
        done = unpack.decompress(bytes(state["done"]), size + 1)
        if len(done) != size or (shards % 8 and done[-1] >> shards % 8):
            raise ValueError(f"its bitmap is not one of {shards} shards")
        ledger.done = bytearray(done)
        ledger.done_shards = sum(done.translate(_ONES))
        flat = [int(number) for number in state["partial"]]
        ledger.partial = dict(zip(flat[::2], flat[1::2], strict=True))
        if any(
            not 0 <= shard < shards or count < 1 or ledger.is_done(shard) for shard, count in ledger.partial.items()
        ):
            raise ValueError("a begun shard is done, or there is no such shard")
        return ledger

    def encode(self) -> str:
        """Encode as one line of text."""
        state = self.state_dict()
        state["done"] = base64.b64encode(state["done"]).decode("ascii")
        return json.dumps(state, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Ledger:
        """The inverse of ``encode``. Raises ``DataError``."""
        try:
            state = json.loads(text)
            state["done"] = base64.b64decode(state["done"], validate=True)
        except (ValueError, KeyError, TypeError, binascii.Error, RecursionError) as error:
            raise DataError(f"cannot read a position in a data set: {error}") from None
        return cls.load(state)

    def _check(self, shard: int) -> None:
        if not 0 <= shard < self.shards:
            raise DataError(f"there is no shard {shard}; there are {self.shards}")

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


def _natural(state: Mapping[str, Any], name: str) -> int:
    value = state[name]
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r} is not a count")
    return value
