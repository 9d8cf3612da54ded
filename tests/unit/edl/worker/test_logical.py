"""The sum over logical ranks has the same bits wherever they live."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl.arithmetic.plan import split
from edl.errors import StateError
from edl.worker import logical
from edl.worker.logical import Branches, Part, Streams, check_blocks, sum_over_workers, tree_sum


def leaves(ranks: int, seed: int, size: int = 57) -> list[list[Any]]:
    """Numbers of very different sizes, so that any other order of additions shows."""
    rng = np.random.default_rng([ranks, seed])
    return [
        [
            (rng.normal(size=size) * 10.0 ** rng.integers(-6, 7, size)).astype(np.float32),
            rng.normal(size=3) * 10.0 ** rng.integers(-9, 9, 3),
        ]
        for _ in range(ranks)
    ]


def by_workers(gradients: list[list[Any]], workers: int, absent: frozenset[int] = frozenset()) -> list[list[Any]]:
    """Result of each worker at the end, with a simulated exchange."""
    counts = split(len(gradients), workers)
    every: list[Branches] = []
    for worker in range(workers):
        branches, first = Branches(), sum(counts[:worker])
        for rank in range(first, first + counts[worker]):
            if rank not in absent:
                branches.add(rank, [array.copy() for array in gradients[rank]])
        every.append(branches)
    held = [sorted(branches.nodes) for branches in every]
    sizes = [array.size for array in gradients[0]]
    kinds = [array.dtype for array in gradients[0]]
    sent: list[list[Any]] = [[] for _ in range(workers)]

    def blank(array: int, rows: int, columns: int) -> Any:
        return np.full((rows, columns), np.nan, kinds[array])

    def collect(worker: int) -> Any:
        def gather(mine: Any) -> list[Any]:
            sent[worker].append(mine.copy())
            return [mine] * workers

        return gather

    for worker in range(workers):  # first to see what each sends, then with what the others have sent
        sum_over_workers(every[worker], held, sizes, blank, collect(worker))

    def receive() -> Any:
        turns = iter(range(len(sent[0])))
        return lambda mine: [pieces[turn] for turn in [next(turns)] for pieces in sent]

    return [sum_over_workers(branches, held, sizes, blank, receive()) for branches in every]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize("chunk_bytes", [1, 333, 1 << 20])
def test_the_same_bits_on_any_number_of_workers(ranks: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logical, "CHUNK_BYTES", chunk_bytes)
    gradients = leaves(ranks, 0)
    expected = [array.tobytes() for array in by_workers(gradients, 1)[0]]
    for workers in range(1, ranks + 1):
        for sums in by_workers(gradients, workers):
            assert [array.tobytes() for array in sums] == expected, workers
    exact = [sum(array.astype(np.float64) for array in arrays) for arrays in zip(*gradients, strict=True)]
    scale = [sum(abs(array.astype(np.float64)) for array in arrays) for arrays in zip(*gradients, strict=True)]
    for array, total, size in zip(by_workers(gradients, ranks)[0], exact, scale, strict=True):
        assert np.all(np.abs(array - total) <= 1e-6 * size)


@pytest.mark.parametrize("seed", range(10))
def test_ranks_without_samples_change_no_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 12))
    absent = frozenset(int(rank) for rank in rng.permutation(ranks)[: rng.integers(1, ranks)])
    gradients = leaves(ranks, seed)
    expected = [array.tobytes() for array in by_workers(gradients, 1, absent)[0]]
    for workers in range(1, ranks + 1):
        for sums in by_workers(gradients, workers, absent):
            assert [array.tobytes() for array in sums] == expected


def test_the_order_matters_to_these_numbers() -> None:
    """Else the tests above would show nothing."""
    gradients = [arrays[0] for arrays in leaves(8, 0)]
    in_order = gradients[0].copy()
    for array in gradients[1:]:
        in_order += array
    tree = tree_sum({(0, rank): array for rank, array in enumerate(gradients)}, 8)
    assert tree.tobytes() != in_order.tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 100])
def test_few_gradients_are_held_at_a_time(ranks: int) -> None:
    branches = Branches()
    most = 0
    for rank in range(ranks):
        branches.add(rank, [np.ones(1)])
        most = max(most, len(branches.nodes))
    assert most <= ranks.bit_length()
    assert sum(float(arrays[0][0]) for arrays in branches.nodes.values()) == ranks


def test_what_is_told_of_a_step_keeps_every_bit() -> None:
    part = Part()
    part.nodes = [(0, 3), (2, 1)]
    part.used = bytes([1, 0, 1])
    part.losses = {3: (5, 0.1 + 0.2), 4: (1, float("inf"))}
    part.squares = {3: 1e-300}
    again = Part.decode(part.encode())
    assert (again.nodes, again.used, again.losses, again.squares) == (part.nodes, part.used, part.losses, part.squares)


def test_two_workers_with_the_same_rank_are_found_out() -> None:
    parts = [Part(), Part()]
    parts[0].losses = {0: (1, 0.0), 1: (1, 0.0)}
    parts[1].losses = {1: (1, 0.0)}
    with pytest.raises(StateError, match="logical rank 1 was taken by worker 0 and by worker 1"):
        check_blocks(parts)


def test_random_streams_differ_and_repeat() -> None:
    one, other = Streams(7, 0), Streams(7, 0)
    keys = {one.key(rank, micro) for rank in range(4) for micro in range(3)}
    one.step()
    keys |= {one.key(rank, micro) for rank in range(4) for micro in range(3)}
    assert len(keys) == 24
    assert Streams(8, 0).key(0, 0) not in keys
    other.step()
    assert one.key(2, 1) == other.key(2, 1) == Streams(7, 1).key(2, 1)
