"""The compiled function behind ``fast`` that sums gradients and updates rows, with the rules.

``numbers``: doubles in the order of ``ps.store.rules.NUMBERS``; rules compute in float32.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math

import numpy as np

from ps.store import rules
from ps.store.halves import FLOAT
from ps.store.kernels.half import narrow, room_of, widen
from ps.store.kernels.loops import CHANGED, FIELDS, FLYING, HEAD, ROWS, SEEN, STRIDE, UPDATES
from ps.store.kernels.pointers import (
    BLOCK,
    LINE,
    adagrad_block,
    add,
    compiled,
    copy,
    doubles,
    floats,
    integers,
    longs,
    soon_all_read,
    soon_all_written,
    words,
)

_ONE = np.float32(1)
_KNUTH = np.uint64(0x9E3779B97F4A7C15)


@compiled(forceinline=True)
def _number(numbers, which):
    return np.float32(doubles(numbers)[which])


@compiled(forceinline=True)
def _clean(value, limit):
    if value != value:
        return np.float32(0)
    return min(max(value, -limit), limit)


@compiled()
def _cleaned(source, target, dim, fresh, limit):
    """Add, or start with, values whose damaged elements are replaced; return the number of replacements."""
    given, total = floats(source), floats(target)
    replaced = 0
    for j in range(dim):
        replaced += 0 if abs(given[j]) <= limit else 1
        value = _clean(given[j], limit)
        total[j] = value if fresh else _clean(total[j] + value, limit)
    return replaced


@compiled(forceinline=True)
def _unite(low, high, order, slots, values, dim, rule, treatment, limit, touched, table, where, sums):
    """Collect the distinct slots of one shard in ``touched``, and the address of each one's summed gradient.

    A single gradient stays in place; several are summed. Returns the number of slots and of replaced values.
    """
    slot, place, mine, entry, source = longs(slots), longs(order), longs(touched), integers(table), longs(where)
    bits = 4
    while (1 << bits) < 2 * (high - low):
        bits += 1
    shift, last = np.uint64(64 - bits), (1 << bits) - 1
    wide, lines, count, replaced = 4 * dim, (4 * dim + LINE - 1) // LINE, 0, 0
    clean = treatment == rules.CLIP and rule != rules.ASSIGN
    sum_at = sums
    for i in range(last + 1):
        entry[i] = 0
    near = max(4, FLYING // lines)
    for i in range(low - near, high):
        if i + near < high:
            soon_all_read(values + wide * place[i + near], wide)
        if i < low or slot[i] < 0:
            continue
        here = values + wide * place[i]
        at = np.int64((np.uint64(slot[i]) * _KNUTH) >> shift)
        while entry[at] != 0 and mine[entry[at] - 1] != slot[i]:
            at = (at + 1) & last
        known = np.int64(entry[at]) - 1
        if known < 0:
            entry[at] = count + 1
            mine[count] = slot[i]
            source[count] = here
            if clean:
                replaced += _cleaned(here, sum_at, dim, True, limit)
                source[count] = sum_at
                sum_at += wide
            count += 1
        elif rule == rules.ASSIGN:
            source[known] = here
        elif clean:
            replaced += _cleaned(here, source[known], dim, False, limit)
        else:
            if not sums <= source[known] < sum_at:
                copy(source[known], sum_at, dim)
                source[known] = sum_at
                sum_at += wide
            add(here, source[known], dim)
    return count, replaced


@compiled(forceinline=True)
def _plain(numbers):
    """True if gradients are used unchanged: not decayed, clipped or scaled."""
    number = doubles(numbers)
    return number[8] == 0 and number[9] == 0 and number[10] == 0 and number[11] == 1


@compiled()
def _prepare(gradient, weights, dim, numbers, into):
    """Scale, clip and decay a gradient."""
    given, weight, out = floats(gradient), floats(weights), floats(into)
    scale, decay = _number(numbers, 11), _number(numbers, 8)
    most, longest = _number(numbers, 9), _number(numbers, 10)
    for j in range(dim):
        out[j] = given[j] * scale
    if most > 0:
        for j in range(dim):
            out[j] = min(max(out[j], -most), most)
    if longest > 0:
        total = 0.0
        for j in range(dim):
            total += np.float64(out[j]) * np.float64(out[j])
        if math.sqrt(total) > longest:
            shorter = np.float64(longest) / math.sqrt(total)
            for j in range(dim):
                out[j] = np.float32(np.float64(out[j]) * shorter)
    if decay > 0:
        for j in range(dim):
            out[j] += decay * weight[j]


@compiled()
def _momentum(weights, state, gradient, dim, numbers, nesterov):
    w, speed, g = floats(weights), floats(state), floats(gradient)
    lr, momentum = _number(numbers, 0), _number(numbers, 1)
    for j in range(dim):
        moved = momentum * speed[j] + g[j]
        speed[j] = moved
        w[j] -= lr * (g[j] + momentum * moved if nesterov else moved)


@compiled(forceinline=True)
def _adagrad(weights, state, gradient, dim, numbers):
    lr, eps, end = _number(numbers, 0), _number(numbers, 4), 4 * (dim & -BLOCK)
    for begin in range(0, end, 4 * BLOCK):
        adagrad_block(weights + begin, state + begin, gradient + begin, lr, eps)
    w, total, g = floats(weights + end), floats(state + end), floats(gradient + end)
    for j in range(dim & (BLOCK - 1)):
        given = g[j]
        more = total[j] + given * given
        total[j] = more
        w[j] -= lr * given / (np.float32(math.sqrt(more)) + eps)


@compiled()
def _row_adagrad(weights, state, gradient, dim, numbers):
    w, total, g = floats(weights), floats(state), floats(gradient)
    squares = np.float32(0)
    for j in range(dim):
        squares += g[j] * g[j]
    total[0] += squares / np.float32(dim)
    size = _number(numbers, 0) / (np.float32(math.sqrt(total[0])) + _number(numbers, 4))
    for j in range(dim):
        w[j] -= size * g[j]


@compiled()
def _adam(weights, state, gradient, dim, numbers, updates, corrections, corrected):
    w, first, second, g = floats(weights), floats(state), floats(state + 4 * dim), floats(gradient)
    beta1, beta2, eps = _number(numbers, 2), _number(numbers, 3), _number(numbers, 4)
    number = min(updates, corrected - 1)
    less, root = floats(corrections)[number], floats(corrections)[corrected + number]
    if updates >= corrected and (less < _ONE or root < _ONE):
        steps = np.float64(updates + 1)
        less = np.float32(1.0 - doubles(numbers)[2] ** steps)
        root = np.float32(math.sqrt(1.0 - doubles(numbers)[3] ** steps))
    size = _number(numbers, 0) / less
    for j in range(dim):
        given = g[j]
        m = beta1 * first[j] + (_ONE - beta1) * given
        v = beta2 * second[j] + (_ONE - beta2) * given * given
        first[j], second[j] = m, v
        w[j] -= size * m / (np.float32(math.sqrt(v)) / root + eps)


@compiled()
def _ftrl(weights, state, gradient, dim, numbers):
    w, total, linear, g = floats(weights), floats(state), floats(state + 4 * dim), floats(gradient)
    lr, l1, l2, power = _number(numbers, 0), _number(numbers, 5), _number(numbers, 6), -_number(numbers, 7)
    factor = _number(numbers, 13)
    for j in range(dim):
        more = total[j] + g[j] * g[j]
        if power == np.float32(0.5):
            before, after = np.float32(math.sqrt(total[j])), np.float32(math.sqrt(more))
        else:
            before, after = np.float32(total[j] ** power), np.float32(more**power)
        total[j] = more
        z = linear[j] + factor * g[j] - (after - before) / lr * w[j]
        linear[j] = z
        if abs(z) > l1:
            w[j] = ((l1 if z > 0 else -l1) - z) / (after / lr + np.float32(2) * l2)
        else:
            w[j] = np.float32(0)


@compiled(forceinline=True)
def _update(rule, weights, state, gradient, dim, numbers, nesterov, updates, corrections, corrected):
    w, g = floats(weights), floats(gradient)
    if rule == rules.ADAGRAD:
        _adagrad(weights, state, gradient, dim, numbers)
    elif rule == rules.SGD:
        lr = _number(numbers, 0)
        for j in range(dim):
            w[j] -= lr * g[j]
    elif rule == rules.ADAM:
        _adam(weights, state, gradient, dim, numbers, updates, corrections, corrected)
    elif rule == rules.MOMENTUM:
        _momentum(weights, state, gradient, dim, numbers, nesterov)
    elif rule == rules.ROW_ADAGRAD:
        _row_adagrad(weights, state, gradient, dim, numbers)
    elif rule == rules.FTRL:
        _ftrl(weights, state, gradient, dim, numbers)
    elif rule == rules.ADD:
        for j in range(dim):
            w[j] += g[j]
    else:
        for j in range(dim):
            w[j] = g[j]


@compiled(forceinline=True)
def _update_row(row, gradient, rule, room, dim, numbers, nesterov, corrections, corrected, plain, buffer, form):
    """Update a row. ``buffer``: memory for a gradient, and for 16-bit weights while they are float32."""
    weights, updates = row + HEAD, np.int64(words(row)[UPDATES])
    if form != FLOAT:
        weights = buffer + 4 * dim
        widen(row + HEAD, weights, dim, form)
    if not plain:
        _prepare(gradient, weights, dim, numbers, buffer)
        gradient = buffer
    _update(rule, weights, row + HEAD + room, gradient, dim, numbers, nesterov, updates, corrections, corrected)
    if form != FLOAT:
        salt = np.int64(doubles(numbers)[rules.SALT])
        narrow(weights, row + HEAD, dim, form, longs(row)[0], updates + salt, rule != rules.ASSIGN)


@compiled()
def _sound(values, dim, limit):
    value = floats(values)
    bad = 0
    for j in range(dim):
        bad += 0 if abs(value[j]) <= limit else 1
    return bad == 0


@compiled(
    "int64(int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,"
    "int64,int64,int64,int64,int64)"
)
def apply(
    blocks, shard, last, starts, order, slots, values, dim, state_dim, rule, numbers, nesterov, treatment, corrections,
    corrected, step, mark, touched, begins, table, where, sums, form,
):  # fmt: skip
    """Sum the values of each row and update it; see ``Kernels.apply``. Returns the number of damaged rows or values."""
    begin, done, source = longs(starts), longs(begins), longs(where)
    plain, limit = _plain(numbers) or rule == rules.ASSIGN, _number(numbers, 12)
    counts = 0 if rule == rules.ASSIGN or doubles(numbers)[rules.SALT] != 0 else 1
    wide, damaged, total = 4 * dim, 0, 0
    room = room_of(dim, form)
    size = HEAD + room + 4 * state_dim
    lines = (size + LINE - 1) // LINE
    for number in range(shard, last):
        block = longs(blocks + 8 * FIELDS * number)
        rows, stride = block[ROWS], block[STRIDE]
        low, high = begin[number], begin[number + 1]
        mine = longs(touched + 8 * total)
        done[number - shard] = total
        count, replaced = _unite(
            low, high, order, slots, values, dim, rule, treatment, limit, touched + 8 * total, table, where, sums
        )
        damaged += replaced
        buffer = sums + wide * (high - low + 1)
        kept = 0
        near = max(4, FLYING // lines)
        for i in range(-near, count):
            if i + near < count:
                soon_all_written(rows + stride * mine[i + near], size)
            if i < 0:
                continue
            slot, gradient = mine[i], source[i]
            row = rows + stride * slot
            counter = words(row)
            if treatment == rules.SKIP and rule != rules.ASSIGN and not _sound(gradient, dim, limit):
                damaged += 1
                continue
            _update_row(row, gradient, rule, room, dim, numbers, nesterov, corrections, corrected, plain, buffer, form)
            counter[UPDATES] += counts
            counter[SEEN] = max(np.int64(counter[SEEN]), step)
            counter[CHANGED] = mark
            mine[kept] = slot
            kept += 1
        total += kept
    done[last - shard] = total
    return damaged
