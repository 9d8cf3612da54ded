"""Keys of a job in the store, and sizes of the writes."""

from __future__ import annotations

import dataclasses

import pytest

from edl.master.events import HistoryNote, Kind
from edl.master.history import FOLDED, KEPT, JobHistory, folded
from edl.master.service import Keep
from edl.master.state import Phase, Record
from edl.master.stored import (
    MOST_BYTES,
    MOST_OPERATIONS,
    history_operations,
    record_in,
    record_operations,
    service_operations,
    transactions,
    whole_job,
)
from edl.ports import Delete, Operation, Put
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.records import Member, Settings, World

KEYS = JobKeys(JobId("my-job"))


def world(nodes: int, number: int = 1) -> World:
    members = tuple(
        Member(NodeId(f"node-{one}"), Incarnation(one), "10.0.0.1", 1, Rank(one), (5000, 5001, 5002))
        for one in range(nodes)
    )
    return World(Round(number), members, restarts=0)


def applied(values: dict[str, bytes], operations: list[Operation]) -> dict[str, bytes]:
    values = dict(values)
    for operation in operations:
        if isinstance(operation, Put):
            values[operation.key] = operation.value
        else:
            assert isinstance(operation, Delete) and not operation.prefix
            values.pop(operation.key, None)
    return values


def written(operations: list[Operation]) -> int:
    return sum(len(operation.value) for operation in operations if isinstance(operation, Put))


RECORDS = (
    Record(),
    Record(Phase.RUNNING, Round(1), world(3)),
    Record(Phase.RUNNING, Round(1), world(3), done=(NodeId("node-0"),)),
    Record(Phase.FORMING, Round(1), world(3), reason="node-2 was lost"),
    Record(Phase.RUNNING, Round(2), world(2, 2), settings=Settings(global_batch=8)),
    Record(Phase.FORMING, Round(2), None),
)


class TestRecord:
    def test_nothing_is_nothing(self) -> None:
        assert record_in({}, KEYS) is None

    @pytest.mark.parametrize("before", RECORDS)
    @pytest.mark.parametrize("after", RECORDS)
    def test_the_next_master_reads_what_was_written_last(self, before: Record, after: Record) -> None:
        values = applied(applied({}, record_operations(KEYS, None, before)), record_operations(KEYS, before, after))
        assert record_in(values, KEYS) == after

    def test_that_did_not_change_is_not_written(self) -> None:
        assert record_operations(KEYS, RECORDS[1], RECORDS[1]) == []

    def test_of_a_large_world_costs_no_more_than_that_of_a_small_one_until_the_world_changes(self) -> None:
        costs = []
        for nodes in (2, 1000):
            before = Record(Phase.RUNNING, Round(1), world(nodes))
            costs.append(written(record_operations(KEYS, before, dataclasses.replace(before, restarts=1))))
        assert costs[0] == costs[1]

    def test_of_an_older_edl_had_its_world_inside(self) -> None:
        old = Record(Phase.RUNNING, Round(1), world(3))
        assert record_in({KEYS.record: plain.dumps(old)}, KEYS) == old


class TestHistory:
    def test_what_comes_pushes_out_what_is_oldest(self) -> None:
        history = JobHistory()
        entries = [history.make(HistoryNote(Kind.NODE_JOINED, str(one)), 1, 0.0) for one in range(KEPT + 3)]
        history.publish(entries[:KEPT])
        added = entries[KEPT:]
        operations = history_operations(KEYS, history, added)
        gone = [operation.key for operation in operations if isinstance(operation, Delete)]
        assert gone == [KEYS.history_entry(number) for number in (1, 2, 3)]
        assert len(operations) == len(added) + len(gone)

    def test_no_key_is_written_and_deleted_at_once(self) -> None:
        """A transaction of etcd takes each key once."""
        history = JobHistory()
        texts = [f"commit {commit} is complete in /ckpt" for commit in range(3)]
        added = [history.make(HistoryNote(Kind.STATE, text), 1, 0.0) for text in texts]
        assert history_operations(KEYS, history, added) == [Put(KEYS.history_entry(3), plain.dumps(added[2]))]


