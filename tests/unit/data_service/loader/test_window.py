"""The joint result that all ranks compute from each rank's prepared data."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.loader.window import (
    Offer,
    ShardProgress,
    StepOffer,
    Supply,
    Tail,
    Window,
    decode,
    encode,
    plan,
    tail_named,
)
from edl.errors import DataError, SettingError
from edl.worker.exchange import FIRST_BYTES, exchange

ONE, TWO = ShardProgress(1, 8, False), ShardProgress(2, 5, True)


def ready(*samples: int) -> tuple[StepOffer, ...]:
    return tuple(StepOffer(count, (ShardProgress(count, count, True),)) for count in samples)


offers = st.builds(
    Offer,
    st.lists(
        st.builds(
            StepOffer,
            st.integers(1, 1000),
            st.lists(st.builds(ShardProgress, st.integers(0, 10**6), st.integers(0, 10**9), st.booleans())).map(tuple),
        ),
        max_size=4,
    ).map(tuple),
    st.sampled_from(Supply),
    st.integers(0, 1000),
    st.integers(1, 9),
    st.text(max_size=5),
    st.integers(0, 9),
)


@given(offers)
def test_an_offer_comes_through(offer: Offer) -> None:
    assert decode(encode(offer)) == offer


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'["more",0,1,"",0]', b'["more",0,1,"",0,[[1,2]]]', b'["odd",0,1,"",0,[]]']
)
def test_invalid_offers_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="Do all workers run the same loop"):
        decode(data)


def test_the_window_is_as_long_as_all_can_fill_it() -> None:
    window = plan([Offer(ready(8, 8, 5), Supply.MORE), Offer(ready(8, 7), Supply.DRY)], Tail.PAD)
    assert [step.samples for step in window.steps] == [(8, 8), (8, 7)] and not window.over
    assert window.steps[1].taken == (ShardProgress(8, 8, True), ShardProgress(7, 7, True)), "in the order of the ranks"


@pytest.mark.parametrize(("tail", "samples"), [(Tail.PAD, (8, 6)), (Tail.JOIN, (8, 0))])
def test_one_that_has_nothing_repeats_or_stands_in(tail: Tail, samples: tuple[int, int]) -> None:
    window = plan([Offer(ready(8), Supply.MORE), Offer((), Supply.DRY, spare=6)], tail)
    assert window.steps[0].samples == samples
    assert window.steps[0].own == (True, False) and len(window.steps[0].taken) == 1


def test_dropping_ends_with_the_first_that_has_nothing() -> None:
    assert plan([Offer(ready(8), Supply.MORE), Offer((), Supply.DRY)], Tail.DROP) == Window((), True)
    assert plan([Offer((), Supply.DRY), Offer((), Supply.DRY)], Tail.DROP).over


def test_dropping_ends_nothing_while_one_that_reads_may_get_more() -> None:
    """All have used up what they had ready at once, and the next records of one are on their way."""
    assert plan([Offer((), Supply.DRY), Offer((), Supply.MORE)], Tail.DROP) == Window((), False)


def test_all_know_of_files_that_any_has_heard_of() -> None:
    assert plan([Offer(ready(1), Supply.MORE, version=1), Offer((), Supply.DRY, version=3)], Tail.PAD).version == 3
    assert plan([Offer((), Supply.DRY, version=3), Offer((), Supply.DRY, version=1)], Tail.DROP).version == 3


@pytest.mark.parametrize("tail", [Tail.PAD, Tail.JOIN])
def test_an_epoch_ends_when_the_master_says_so_and_no_worker_has_records(tail: Tail) -> None:
    assert not plan([Offer((), Supply.DRY), Offer((), Supply.DRY)], tail).over
    assert plan([Offer((), Supply.DRY), Offer((), Supply.FINISHED)], tail).over
    assert not plan([Offer(ready(1), Supply.MORE), Offer((), Supply.FINISHED)], tail).over


def test_the_first_pattern_is_everybodys() -> None:
    window = plan([Offer((), Supply.DRY), Offer(ready(1), Supply.MORE, pattern="there")], Tail.PAD)
    assert window.pattern == "there"


def test_steps_cut_differently_are_refused() -> None:
    with pytest.raises(DataError, match=r"different numbers of micro-batches per step: \[1, 2\]"):
        plan([Offer(ready(1), Supply.MORE), Offer(ready(1), Supply.MORE, micros=2)], Tail.PAD)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(SettingError, match="must be one of pad, drop, join"):
        tail_named("cut")


@pytest.mark.parametrize(
    ("sizes", "collectives"), [((0, 5), 1), ((FIRST_BYTES - 4, 1), 1), ((FIRST_BYTES, 9000, 0), 2)]
)
def test_short_messages_take_one_collective(sizes: tuple[int, ...], collectives: int) -> None:
    messages = [bytes([65 + rank]) * size for rank, size in enumerate(sizes)]
    parts: list[list[bytes]] = [[b""] * len(sizes) for _ in range(3)]
    barrier = threading.Barrier(len(sizes))
    made = [0] * len(sizes)

    def run(rank: int) -> list[bytes]:
        def gather(data: bytes) -> list[bytes]:
            round_ = parts[made[rank]]
            made[rank] += 1
            round_[rank] = data
            barrier.wait(10)
            assert len({len(part) for part in round_}) == 1, "equally long on all ranks"
            return round_

        return exchange(messages[rank], gather)

    with ThreadPoolExecutor(len(sizes)) as pool:
        assert list(pool.map(run, range(len(sizes)))) == [messages] * len(sizes)
    assert made == [collectives] * len(sizes)
