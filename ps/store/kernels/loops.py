"""The compiled functions that ``fast`` uses to find, create and copy rows: plain loops over addresses.

In numba an int64 combined with a uint64 yields a float, so every constant used in hashing is a uint64.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math

import numpy as np

from ps.hashing import BUCKET_SHIFT, GOLDEN, SHARD_SHIFT
from ps.spec import BUCKETS, TableSpec
from ps.store import rules
from ps.store.halves import FLOAT
from ps.store.kernels import normal
from ps.store.kernels.half import narrow, room_of, settle, widen
from ps.store.kernels.mixing import mix
from ps.store.kernels.pointers import (
    LINE,
    compiled,
    copy,
    floats,
    integers,
    longs,
    octets,
    soon_all_read,
    soon_all_written,
    soon_read,
    soon_written,
    words,
)

# Fields of a shard table's block.
MAP, CAP, ROWS, STRIDE, TOP, FREE_AT, VACANT, USED = range(8)
HEAD = 24
"""Bytes of a row's key and counters; the weights follow, then the optimizer state."""
FREQUENCY, UPDATES, SEEN, CHANGED = 2, 3, 4, 5
"""Indices of the counters in a row read as uint32; the key takes the first two."""
FIELDS = 16
EXAMPLE = TableSpec("example", 8)
AHEAD = 24
"""Distance between the stages of ``rebuild``, in slots."""
TOGETHER = 16
"""Keys per batch in each stage of a pull."""
NEAR = 10
"""Distance between prefetching an index entry and writing it, in keys."""
FLYING = 40
"""Cache lines in flight: prefetched and not used yet."""
TAG_BITS = 7
TAGS = (1 << TAG_BITS) - 1
IN_SHARD = 48
"""Number of bits for a place or slot; the shard's number is in the bits above."""

_U = np.uint64
_GOLDEN, _R32, _R40 = _U(GOLDEN), _U(32), _U(40)
_LOW, _TAGS = _U(0xFFFFFFFF), _U(TAGS)
_BUCKET, _SHARD = _U(BUCKET_SHIFT), _U(SHARD_SHIFT)
_ONE, _TINY = np.float32(1), np.float32(2.0**-23)
_FREE = rules.FREE
_MOST = 0xFFFFFFFF
_ODDS = (1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0)
_A0, _A1, _A2, _A3, _A4, _A5 = normal.A
_B0, _B1, _B2, _B3, _B4 = normal.B
_C0, _C1, _C2, _C3, _C4, _C5 = normal.C
_D0, _D1, _D2, _D3 = normal.D


@compiled(forceinline=True)
def _home(mixed, capacity):
    return np.int64(((mixed & _LOW) * np.uint64(capacity)) >> _R32)


@compiled(forceinline=True)
def _tag(mixed):
    return np.int64((mixed >> _R32) & _TAGS)


# --- first weights ----------------------------------------------------------------------------------------------------


@compiled()
def _logarithm(x):
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.7071067811865476:
        mantissa = mantissa * 2.0
        exponent = exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = _ODDS[0]
    for i in range(1, 9):
        series = series * square + _ODDS[i]
    return np.float64(exponent) * normal.LN2 + 2.0 * ratio * series


@compiled()
def _quantile(number):
    upper = number >= 2147483648.0
    tail = 4294967295.0 - number if upper else number
    low = (tail + 0.5) * normal.UNIT
    if low < normal.TAIL:
        q = math.sqrt(-2.0 * _logarithm(low))
        above = ((((_C0 * q + _C1) * q + _C2) * q + _C3) * q + _C4) * q + _C5
        found = above / ((((_D0 * q + _D1) * q + _D2) * q + _D3) * q + 1.0)
    else:
        away = low - 0.5
        r = away * away
        above = (((((_A0 * r + _A1) * r + _A2) * r + _A3) * r + _A4) * r + _A5) * away
        found = above / (((((_B0 * r + _B1) * r + _B2) * r + _B3) * r + _B4) * r + 1.0)
    return -found if upper else found


@compiled()
def _begin(out, key, dim, start, scale, seed):
    weights = floats(out)
    if start < 2:
        value = np.float32(scale) if start == 1 else np.float32(0)
        for j in range(dim):
            weights[j] = value
        return
    base = mix(np.uint64(key) ^ np.uint64(seed))
    if start == 2:
        scaled = np.float32(scale)
        for j in range(dim):
            drawn = mix(base + np.uint64(j) * _GOLDEN)
            weights[j] = (np.float32(np.int64(drawn >> _R40)) * _TINY - _ONE) * scaled
        return
    for j in range(dim):
        drawn = mix(base + np.uint64(j) * _GOLDEN)
        weights[j] = np.float32(_quantile(np.float64(np.int64(drawn >> _R32))) * scale)


