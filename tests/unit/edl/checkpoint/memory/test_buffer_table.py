"""Which buffer may be written when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edl.checkpoint.memory.buffer_table import (
    MOST_BUFFERS,
    BufferRefusal,
    BufferTable,
    SnapshotStream,
    Use,
    WritableBuffer,
)
from edl.types import NodeId
from edl.wire.records import Holding, Version

KIB = 1024
STATE = SnapshotStream.of_worker(0, "state")
OWN = SnapshotStream.of_worker(0, "own")
REPLICA = SnapshotStream.of_node(NodeId("b"), 0)


def v(commit: int) -> Holding:
    return Holding(Version(1, commit))


def room(
    buffer_table: BufferTable, size: int = 4 * KIB, stream: SnapshotStream = STATE, *, keep: bool = False
) -> WritableBuffer:
    found = buffer_table.room(stream, size, keep_previous=keep)
    assert isinstance(found, WritableBuffer), found
    return found


def refused(
    buffer_table: BufferTable, size: int = 4 * KIB, stream: SnapshotStream = STATE, *, keep: bool = False
) -> BufferRefusal:
    found = buffer_table.room(stream, size, keep_previous=keep)
    assert isinstance(found, BufferRefusal), found
    return found


def commit(
    buffer_table: BufferTable, number: int, size: int = 4 * KIB, stream: SnapshotStream = STATE, *, keep: bool = False
) -> int:
    """Write one snapshot; returns its buffer."""
    got = room(buffer_table, size, stream, keep=keep)
    assert buffer_table.may_fill(stream, got.buffer, size) == ""
    buffer_table.fill(stream, size, v(number))
    return got.buffer


def commits(buffer_table: BufferTable, stream: SnapshotStream = STATE) -> list[int]:
    return [held.holding.version.commit for held in buffer_table.held(stream)]


def test_two_buffers_take_turns() -> None:
    buffer_table = BufferTable(1 << 20)
    first, second, third = (commit(buffer_table, number) for number in (1, 2, 3))
    assert (first, first != second) == (third, True)
    assert commits(buffer_table)[0] == 3


def test_the_newest_is_never_handed_out() -> None:
    buffer_table = BufferTable(1 << 20)
    newest = commit(buffer_table, 1)
    assert room(buffer_table).buffer != newest
    assert commits(buffer_table) == [1]


def test_the_same_buffer_until_it_is_filled() -> None:
    buffer_table = BufferTable(1 << 20)
    first = room(buffer_table)
    assert room(buffer_table) == WritableBuffer(first.buffer, first.capacity, new=False)


def test_a_writer_that_dies_leaves_the_newest_and_frees_its_buffer() -> None:
    buffer_table = BufferTable(1 << 20)
    commit(buffer_table, 1)
    half = room(buffer_table).buffer
    buffer_table.abandon(STATE)
    assert commits(buffer_table) == [1]
    assert buffer_table.may_fill(STATE, half, 4 * KIB) != ""
    assert room(buffer_table).buffer == half


def test_what_was_being_overwritten_is_not_held_any_more() -> None:
    buffer_table = BufferTable(1 << 20)
    for number in (1, 2):
        commit(buffer_table, number)
    room(buffer_table)
    buffer_table.abandon(STATE)
    assert commits(buffer_table) == [2]


def test_what_is_read_is_not_written() -> None:
    buffer_table = BufferTable(1 << 20)
    read = commit(buffer_table, 1)
    buffer_table.pin(read)
    others = [commit(buffer_table, number) for number in (2, 3, 4)]
    assert read not in others
    assert len(set(others)) == MOST_BUFFERS - 1
    buffer_table.unpin(read)
    assert buffer_table.usage().workers <= MOST_BUFFERS * 8 * KIB


def test_with_all_being_read_there_is_one_later() -> None:
    buffer_table = BufferTable(1 << 20)
    for number in (1, 2):
        buffer_table.pin(commit(buffer_table, number))
    commit(buffer_table, 3)
    assert refused(buffer_table).later
    assert commits(buffer_table)[0] == 3
    buffer_table.unpin(1)
    assert room(buffer_table).buffer == 1


def test_the_one_before_is_kept_where_it_is_needed() -> None:
    buffer_table = BufferTable(1 << 20)
    for number in range(1, 6):
        commit(buffer_table, number, keep=True)
        room(buffer_table, keep=True)
        assert commits(buffer_table) == [number, number - 1][:number]
    assert buffer_table.usage().workers == 3 * 8 * KIB


def test_the_one_before_is_given_up_when_memory_is_short() -> None:
    buffer_table = BufferTable(16 * KIB)
    for number in (1, 2, 3):
        commit(buffer_table, number, keep=True)
    room(buffer_table, keep=True)
    assert commits(buffer_table) == [3]


def test_a_larger_state_gets_larger_buffers_and_the_small_ones_go() -> None:
    buffer_table = BufferTable(1 << 20)
    small = {commit(buffer_table, 1), commit(buffer_table, 2)}
    large = {commit(buffer_table, 3, 400 * KIB), commit(buffer_table, 4, 400 * KIB)}
    assert not small & large
    assert set(buffer_table.collect()) == small
    assert commits(buffer_table) == [4, 3]


def test_a_state_that_became_small_gives_memory_back() -> None:
    buffer_table = BufferTable(1 << 21)
    for number in (1, 2):
        commit(buffer_table, number, 900 * KIB)
    for number in (3, 4, 5):
        commit(buffer_table, number, 4 * KIB)
    assert buffer_table.usage().workers < 100 * KIB


def test_a_refusal_says_the_numbers_and_what_to_do() -> None:
    buffer_table = BufferTable(64 * KIB)
    commit(buffer_table, 1, 16 * KIB)
    commit(buffer_table, 1, 16 * KIB, REPLICA)
    said = refused(buffer_table, 40 * KIB)
    assert said.why == (
        "slot 0 (stream state) asks for 44 KiB; of 64 KiB (--state-memory) workers use 20 KiB, copies of other nodes "
        "20 KiB, loaded state 0 KiB. Raise --state-memory, or keep this state in storage only, with save()"
    )
    assert not said.later
    assert commits(buffer_table) == [1]


def test_unneeded_buffers_of_others_go_first() -> None:
    buffer_table = BufferTable(40 * KIB)
    for number in (1, 2):
        commit(buffer_table, number, stream=REPLICA)
    room(buffer_table, stream=REPLICA)
    buffer_table.abandon(REPLICA)
    commit(buffer_table, 1, 28 * KIB)
    assert commits(buffer_table, REPLICA) == [2]
    assert buffer_table.usage().replicas == 8 * KIB


def test_what_is_dropped_while_it_is_read_goes_later() -> None:
    buffer_table = BufferTable(1 << 20)
    buffer = commit(buffer_table, 1, stream=REPLICA)
    buffer_table.pin(buffer)
    buffer_table.drop(REPLICA)
    assert (buffer_table.held(REPLICA), buffer_table.collect(), buffer_table.has(buffer)) == ((), (), False)
    assert buffer_table.usage().replicas > 0
    buffer_table.unpin(buffer)
    assert buffer_table.collect() == (buffer,)
    assert buffer_table.usage().total == 0


def test_forgetting_the_newest_brings_back_the_one_before() -> None:
    buffer_table = BufferTable(1 << 20)
    for number in (1, 2):
        commit(buffer_table, number, keep=True)
    buffer_table.forget(STATE, Version(1, 2))
    assert commits(buffer_table) == [1]
    commit(buffer_table, 3, keep=True)
    assert commits(buffer_table) == [3, 1]


def test_a_copy_that_never_came_leaves_nothing() -> None:
    buffer_table = BufferTable(1 << 20)
    room(buffer_table, stream=REPLICA)
    buffer_table.abandon(REPLICA)
    assert buffer_table.usage().total == 0
    assert buffer_table.streams(Use.REPLICA) == ()


def test_memory_that_could_not_be_had_is_forgotten() -> None:
    buffer_table = BufferTable(1 << 20)
    commit(buffer_table, 1)
    got = room(buffer_table)
    assert got.new
    buffer_table.remove(got.buffer)
    assert commits(buffer_table) == [1]
    assert buffer_table.usage().workers == 8 * KIB


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
    steps: list[tuple[str, SnapshotStream, int]], keep: bool, limit_kib: int
) -> None:
    buffer_table = BufferTable(limit_kib * KIB)
    writing: dict[SnapshotStream, tuple[int, int]] = {}
    newest: dict[SnapshotStream, tuple[int, int]] = {}  # buffer, commit
    pinned: list[int] = []
    for number, (what, stream, size_kib) in enumerate(steps, 1):
        size = size_kib * KIB
        match what:
            case "room":
                found = buffer_table.room(stream, size, keep_previous=keep)
                if isinstance(found, WritableBuffer):
                    assert found.capacity >= size
                    assert found.buffer not in [*pinned, *(buffer for buffer, _ in newest.values())]
                    others = [buffer for other, (buffer, _) in writing.items() if other != stream]
                    assert found.buffer not in others
                    writing[stream] = (found.buffer, size)
                else:
                    writing.pop(stream, None)
            case "fill" if stream in writing:
                buffer, size = writing.pop(stream)
                assert buffer_table.may_fill(stream, buffer, size) == ""
                buffer_table.fill(stream, size, v(number))
                newest[stream] = (buffer, number)
            case "abandon":
                buffer_table.abandon(stream)
                writing.pop(stream, None)
            case "pin" if stream in newest:
                buffer_table.pin(newest[stream][0])
                pinned.append(newest[stream][0])
            case "unpin" if pinned:
                buffer_table.unpin(pinned.pop(size_kib % len(pinned)))
            case "drop" if stream is REPLICA:
                buffer_table.drop(stream)
                writing.pop(stream, None)
                newest.pop(stream, None)
        freed = buffer_table.collect()
        assert not set(freed) & {*pinned, *(buffer for buffer, _ in newest.values())}
        assert buffer_table.usage().total <= limit_kib * KIB
        for one, (buffer, commit) in newest.items():
            held = buffer_table.newest(one)
            assert held is not None
            assert (held.buffer, held.holding) == (buffer, v(commit))


def test_an_oldest_snapshot_that_is_read_stays_when_younger_ones_go() -> None:
    """Its size changes, which gives up the previous one, and then the newest turns out to belong to a lost history."""
    buffer_table = BufferTable(64 << 20)
    oldest, *_ = [commit(buffer_table, number, keep=True) for number in (1, 2, 3)]
    buffer_table.pin(oldest)
    room(buffer_table, 16 << 20)
    assert commits(buffer_table) == [3, 1]
    buffer_table.abandon(STATE)
    buffer_table.forget(STATE, v(3).version)
    assert commits(buffer_table) == [1]
