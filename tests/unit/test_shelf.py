"""Which buffer may be written when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edl.checkpoint.memory.buffer_table import MOST_BUFFERS, Refusal, Room, Shelf, Stream, Use
from edl.types import NodeId
from edl.wire.messages import Holding, Version

KIB = 1024
STATE = Stream.of_worker(0, "state")
OWN = Stream.of_worker(0, "own")
REPLICA = Stream.of_node(NodeId("b"), 0)


def v(commit: int) -> Holding:
    return Holding(Version(1, commit))


def room(shelf: Shelf, size: int = 4 * KIB, stream: Stream = STATE, *, keep: bool = False) -> Room:
    found = shelf.room(stream, size, keep_previous=keep)
    assert isinstance(found, Room), found
    return found


def refused(shelf: Shelf, size: int = 4 * KIB, stream: Stream = STATE, *, keep: bool = False) -> Refusal:
    found = shelf.room(stream, size, keep_previous=keep)
    assert isinstance(found, Refusal), found
    return found


def commit(shelf: Shelf, number: int, size: int = 4 * KIB, stream: Stream = STATE, *, keep: bool = False) -> int:
    """Write one snapshot; returns its buffer."""
    got = room(shelf, size, stream, keep=keep)
    assert shelf.may_fill(stream, got.buffer, size) == ""
    shelf.fill(stream, size, v(number))
    return got.buffer


def commits(shelf: Shelf, stream: Stream = STATE) -> list[int]:
    return [held.holding.version.commit for held in shelf.held(stream)]


def test_two_buffers_take_turns() -> None:
    shelf = Shelf(1 << 20)
    first, second, third = (commit(shelf, number) for number in (1, 2, 3))
    assert (first, first != second) == (third, True)
    assert commits(shelf)[0] == 3


def test_the_newest_is_never_handed_out() -> None:
    shelf = Shelf(1 << 20)
    newest = commit(shelf, 1)
    assert room(shelf).buffer != newest
    assert commits(shelf) == [1]


def test_the_same_buffer_until_it_is_filled() -> None:
    shelf = Shelf(1 << 20)
    first = room(shelf)
    assert room(shelf) == Room(first.buffer, first.capacity, new=False)


def test_a_writer_that_dies_leaves_the_newest_and_frees_its_buffer() -> None:
    shelf = Shelf(1 << 20)
    commit(shelf, 1)
    half = room(shelf).buffer
    shelf.abandon(STATE)
    assert commits(shelf) == [1]
    assert shelf.may_fill(STATE, half, 4 * KIB) != ""
    assert room(shelf).buffer == half


def test_what_was_being_overwritten_is_not_held_any_more() -> None:
    shelf = Shelf(1 << 20)
    for number in (1, 2):
        commit(shelf, number)
    room(shelf)
    shelf.abandon(STATE)
    assert commits(shelf) == [2]


def test_what_is_read_is_not_written() -> None:
    shelf = Shelf(1 << 20)
    read = commit(shelf, 1)
    shelf.pin(read)
    others = [commit(shelf, number) for number in (2, 3, 4)]
    assert read not in others
    assert len(set(others)) == MOST_BUFFERS - 1
    shelf.unpin(read)
    assert shelf.usage().workers <= MOST_BUFFERS * 8 * KIB


def test_with_all_being_read_there_is_one_later() -> None:
    shelf = Shelf(1 << 20)
    for number in (1, 2):
        shelf.pin(commit(shelf, number))
    commit(shelf, 3)
    assert refused(shelf).later
    assert commits(shelf)[0] == 3
    shelf.unpin(1)
    assert room(shelf).buffer == 1


def test_the_one_before_is_kept_where_it_is_needed() -> None:
    shelf = Shelf(1 << 20)
    for number in range(1, 6):
        commit(shelf, number, keep=True)
        room(shelf, keep=True)
        assert commits(shelf) == [number, number - 1][:number]
    assert shelf.usage().workers == 3 * 8 * KIB


def test_the_one_before_is_given_up_when_memory_is_short() -> None:
    shelf = Shelf(16 * KIB)
    for number in (1, 2, 3):
        commit(shelf, number, keep=True)
    room(shelf, keep=True)
    assert commits(shelf) == [3]


def test_a_larger_state_gets_larger_buffers_and_the_small_ones_go() -> None:
    shelf = Shelf(1 << 20)
    small = {commit(shelf, 1), commit(shelf, 2)}
    large = {commit(shelf, 3, 400 * KIB), commit(shelf, 4, 400 * KIB)}
    assert not small & large
    assert set(shelf.collect()) == small
    assert commits(shelf) == [4, 3]


def test_a_state_that_became_small_gives_memory_back() -> None:
    shelf = Shelf(1 << 21)
    for number in (1, 2):
        commit(shelf, number, 900 * KIB)
    for number in (3, 4, 5):
        commit(shelf, number, 4 * KIB)
    assert shelf.usage().workers < 100 * KIB


def test_a_refusal_says_the_numbers_and_what_to_do() -> None:
    shelf = Shelf(64 * KIB)
    commit(shelf, 1, 16 * KIB)
    commit(shelf, 1, 16 * KIB, REPLICA)
    said = refused(shelf, 40 * KIB)
    assert said.why == (
        "slot 0 (stream state) asks for 44 KiB; of 64 KiB (--state-memory) workers use 20 KiB, copies of other nodes "
        "20 KiB, loaded state 0 KiB. Raise --state-memory, or keep this state in storage only, with save()"
    )
    assert not said.later
    assert commits(shelf) == [1]


def test_unneeded_buffers_of_others_go_first() -> None:
    shelf = Shelf(40 * KIB)
    for number in (1, 2):
        commit(shelf, number, stream=REPLICA)
    room(shelf, stream=REPLICA)
    shelf.abandon(REPLICA)
    commit(shelf, 1, 28 * KIB)
    assert commits(shelf, REPLICA) == [2]
    assert shelf.usage().replicas == 8 * KIB


def test_what_is_dropped_while_it_is_read_goes_later() -> None:
    shelf = Shelf(1 << 20)
    buffer = commit(shelf, 1, stream=REPLICA)
    shelf.pin(buffer)
    shelf.drop(REPLICA)
    assert (shelf.held(REPLICA), shelf.collect(), shelf.has(buffer)) == ((), (), False)
    assert shelf.usage().replicas > 0
    shelf.unpin(buffer)
    assert shelf.collect() == (buffer,)
    assert shelf.usage().total == 0


def test_forgetting_the_newest_brings_back_the_one_before() -> None:
    shelf = Shelf(1 << 20)
    for number in (1, 2):
        commit(shelf, number, keep=True)
    shelf.forget(STATE, Version(1, 2))
    assert commits(shelf) == [1]
    commit(shelf, 3, keep=True)
    assert commits(shelf) == [3, 1]


def test_a_copy_that_never_came_leaves_nothing() -> None:
    shelf = Shelf(1 << 20)
    room(shelf, stream=REPLICA)
    shelf.abandon(REPLICA)
    assert shelf.usage().total == 0
    assert shelf.streams(Use.REPLICA) == ()


def test_memory_that_could_not_be_had_is_forgotten() -> None:
    shelf = Shelf(1 << 20)
    commit(shelf, 1)
    got = room(shelf)
    assert got.new
    shelf.remove(got.buffer)
    assert commits(shelf) == [1]
    assert shelf.usage().workers == 8 * KIB


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["room", "fill", "abandon", "pin", "unpin", "drop"]),
        st.sampled_from([STATE, OWN, REPLICA]),
        st.integers(1, 30),
    ),
    max_size=60,
)


@given(STEPS, st.booleans(), st.integers(40, 300))
def test_no_order_of_events_spoils_what_is_held_or_read(
    steps: list[tuple[str, Stream, int]], keep: bool, limit_kib: int
) -> None:
    shelf = Shelf(limit_kib * KIB)
    writing: dict[Stream, tuple[int, int]] = {}
    newest: dict[Stream, tuple[int, int]] = {}  # buffer, commit
    pinned: list[int] = []
    for number, (what, stream, size_kib) in enumerate(steps, 1):
        size = size_kib * KIB
        match what:
            case "room":
                found = shelf.room(stream, size, keep_previous=keep)
                if isinstance(found, Room):
                    assert found.capacity >= size
                    assert found.buffer not in [*pinned, *(buffer for buffer, _ in newest.values())]
                    others = [buffer for other, (buffer, _) in writing.items() if other != stream]
                    assert found.buffer not in others
                    writing[stream] = (found.buffer, size)
                else:
                    writing.pop(stream, None)
            case "fill" if stream in writing:
                buffer, size = writing.pop(stream)
                assert shelf.may_fill(stream, buffer, size) == ""
                shelf.fill(stream, size, v(number))
                newest[stream] = (buffer, number)
            case "abandon":
                shelf.abandon(stream)
                writing.pop(stream, None)
            case "pin" if stream in newest:
                shelf.pin(newest[stream][0])
                pinned.append(newest[stream][0])
            case "unpin" if pinned:
                shelf.unpin(pinned.pop(size_kib % len(pinned)))
            case "drop" if stream is REPLICA:
                shelf.drop(stream)
                writing.pop(stream, None)
                newest.pop(stream, None)
        freed = shelf.collect()
        assert not set(freed) & {*pinned, *(buffer for buffer, _ in newest.values())}
        assert shelf.usage().total <= limit_kib * KIB
        for one, (buffer, told) in newest.items():
            held = shelf.newest(one)
            assert held is not None
            assert (held.buffer, held.holding) == (buffer, v(told))