@compiled("void(int64,int64,int64,int64,int64,float64,int64,int64)")
def first(count, keys, out, dim, start, scale, seed, form):
    """Initial weights of keys, in order."""
    key = longs(keys)
    for i in range(count):
        _begin(out + 4 * dim * i, key[i], dim, start, scale, seed)
        if form != FLOAT:
            settle(out + 4 * dim * i, dim, form)


# --- index ------------------------------------------------------------------------------------------------------------


@compiled("void(int64,int64,int64,int64,int64,int64,int64,int64)")
def split(keys, count, parts, sorted_keys, order, starts, counts, scratch):
    """Counting sort of keys into ``parts`` ranges of shards (a power of two); also counts the keys of each bucket."""
    key, ordered, place = longs(keys), longs(sorted_keys), longs(order)
    begin, number, part = longs(starts), words(counts), octets(scratch)
    size = BUCKETS // parts
    down = 0
    while (1 << down) < size:
        down += 1
    for i in range(BUCKETS):
        number[i] = 0
    for i in range(count):
        bucket = np.int64(mix(np.uint64(key[i])) >> _BUCKET)
        number[bucket] += 1
        part[i] = bucket >> down
    total = 0
    for i in range(parts):
        begin[i] = total
        for j in range(size):
            total += number[i * size + j]
    begin[parts] = total
    for i in range(count):
        mine = np.int64(part[i])
        to = begin[mine]
        begin[mine] = to + 1
        ordered[to] = key[i]
        place[to] = i
    for i in range(parts - 1, 0, -1):
        begin[i] = begin[i - 1]
    begin[0] = 0


@compiled(forceinline=True)
def _probe(block, key):
    """Place of a key's index entry; if there is none, -1 minus the place where it belongs."""
    entry, capacity, rows, stride = words(block[MAP]), block[CAP], block[ROWS], block[STRIDE]
    mixed = mix(np.uint64(key))
    place, tag = _home(mixed, capacity), _tag(mixed)
    while True:
        found = np.int64(entry[place])
        if found == 0:
            return -1 - place
        if (found & TAGS) == tag and longs(rows + stride * ((found >> TAG_BITS) - 1))[0] == key:
            return place
        place += 1
        if place == capacity:
            place = 0


@compiled(forceinline=True)
def _guess(index, capacity, place, tag):
    """Slot of the first entry from ``place`` on with this tag: nearly always the right one. -1 if no entry matches."""
    entry = words(index)
    found = np.int64(entry[place])
    while found != 0 and (found & TAGS) != tag:
        place += 1
        if place == capacity:
            place = 0
        found = np.int64(entry[place])
    return (found >> TAG_BITS) - 1


@compiled(forceinline=True)
def _sure(block, guess, key):
    """Verify a guessed slot, and search for the right one if it is wrong; -1 if the key has none."""
    if guess < 0 or longs(block[ROWS] + block[STRIDE] * guess)[0] == key:
        return guess
    place = _probe(block, key)
    return (np.int64(words(block[MAP])[place]) >> TAG_BITS) - 1 if place >= 0 else -1


@compiled("void(int64,int64,int64,int64)")
def seek(block_at, count, keys, slots):
    """The slots of keys in one shard table; -1 without a row."""
    block, key, slot = longs(block_at), longs(keys), longs(slots)
    for i in range(count):
        place = _probe(block, key[i]) if block[CAP] else -1
        slot[i] = (np.int64(words(block[MAP])[place]) >> TAG_BITS) - 1 if place >= 0 else -1


@compiled("void(int64,int64,int64,int64,int64)")
def rebuild(block_at, index, capacity, begin, end):
    """Enter the slots ``begin .. end-1`` into a larger index that already contains the slots before ``begin``."""
    block = longs(block_at)
    entry, rows, stride = words(index), block[ROWS], block[STRIDE]
    for i in range(begin, end + AHEAD):
        if i < end:
            soon_written(index + 4 * _home(mix(np.uint64(longs(rows + stride * i)[0])), capacity))
        slot = i - AHEAD
        if slot >= begin and words(rows + stride * slot)[CHANGED] != _FREE:
            mixed = mix(np.uint64(longs(rows + stride * slot)[0]))
            place = _home(mixed, capacity)
            while entry[place] != 0:
                place += 1
                if place == capacity:
                    place = 0
            entry[place] = np.uint32(((slot + 1) << TAG_BITS) | _tag(mixed))


