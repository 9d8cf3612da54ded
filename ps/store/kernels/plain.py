"""The kernels in numpy: the same results, an order of magnitude slower. The index is a dict from keys to slots."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.hashing import BUCKET_SHIFT, GOLDEN, SHARDS, mixed
from ps.spec import BUCKETS
from ps.store import halves, rules
from ps.store.kernels import normal
from ps.store.rules import TableLayout
from ps.store.shard_table import CHANGED, FREQUENCY, SEEN, UPDATES, ShardTable, ShardTables, Slots, Split

NAME = "numpy"
ENTRY_BYTES = 100
"""Approximate size of a dict entry with its two integers."""
Floats = NDArray[np.float32]


class PlainShardTable(ShardTable):
    """``ShardTable`` with a dict as index."""

    def __init__(self, layout: TableLayout, number: int) -> None:
        super().__init__(layout, number)
        self._index: dict[int, int] = {}
        self._top = 0
        self._free: list[int] = []

    @property
    def top(self) -> int:
        """Number of slots ever used."""
        return self._top

    @property
    def vacant(self) -> int:
        """Number of those slots without a row."""
        return len(self._free)

    @property
    def rows(self) -> int:
        """Number of rows in the shard table."""
        return len(self._index)

    def find(self, keys: NDArray[np.int64]) -> Slots:
        """The slot of each key; -1 without a row."""
        return np.fromiter(map(self._index.get, keys.tolist(), repeat(-1)), np.int64, len(keys))

    def insert(self, keys: NDArray[np.int64], mark: int, step: int) -> Slots:
        """The slot of each key; keys without a row get a new one with initial weights."""
        self.room(len(keys))
        found = np.empty(len(keys), np.int64)
        fresh: list[int] = []
        for place, key in enumerate(keys.tolist()):
            slot = self._index.get(key)
            if slot is None:
                slot = self._index[key] = self._slot()
                fresh.append(place)
            found[place] = slot
        slots, new = found[fresh], keys[fresh]
        meta = self.meta
        meta[slots, :2] = np.ascontiguousarray(new).view(np.uint32).reshape(-1, 2)
        meta[slots, FREQUENCY], meta[slots, UPDATES] = 0, 0
        meta[slots, SEEN], meta[slots, CHANGED] = step, mark
        self.set_weights(slots, first(self.layout, new))
        self.state[slots, : self.layout.accumulated] = self.layout.accumulator
        self.state[slots, self.layout.accumulated :] = 0
        return found

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._top += 1
        return self._top - 1

    def remove(self, slots: Slots) -> None:
        """Remove the rows in these slots; the slots will be reused."""
        for key in self.keys[slots].tolist():
            del self._index[key]
        self.meta[slots, CHANGED] = rules.FREE
        self._free.extend(slots.tolist())

    def bytes(self) -> int:
        """Memory in use, in bytes."""
        return self._rows.bytes(self.top) + len(self._index) * ENTRY_BYTES

    def bytes_for(self, more: int) -> int:
        """Upper bound of the bytes that ``more`` rows take."""
        return self._rows.bytes_for(self.top, max(0, more - len(self._free))) + more * ENTRY_BYTES


def warm() -> None:
    """Do nothing: there is nothing to compile."""


def shard_tables(layout: TableLayout) -> ShardTables:
    """New, empty shard tables."""
    return ShardTables(layout, [PlainShardTable(layout, number) for number in range(SHARDS)])


def adopt(shard_tables: ShardTables) -> ShardTables:
    """Not supported: no process switches to slower kernels."""
    raise NotImplementedError("the numpy kernels cannot take over from others")


def split(keys: NDArray[np.int64], parts: int = SHARDS) -> Split:
    """Group keys into ranges of shards."""
    buckets = (mixed(keys) >> np.uint64(BUCKET_SHIFT)).astype(np.int64)
    mine = buckets // (BUCKETS // parts)
    order = np.argsort(mine, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(mine, minlength=parts))])
    counts = np.bincount(buckets, minlength=BUCKETS).astype(np.uint32)
    return Split(keys[order], order, starts, counts, np.full(len(keys), -1, np.int64))


def find(shard_tables: ShardTables, split: Split, first: int, last: int) -> int:
    """Fill ``split.slots``; return the number of keys without a row."""
    missing = 0
    for shard in range(first, last):
        low, high = split.starts[shard], split.starts[shard + 1]
        if low < high:
            split.slots[low:high] = shard_tables[shard].find(split.keys[low:high])
            missing += int(np.count_nonzero(split.slots[low:high] < 0))
    return missing


def pull(
    shard_tables: ShardTables, split: Split, part: int, out: Floats, step: int, times: NDArray[np.uint32] | None
) -> int:
    """Fill ``split.slots``, and copy rows or initial weights to the keys' original places."""
    missing = 0
    for shard, places in split.by_shard(part):
        slots, order = shard_tables[shard].find(split.keys[places]), split.order[places]
        split.slots[places] = slots
        there = slots >= 0
        out[order[there]] = shard_tables[shard].weights(slots[there])
        if not there.all():
            missing += int(np.count_nonzero(~there))
            out[order[~there]] = first_weights(shard_tables.layout, split.keys[places[~there]])
        if step >= 0:
            shard_tables[shard].count(slots[there], None if times is None else times[order[there]], step)
    return missing