class TestFolding:
    def test_many_nodes_that_come_together_are_one_line_in_the_place_of_the_first(self) -> None:
        joins = [HistoryNote(Kind.NODE_JOINED, f"node n{one} is ready", f"n{one}") for one in range(FOLDED + 2)]
        other, lost = HistoryNote(Kind.WAITING, "why"), HistoryNote(Kind.NODE_LOST, "node x lost", "x")
        notes = [other, *joins, lost]
        found = folded(notes)
        assert [note.kind for note in found] == [Kind.WAITING, Kind.NODE_JOINED, Kind.NODE_LOST]
        assert found[1].text == "10 nodes are ready: n0, n1, n2, n3, n4, n5, n6, n7 and 2 more"

    def test_those_that_return_are_told_from_those_that_are_new(self) -> None:
        kinds = (Kind.NODE_JOINED, Kind.NODE_RETURNED)
        notes = [HistoryNote(kind, "ready", f"{kind.value}-{one}") for one in range(FOLDED + 1) for kind in kinds]
        begins = [note.text.partition(":")[0] for note in folded(notes)]
        assert begins == ["9 nodes are ready", "9 nodes are ready again"]

    def test_a_few_are_named_one_by_one(self) -> None:
        joins = [HistoryNote(Kind.NODE_JOINED, f"node n{one} is ready", f"n{one}") for one in range(FOLDED)]
        assert folded(joins) == joins


class TestServices:
    def test_of_several_values_for_one_name_the_last_one_is_kept(self) -> None:
        kept = [
            ("data", Keep("a", b"1")),
            ("ckpt", Keep("a", b"2")),
            ("data", Keep("b", b"3")),
            ("data", Keep("a", b"4")),
        ]
        values = applied({}, service_operations(KEYS, kept))
        assert values == {
            KEYS.service("ckpt", "a"): b"2",
            KEYS.service("data", "b"): b"3",
            KEYS.service("data", "a"): b"4",
        }

    def test_an_empty_value_clears_its_name(self) -> None:
        values = {KEYS.service("data", "a"): b"1"}
        assert applied(values, service_operations(KEYS, [("data", Keep("a", b""))])) == {}


class TestTransactions:
    @pytest.mark.parametrize("count", [0, 1, MOST_OPERATIONS, MOST_OPERATIONS + 1, 7 * MOST_OPERATIONS + 3])
    def test_hold_all_in_order_and_no_more_than_the_store_takes(self, count: int) -> None:
        operations: list[Operation] = [Put(str(one), b"x") for one in range(count)]
        pieces = list(transactions(operations))
        assert [operation for piece in pieces for operation in piece] == operations
        assert all(0 < len(piece) <= MOST_OPERATIONS for piece in pieces)
        assert len(pieces) == -(-count // MOST_OPERATIONS)

    def test_of_large_values_hold_fewer(self) -> None:
        operations: list[Operation] = [Put(str(one), bytes(MOST_BYTES // 2)) for one in range(5)]
        assert [len(piece) for piece in transactions(operations)] == [2, 2, 1]

    def test_a_value_that_is_too_large_goes_alone_to_be_refused_alone(self) -> None:
        operations: list[Operation] = [Put("a", b"1"), Put("b", bytes(2 * MOST_BYTES)), Put("c", b"3")]
        assert [len(piece) for piece in transactions(operations)] == [1, 1, 1]


def test_an_ended_job_leaves_no_key_of_its_own() -> None:
    """A later job of the same name must not find what companions and accounts of this one kept."""
    of_launchers = {KEYS.prefix, KEYS.master, KEYS.nodes, KEYS.helpers, KEYS.farewell, KEYS.launchers}
    names = [name for name, one in vars(JobKeys).items() if isinstance(one, property)]
    every = {getattr(KEYS, name) for name in names} - of_launchers
    deleted = [one for one in whole_job(KEYS) if isinstance(one, Delete)]
    assert {one.key for one in deleted} == every
    assert {one.key for one in deleted if one.prefix} == {one for one in every if one.endswith("/")}