@compiled("void(int64,int64,int64,int64,int64,int64,int64,int64,int64,float64,int64,int64,float64,int64,int64)")
def insert(
    block_at, count, keys, slots, mark, step, dim, state_dim, start, scale, seed, accumulated, accumulator, form, spare
):  # fmt: skip
    """Find the slots of keys; keys without a row get a new one. The caller must have made room. ``spare``: memory for
    ``dim`` floats, if weights have 16 bits."""
    block = longs(block_at)
    key, slot, free = longs(keys), longs(slots), integers(block[FREE_AT])
    entry, capacity = words(block[MAP]), block[CAP]
    for i in range(count):
        if i + NEAR < count:
            soon_written(block[MAP] + 4 * _home(mix(np.uint64(key[i + NEAR])), capacity))
        place = _probe(block, key[i])
        if place >= 0:
            slot[i] = (np.int64(entry[place]) >> TAG_BITS) - 1
            continue
        place = -1 - place
        if block[VACANT] > 0:
            block[VACANT] -= 1
            mine = np.int64(free[block[VACANT]])
        else:
            mine = block[TOP]
            block[TOP] += 1
        slot[i] = mine
        row = block[ROWS] + block[STRIDE] * mine
        number = words(row)
        longs(row)[0] = key[i]
        number[FREQUENCY], number[UPDATES], number[SEEN], number[CHANGED] = 0, 0, step, mark
        if form == FLOAT:
            _begin(row + HEAD, key[i], dim, start, scale, seed)
        else:
            _begin(spare, key[i], dim, start, scale, seed)
            narrow(spare, row + HEAD, dim, form, key[i], 0, False)
        state = floats(row + HEAD + room_of(dim, form))
        for j in range(state_dim):
            state[j] = np.float32(accumulator) if j < accumulated else np.float32(0)
        entry[place] = np.uint32(((mine + 1) << TAG_BITS) | _tag(mix(np.uint64(key[i]))))
        block[USED] += 1


@compiled("void(int64,int64,int64)")
def remove(block_at, count, slots):
    """Remove rows; later index entries of the same probe chain move up, so that no search ends too early."""
    block = longs(block_at)
    slot, free = longs(slots), integers(block[FREE_AT])
    entry, capacity = words(block[MAP]), block[CAP]
    rows, stride = block[ROWS], block[STRIDE]
    for i in range(count):
        mine = slot[i]
        hole = _probe(block, longs(rows + stride * mine)[0])
        place = hole
        while True:
            place = place + 1 if place + 1 < capacity else 0
            found = np.int64(entry[place])
            if found == 0:
                break
            home = _home(mix(np.uint64(longs(rows + stride * ((found >> TAG_BITS) - 1))[0])), capacity)
            behind_home = place - home if place >= home else place - home + capacity
            behind_hole = place - hole if place >= hole else place - hole + capacity
            if behind_home >= behind_hole:
                entry[hole] = np.uint32(found)
                hole = place
        entry[hole] = np.uint32(0)
        words(rows + stride * mine)[CHANGED] = _FREE
        free[block[VACANT]] = mine
        block[VACANT] += 1
        block[USED] -= 1


@compiled("int64(int64,int64,int64)")
def within(block_at, buckets, slots):
    """Write the slots of the rows in the given buckets to ``slots``; return their number."""
    block = longs(block_at)
    wanted, slot = octets(buckets), longs(slots)
    rows, stride = block[ROWS], block[STRIDE]
    count = 0
    for i in range(block[TOP]):
        row = rows + stride * i
        if words(row)[CHANGED] != _FREE and wanted[np.int64(mix(np.uint64(longs(row)[0])) >> _BUCKET)]:
            slot[count] = i
            count += 1
    return count


# --- rows -------------------------------------------------------------------------------------------------------------


@compiled(forceinline=True)
def _mixed(blocks, low, high, key, slot):
    """Hash keys and prefetch the index entries where their searches start."""
    for i in range(low, high):
        mixed = mix(np.uint64(key[i]))
        block = longs(blocks + 8 * FIELDS * np.int64(mixed >> _SHARD))
        soon_read(block[MAP] + 4 * _home(mixed, block[CAP]))
        slot[i] = np.int64(mixed)