def apply(
    shard_tables: ShardTables, split: Split, first: int, last: int, values: Floats, rule: int, numbers:
    NDArray[np.float64], nesterov: bool, step: int, mark: int,
) -> tuple[list[Slots], int]:  # fmt: skip
    """Sum the values of each row and apply the rule."""
    changed: list[Slots] = []
    damaged = 0
    for shard in range(first, last):
        low, high = split.starts[shard], split.starts[shard + 1]
        if low == high:  # most shards of a small push
            changed.append(np.zeros(0, split.slots.dtype))
            continue
        there = split.slots[low:high] >= 0
        slots, mine = split.slots[low:high][there], values[split.order[low:high][there]]
        if rule == rules.ASSIGN:
            touched, backwards = np.unique(slots[::-1], return_index=True)
            shard_tables[shard].set_weights(touched, mine[::-1][backwards])
        else:
            touched, summed, bad = _summed(slots, mine, shard_tables.layout.damaged, np.float32(numbers[rules.LIMIT]))
            damaged += bad
            scaled = summed * np.float32(numbers[rules.SCALE])
            _RULES[rule](_Update(shard_tables[shard], touched, scaled, numbers, nesterov))
        meta = shard_tables[shard].meta
        meta[touched, SEEN] = np.maximum(meta[touched, SEEN], step)
        meta[touched, CHANGED] = mark
        changed.append(touched)
    return changed, damaged


def _summed(slots: Slots, values: Floats, treatment: int, limit: np.float32) -> tuple[Slots, Floats, int]:
    """Unique slots, their sums, and the number of skipped rows or replaced values."""
    damaged = 0
    if treatment == rules.CLIP:
        damaged = int(values.size - np.count_nonzero(np.abs(values) <= limit))
        values = np.clip(np.nan_to_num(values, nan=0.0, posinf=None, neginf=None), -limit, limit) if damaged else values
    order = np.argsort(slots, kind="stable")
    touched, begins = np.unique(slots[order], return_index=True)
    with np.errstate(over="ignore", invalid="ignore"):
        summed = np.add.reduceat(values[order], begins, axis=0) if len(order) else values
    if treatment == rules.CLIP:
        summed = np.clip(summed, -limit, limit)
    elif treatment == rules.SKIP:
        good = np.asarray((np.abs(summed) <= limit).all(axis=1))
        damaged = int(len(good) - np.count_nonzero(good))
        touched, summed = touched[good], summed[good]
    return touched, summed, damaged


class _Update:
    """One shard's rows that get a gradient: hyperparameters as float32, gradient scaled, clipped and decayed."""

    def __init__(
        self, shard_table: ShardTable, slots: Slots, grads: Floats, numbers: NDArray[np.float64], nesterov: bool
    ) -> None:
        named = dict(zip(rules.NUMBERS, numbers.astype(np.float32), strict=True))
        self.number, self.exact = named, dict(zip(rules.NUMBERS, numbers.tolist(), strict=True))
        self.shard_table, self.slots, self.nesterov = shard_table, slots, nesterov
        self.weights, self.state = shard_table.weights(slots), shard_table.state[slots]
        self.grads = self._prepared(grads)

    def _prepared(self, grads: Floats) -> Floats:
        number = self.number
        if number["clip_value"] > 0:
            grads = np.clip(grads, -number["clip_value"], number["clip_value"])
        if number["clip_norm"] > 0:
            length = np.sqrt((grads.astype(np.float64) ** 2).sum(axis=1))
            with np.errstate(divide="ignore"):
                shorter = np.minimum(1.0, float(number["clip_norm"]) / length)
            grads = (grads * np.where(length > 0, shorter, 1.0)[:, None]).astype(np.float32)
        return grads + number["weight_decay"] * self.weights if number["weight_decay"] > 0 else grads

    def done(self, weights: Floats, *state: Floats) -> None:
        """Write weights and state back and count the update."""
        table, random = self.shard_table, None
        if table.layout.form != halves.FLOAT:
            counts = table.meta[self.slots, UPDATES].astype(np.uint64) + np.uint64(self.exact["salt"])
            random = halves.drawn(table.keys[self.slots], counts, table.layout.dim)
        table.set_weights(self.slots, weights, random)
        if state:
            self.shard_table.state[self.slots] = np.concatenate(state, axis=1) if len(state) > 1 else state[0]
        if not self.exact["salt"]:
            self.shard_table.meta[self.slots, UPDATES] += np.uint32(1)

    def halves(self) -> tuple[Floats, Floats]:
        """The two arrays of a two-part state."""
        return self.state[:, : self.shard_table.layout.dim], self.state[:, self.shard_table.layout.dim :]


