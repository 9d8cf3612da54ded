"""Preparation of pushes for a store: validation, grouping by table and operation, and the buckets that each push
touches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edl.errors import EdlError, PsError
from ps.hashing import SHARDS, buckets_of, splitmix64
from ps.rows import OPS, Pushed, RowOp, TablePush, TrainerPush
from ps.spec import BUCKETS, UpdateRule
from ps.store import damage, rules
from ps.store.kernels import Kernels
from ps.store.shard_table import Split
from ps.store.table import Table

Floats = NDArray[np.float32]
PER_SHARD = BUCKETS // SHARDS
SERVED = 1
"""Value in ``allowed`` for buckets whose requests are served; any other value means that they are not."""
GROUP, GROUPS, LONGEST = 1 << 12, 6, 1 << 14
"""A push is applied in this many groups of shards, each under one hold of their locks. Groups have at least and at most
this many keys: large enough to amortise the overhead, small enough to let other requests in between."""


@dataclass(slots=True)
class Work:
    """All values for one table and one operation."""

    table: Table
    op: str
    rule: int
    numbers: NDArray[np.float64]
    values: Floats
    begins: NDArray[np.int64]
    """Start of each push's part of the values."""
    split: Split

    def without(self, first: int, last: int, bad: NDArray[np.bool_]) -> Work:
        """Restrict to the shards ``first .. last-1``, leaving out the pairs (push, bucket) in ``bad``."""
        split = self.split
        low, high = split.starts[first], split.starts[last]
        owner = np.searchsorted(self.begins, split.order[low:high], side="right") - 1
        keep = ~bad[owner, buckets_of(split.keys[low:high])]
        before = np.concatenate([[0], np.cumsum(keep)])
        starts = before[np.clip(split.starts, low, high) - low]
        kept = np.flatnonzero(keep) + low
        return replace(self, split=Split(split.keys[kept], split.order[kept], starts, split.counts, split.slots[kept]))


class PartlyApplied(EdlError):
    """An error has interrupted a push while rows changed. Some of them have changed, but neither the sequence numbers
    nor the replicas, so a repetition would be applied twice: the store must not be used any more."""


def remaining(
    works: Sequence[Work], first: int, last: int, unserved: NDArray[np.bool_], late: NDArray[np.bool_], result: Pushed
) -> list[Work]:
    """Remove what is not served or has already been applied, in the shards ``first .. last-1``."""
    mine = slice(first * PER_SHARD, last * PER_SHARD)
    bad = np.zeros((len(unserved), BUCKETS), np.bool_)
    kept = []
    for work in works:
        bad[:, mine] = late
        once = work.without(first, last, bad)
        result.skipped += int(work.split.starts[last] - work.split.starts[first]) - len(once.split.keys)
        bad[:, mine] = unserved
        kept.append(once.without(first, last, bad))
    return kept


def refused(split: Split, served: NDArray[np.uint8], first: int, last: int) -> int:
    """The number of keys in the shards ``first .. last-1`` whose bucket is not served."""
    mine = slice(first * PER_SHARD, last * PER_SHARD)
    return int(split.counts[mine][served[mine] != SERVED].sum())


def aligned(values: object, dtype: type[np.generic]) -> NDArray[np.generic]:
    """Convert to an aligned, contiguous array of this type; copied only if necessary."""
    return np.require(values, dtype, ["C", "A"])