@compiled(forceinline=True)
def _guessed(blocks, low, high, slot, size):
    """Replace hashes by shard and guessed slot plus one (0: none), and prefetch ``size`` bytes of each row."""
    for i in range(low, high):
        mixed = np.uint64(slot[i])
        shard = np.int64(mixed >> _SHARD)
        block = longs(blocks + 8 * FIELDS * shard)
        capacity, guess = block[CAP], -1
        if capacity:
            guess = _guess(block[MAP], capacity, _home(mixed, capacity), _tag(mixed))
        slot[i] = (shard << IN_SHARD) | (guess + 1)
        if guess >= 0:
            row = block[ROWS] + block[STRIDE] * guess
            soon_written(row)
            soon_all_read(row + LINE, size - LINE)


@compiled("int64(int64,int64,int64,int64,int64)")
def find(blocks, low, high, keys, slots):
    """Find the slots of ``keys[low:high]`` in all shards; return the number of keys without one. Pipelined like
    ``pull``."""
    key, slot, missing = longs(keys), longs(slots), 0
    for begin in range(low, high + 2 * TOGETHER, TOGETHER):
        _mixed(blocks, begin, min(begin + TOGETHER, high), key, slot)
        _guessed(blocks, max(low, begin - TOGETHER), min(begin, high), slot, HEAD)
        for j in range(max(low, begin - 2 * TOGETHER), min(begin - TOGETHER, high)):
            block = longs(blocks + 8 * FIELDS * (slot[j] >> IN_SHARD))
            slot[j] = _sure(block, (slot[j] & ((1 << IN_SHARD) - 1)) - 1, key[j])
            missing += slot[j] < 0
    return missing


@compiled("int64(int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,float64,int64,int64)")
def pull(blocks, low, high, keys, order, slots, out, step, times, dim, start, scale, seed, form):
    """Find the rows of ``keys[low:high]`` in all shards and copy them, or initial weights, to the keys' original
    places; count the pulls unless ``step`` is negative. Returns the number of keys without a row. Keys are processed in
    their original order, so ``out`` is written almost sequentially.

    Each stage processes a batch of keys while the memory for other batches is being fetched: three short loops keep
    more fetches in flight than one loop with three stages.
    """
    key, place, slot = longs(keys), longs(order), longs(slots)
    wide, missing = 4 * dim, 0
    for begin in range(low, high + 2 * TOGETHER, TOGETHER):
        _mixed(blocks, begin, min(begin + TOGETHER, high), key, slot)
        _guessed(blocks, max(low, begin - TOGETHER), min(begin, high), slot, HEAD + room_of(dim, form))
        for j in range(max(low, begin - TOGETHER), min(begin, high)):
            soon_all_written(out + wide * place[j], wide)
        for j in range(max(low, begin - 2 * TOGETHER), min(begin - TOGETHER, high)):
            block = longs(blocks + 8 * FIELDS * (slot[j] >> IN_SHARD))
            mine = _sure(block, (slot[j] & ((1 << IN_SHARD) - 1)) - 1, key[j])
            slot[j] = mine
            if mine < 0:
                missing += 1
                _begin(out + wide * place[j], key[j], dim, start, scale, seed)
                if form != FLOAT:
                    settle(out + wide * place[j], dim, form)
                continue
            row = block[ROWS] + block[STRIDE] * mine
            if step >= 0:
                counter = words(row)
                often = np.int64(counter[FREQUENCY]) + (1 if times == 0 else np.int64(words(times)[place[j]]))
                counter[FREQUENCY] = min(often, _MOST)
                counter[SEEN] = max(np.int64(counter[SEEN]), step)
            if form == FLOAT:
                copy(row + HEAD, out + wide * place[j], dim)
            else:
                widen(row + HEAD, out + wide * place[j], dim, form)
    return missing


@compiled("void(int64,int64,int64,int64,int64)")
def count(block_at, number, slots, times, step):
    """Count pulls of rows. Slots may repeat. ``times``: occurrences as uint32; 0: one each."""
    block, slot = longs(block_at), longs(slots)
    for i in range(number):
        counter = words(block[ROWS] + block[STRIDE] * slot[i])
        often = np.int64(counter[FREQUENCY]) + (1 if times == 0 else np.int64(words(times)[i]))
        counter[FREQUENCY] = min(often, _MOST)
        counter[SEEN] = max(np.int64(counter[SEEN]), step)