def _sgd(to: _Update) -> None:
    to.done(to.weights - to.number["lr"] * to.grads)


def _momentum(to: _Update) -> None:
    speed = to.number["momentum"] * to.state + to.grads
    along = to.grads + to.number["momentum"] * speed if to.nesterov else speed
    to.done(to.weights - to.number["lr"] * along, speed)


def _adagrad(to: _Update) -> None:
    total = to.state + to.grads * to.grads
    to.done(to.weights - to.number["lr"] * to.grads / (np.sqrt(total) + to.number["eps"]), total)


def _row_adagrad(to: _Update) -> None:
    total = to.state + (to.grads * to.grads).mean(axis=1, keepdims=True, dtype=np.float32)
    to.done(to.weights - to.number["lr"] / (np.sqrt(total) + to.number["eps"]) * to.grads, total)


def _adam(to: _Update) -> None:
    one = np.float32(1)
    first, second = to.halves()
    beta1, beta2 = to.number["beta1"], to.number["beta2"]
    first = beta1 * first + (one - beta1) * to.grads
    second = beta2 * second + (one - beta2) * to.grads * to.grads
    one_less, root_less = _corrections(to)
    size = to.number["lr"] / one_less[:, None]
    root = np.sqrt(second) / root_less[:, None] + to.number["eps"]
    to.done(to.weights - size * first / root, first, second)


def _corrections(to: _Update) -> Floats:
    table = to.shard_table.layout.corrections
    steps = to.shard_table.meta[to.slots, UPDATES].astype(np.int64) + 1
    if (steps > table.shape[1]).any() and (table[:, -1] < 1).any():
        return rules.corrections_at(to.exact["beta1"], to.exact["beta2"], steps.astype(np.float64))
    return table[:, np.minimum(steps, table.shape[1]) - 1]


def _ftrl(to: _Update) -> None:
    number = to.number
    linear, total = to.halves()[1], to.halves()[0]
    more = total + to.grads * to.grads
    power = -number["lr_power"]
    before, after = np.power(total, power), np.power(more, power)
    linear = linear + number["factor"] * to.grads - (after - before) / number["lr"] * to.weights
    quadratic = after / number["lr"] + 2 * number["l2"]
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = (np.sign(linear) * number["l1"] - linear) / quadratic
    to.done(np.where(np.abs(linear) > number["l1"], weights, np.float32(0)), more, linear)


def _add(to: _Update) -> None:
    to.done(to.weights + to.grads)


_RULES = {
    rules.SGD: _sgd,
    rules.MOMENTUM: _momentum,
    rules.ADAGRAD: _adagrad,
    rules.ROW_ADAGRAD: _row_adagrad,
    rules.ADAM: _adam,
    rules.FTRL: _ftrl,
    rules.ADD: _add,
}


def first(layout: TableLayout, keys: NDArray[np.int64]) -> Floats:
    """Initial weights of keys."""
    return halves.rounded(_drawn_first(layout, keys), layout.form)


def _drawn_first(layout: TableLayout, keys: NDArray[np.int64]) -> Floats:
    shape = (len(keys), layout.dim)
    if layout.start < 2:
        return np.full(shape, layout.scale if layout.start == 1 else 0.0, np.float32)
    seed = mixed(np.array([layout.seed], np.uint64))
    base = mixed(keys.astype(np.uint64) ^ seed)[:, None]
    drawn = mixed(base + np.arange(layout.dim, dtype=np.uint64) * np.uint64(GOLDEN))
    if layout.start == 2:
        unit: NDArray[Any] = (drawn >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        return np.asarray(unit * np.float32(layout.scale), np.float32)
    drawn_normal: NDArray[Any] = _quantile((drawn >> np.uint64(32)).astype(np.float64)) * layout.scale
    return np.asarray(drawn_normal, np.float32)


first_weights = first
"""Alias for functions with a parameter named ``first``."""


def _polynomial(factors: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    value = np.full_like(x, factors[0])
    for factor in factors[1:]:
        value = value * x + factor
    return value


def _quantile(number: NDArray[Any]) -> NDArray[Any]:
    """Quantile of the normal distribution at ``(number + 0.5) / 2**32``."""
    upper = number >= 2.0**31
    tail = np.where(upper, 4294967295.0 - number, number)
    low = (tail + 0.5) * normal.UNIT
    away = low - 0.5
    square = away * away
    middle = _polynomial(normal.A, square) * away / (_polynomial(normal.B, square) * square + 1.0)
    root = np.sqrt(-2.0 * _logarithm(low))
    outer = _polynomial(normal.C, root) / (_polynomial(normal.D, root) * root + 1.0)
    found = np.where(low < normal.TAIL, outer, middle)
    return np.where(upper, -found, found)


def _logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = np.where(small, exponent - 1, exponent).astype(np.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.full_like(ratio, 1.0 / 17.0)
    for odd in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * square + 1.0 / odd
    return exponent * normal.LN2 + 2.0 * ratio * series