def works(
    tables: Mapping[str, Table], kernels: Kernels, pushes: Sequence[TrainerPush], lr: Mapping[str, float], scale: float
) -> tuple[list[Work], NDArray[np.bool_]]:
    """The work for some pushes, in the order of their parts, and the buckets that each push touches, as a mask ``(push,
    bucket)``.

    Raises ``PsError`` for invalid pushes, before anything is applied.
    """
    together: dict[tuple[str, str], list[tuple[int, TablePush]]] = {}
    for number, push in enumerate(pushes):
        for part in push.parts:
            together.setdefault((part.table, part.op), []).append((number, part))
    touched = np.zeros((len(pushes), BUCKETS), np.bool_)
    found = []
    for (name, op), parts in together.items():
        table = tables.get(name)
        if table is None:
            raise PsError(f"there is no table {name} here; define it first")
        if op not in OPS:
            raise PsError(f"table {name}: a part of a push cannot be {op!r}; it is one of {', '.join(OPS)}")
        checked = [(number, *_checked(table, part)) for number, part in parts]
        keys = np.concatenate([one[1] for one in checked]) if len(checked) > 1 else checked[0][1]
        values = np.concatenate([one[2] for one in checked]) if len(checked) > 1 else checked[0][2]
        damage.check(table.spec, keys, values, op)
        split = kernels.split(keys)
        begins = np.zeros(len(pushes), np.int64)
        for number, one, _ in checked:
            touched[number] |= (
                split.counts > 0 if len(checked) == 1 else np.bincount(buckets_of(one), None, BUCKETS) > 0
            )
            begins[number + 1 :] += len(one)
        salt = _salt(pushes[number] for number, _ in parts)
        found.append(Work(table, op, *_treatment(table, op, lr, scale, salt), values, begins, split))
    return found, touched


def _salt(pushes: Iterable[TrainerPush]) -> int:
    """A number of these pushes, from 1 to 2**52, wherever and whenever they are applied."""
    found = 0
    for push in pushes:
        found = splitmix64(found ^ splitmix64(push.trainer) ^ push.seq)
    return 1 + (found >> 12)


def _treatment(
    table: Table, op: str, lr: Mapping[str, float], scale: float, salt: int
) -> tuple[int, NDArray[np.float64]]:
    optimizer = table.spec.optimizer
    rate = lr.get(table.spec.name, optimizer.lr)
    if op == RowOp.GRAD:
        if optimizer.rule is UpdateRule.ADD:
            scale = 1.0
        return table.layout.rule, rules.numbers(optimizer, rate, scale)
    numbers = np.zeros(len(rules.NUMBERS))
    numbers[rules.SCALE], numbers[rules.LIMIT] = scale, damage.LARGEST
    if op == RowOp.ADD and optimizer.rule is not UpdateRule.ADD:
        numbers[rules.SALT] = salt
    return rules.ADD if op == RowOp.ADD else rules.ASSIGN, numbers


def _checked(table: Table, part: TablePush) -> tuple[NDArray[np.int64], Floats]:
    spec = table.spec
    keys: NDArray[np.int64] = aligned(part.keys, np.int64)  # type: ignore[assignment]
    values: Floats = aligned(part.grads, np.float32)  # type: ignore[assignment]
    if keys.ndim != 1 or values.shape != (len(keys), spec.dim):
        raise PsError(
            f"table {spec.name}: {len(keys)} keys need values of shape ({len(keys)}, {spec.dim}), not {values.shape}"
        )
    check_keys(table, keys)
    return keys, values


def check_keys(table: Table, keys: NDArray[np.int64]) -> None:
    """Raise ``PsError`` if a key of a dense table is not in ``0 .. rows-1``."""
    spec = table.spec
    if spec.dense and len(keys) and (keys.min() < 0 or keys.max() >= spec.rows):
        bad = keys[(keys < 0) | (keys >= spec.rows)][0]
        raise PsError(f"dense table {spec.name} has keys 0 to {spec.rows - 1}, not {bad}")


def groups(starts: Sequence[NDArray[np.int64]]) -> list[tuple[int, int]]:
    """Ranges of shards with similar numbers of keys."""
    if not starts:
        return []
    total = (np.sum(starts, axis=0) if len(starts) > 1 else starts[0]).tolist()
    most = min(max(total[SHARDS] // GROUPS, GROUP), LONGEST)
    found, first = [], 0
    for shard in range(SHARDS):
        if total[shard + 1] - total[first] >= most or shard == SHARDS - 1:
            if total[shard + 1] > total[first]:
                found.append((first, shard + 1))
            first = shard + 1
    return found


def missing(split: Split, first: int, last: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Indices of the keys without a slot, by shard. ``split``: with a range for each shard."""
    for shard in range(first, last):
        low, high = split.starts[shard], split.starts[shard + 1]
        places = np.flatnonzero(split.slots[low:high] < 0)
        if len(places):
            yield shard, places + low
