"""How data streams are divided among workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.errors import StateError
from edl.integrations.stream_split import StreamSplit

sizes = st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count)))


@given(sizes)
def test_each_stream_belongs_to_one_worker(size: tuple[int, int]) -> None:
    count, world = size
    found = [number for rank in range(world) for number in StreamSplit(count, rank, world).own]
    assert found == list(range(count))


@given(sizes)
def test_a_step_has_as_few_turns_as_possible_and_no_worker_is_idle(size: tuple[int, int]) -> None:
    count, world = size
    lengths = [len(StreamSplit(count, rank, world).own) for rank in range(world)]
    assert min(lengths) >= 1
    assert max(lengths) == StreamSplit(count, 0, world).turns == -(-count // world)


def test_more_workers_than_streams_are_refused_with_both_numbers() -> None:
    with pytest.raises(StateError, match=r"a step has 2 batches .* this world has 3 .* training\.global_batch_size"):
        StreamSplit(2, 0, 3)
