"""The lease machine, message by message."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.leases.chunked_values import PART_BYTES, ChunkedValues
from data_service.leases.machine import LeaseMachine
from data_service.leases.shard_order import ShardOrder
from data_service.leases.throughput import scaled
from data_service.ledger import Ledger
from data_service.manifest import Manifest
from data_service.protocol import messages
from data_service.protocol.messages import (
    Ack,
    Commit,
    DataRefused,
    DataSetOptions,
    Done,
    Lease,
    LeasesGranted,
    NextEpoch,
    Open,
    Opened,
    RegisterFiles,
)
from edl.errors import DataError, ProtocolError
from edl.master.service import (
    AddToHistory,
    Caller,
    Keep,
    ReportFlaw,
    Said,
    TellWorker,
    Tick,
    WakeAt,
    WorldBegan,
    WorldEnded,
)
from edl.rendezvous.phrases import duration
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Member, World
from edl.wire.status import ServiceShare
from tests.unit.data_service.test_manifest import small

W = TypeVar("W")
NAME = "train"
PLAIN = DataSetOptions(shuffle=False)


def world_of(number: int, slots: list[int]) -> World:
    """Nodes with so many slots each."""
    members, first = [], 0
    for node, count in enumerate(slots):
        members.append(Member(NodeId(f"n{node}"), Incarnation(1), "host", count, Rank(first), (1,)))
        first += count
    return World(Round(number), tuple(members), 0)


def caller(rank: int) -> Caller:
    return Caller(NodeId(f"n{rank}"), 0)


class Rule:
    """A machine under test, with one worker on each node; what it says last to whom."""

    def __init__(self, ranks: int = 2, kept: dict[str, bytes] | None = None, taken_over: bool = False) -> None:
        self.machine = LeaseMachine()
        self.kept = dict(kept or {})
        self.notes: list[str] = []
        self.flaws: dict[str, str] = {}
        self.received: dict[Caller, messages.DataMessage] = {}
        self.wakes: list[float] = []
        self.now_s = 100.0
        self.ids = 0
        self.round = 0
        self.do(self.machine.load(self.kept, self.now_s))
        self.begin(ranks, taken_over)

    def begin(self, ranks: int, taken_over: bool = False) -> None:
        self.round += 1
        self.world: World = world_of(self.round, [1] * ranks)
        self.do(self.machine.step(WorldBegan(self.world, taken_over), self.now_s))

    def do(self, effects: tuple[object, ...]) -> None:
        self.received = {}
        for effect in effects:
            match effect:
                case Keep(name, value):
                    self.kept[name] = value
                    if not value:
                        del self.kept[name]
                case TellWorker(to, body):
                    self.received[to] = messages.decode(body)
                case AddToHistory(text):
                    self.notes.append(text)
                case ReportFlaw(name, text):
                    self.flaws[name] = text
                case WakeAt(at_s):
                    self.wakes.append(at_s)

    def body(self, rank: int, body: str, round: int | None = None) -> messages.DataMessage | None:
        number = Round(self.round if round is None else round)
        self.do(self.machine.step(Said(caller(rank), number, body), self.now_s))
        return self.received.get(caller(rank))

    def say(
        self, rank: int, kind: type[Any], *values: Any, round: int | None = None, **named: Any
    ) -> messages.DataMessage | None:
        self.ids += 1
        return self.body(rank, messages.encode(kind(self.ids, NAME, *values, **named)), round)

    def get(self, kind: type[W], rank: int, word: type[Any], *values: Any, **named: Any) -> W:
        """The answer, which must be of this kind."""
        answer = self.say(rank, word, *values, **named)
        assert isinstance(answer, kind), answer
        return answer

    def start(self, options: DataSetOptions = PLAIN, manifest: Manifest | None = None) -> Rule:
        self.get(messages.FilesRegistered, 0, RegisterFiles, (manifest or small()).encode(), options)
        for rank in range(self.world.size):
            self.get(Opened, rank, Open, rank)
        return self

    def wait(self, for_s: float) -> None:
        self.now_s += for_s
        self.do(self.machine.step(Tick(), self.now_s))

    def lease(self, rank: int, want: int = 1, epoch: int = 0, **reports: Any) -> LeasesGranted:
        return self.get(LeasesGranted, rank, Lease, epoch, want, **reports)

    @property
    def text(self) -> str:
        return self.machine.report()[0].text


def numbers(granted: LeasesGranted) -> list[int]:
    return [given.shard.index for given in granted.leases]


class TestSteps:
    def test_which_nodes_read(self) -> None:
        rule = Rule()
        rule.get(messages.FilesRegistered, 0, RegisterFiles, small().encode(), PLAIN)
        assert rule.machine.report()[0].shares == ()
        rule.start()
        rule.lease(0, 5)
        rule.lease(1, 5)
        rule.lease(0, 5, finished=((0, 4),))
        assert rule.machine.report()[0].shares == (ServiceShare("n0", 1, 1, 4), ServiceShare("n1", 1, 1, 0))

    def test_an_epoch(self) -> None:
        rule = Rule().start()
        assert numbers(rule.lease(0, 5)) == [0]  # guided: at most a fourth of four
        assert numbers(rule.lease(1, 5)) == [1]
        assert numbers(rule.lease(0, 5, finished=((0, 4),))) == [2]
        assert numbers(rule.lease(1, 5)) == [3]
        dry = rule.lease(1, 5, finished=((1, 4), (3, 4)))
        assert (dry.leases, dry.state) == ((), "dry")
        assert rule.lease(0, 5, finished=((2, 2),)).state == "finished"
        assert rule.text == (
            "train: epoch 0, 4 of 4 shards done, 14 records/s, finished, slowest worker at 75% of the fastest"
        )
        assert isinstance(rule.say(0, NextEpoch, 1), Done)
        assert numbers(rule.lease(1, 1, epoch=1)) == [0]

    @pytest.mark.parametrize(("shards", "first"), [(40, 10), (41, 11), (4, 1), (1, 1)])
    def test_nobody_gets_more_than_half_of_an_even_share_at_once(self, shards: int, first: int) -> None:
        """Else the last workers to ask would get nothing while others have hours of work ahead."""
        rule = Rule().start(manifest=small(sizes=(4 * shards,)))
        left = shards - len(rule.lease(0, 1000).leases)
        assert shards - left == first
        if left:
            assert len(rule.lease(1, 2).leases) == min(2, -(-left // 4))
            assert rule.lease(1, 0).leases == ()

    def test_open_waits_for_the_registration_and_a_lease_for_the_ledger(self) -> None:
        rule = Rule()
        assert rule.say(1, Open, 1) is None
        rule.get(messages.FilesRegistered, 0, RegisterFiles, small().encode(), PLAIN)
        assert isinstance(rule.received[caller(1)], Opened)
        assert rule.say(1, Lease, 0, 1) is None
        rule.get(Opened, 0, Open, 0)
        assert isinstance(rule.received[caller(1)], LeasesGranted)

    def test_a_lease_of_the_next_epoch_waits_for_it(self) -> None:
        rule = Rule(1).start(manifest=small(sizes=(2,)))
        rule.lease(0)
        rule.lease(0, 0, finished=((0, 2),))
        assert rule.say(0, Lease, 1, 1) is None
        rule.say(0, NextEpoch, 1)
        assert isinstance(rule.received[caller(0)], Done)
        assert numbers(rule.lease(0, 1, epoch=1)) == [0]
        refused = rule.get(DataRefused, 0, Lease, 3, 1)
        assert refused.kind == "epoch"

    def test_a_round_begins_with_rank_0s_ledger(self) -> None:
        rule = Rule().start()
        rule.lease(0)
        rule.lease(1)
        ledger = Ledger.of(small(), shuffle=False)
        ledger.take(0, 4, True)
        ledger.take(2, 1, False)
        rule.begin(1)
        rule.get(Opened, 0, Open, 0, ledger=ledger.encode())
        granted = [given for _ in range(3) for given in rule.lease(0, 5).leases]
        assert [(given.shard.index, given.upto) for given in granted] == [(2, 1), (1, 0), (3, 0)]

    def test_after_a_new_master_all_must_open_before_anything_is_granted(self) -> None:
        kept = Rule().start().kept
        rule = Rule(3, kept, taken_over=True)
        ledger = Ledger.of(small(), shuffle=False)
        ledger.take(0, 4, True)
        rule.get(Opened, 0, Open, 0, ledger=ledger.encode(), granted=((0, 1),), finished=((0, 1),))
        assert rule.say(0, Lease, 0, 4) is None
        rule.get(Opened, 1, Open, 1, granted=((1, 2),), returned=((2, 1),))
        assert caller(0) not in rule.received
        rule.get(Opened, 2, Open, 2)
        granted = rule.received[caller(0)]
        assert isinstance(granted, LeasesGranted)
        assert [(given.shard.index, given.upto) for given in granted.leases] == [(2, 1)]
        assert numbers(rule.lease(2, 4)) == [3]
        assert rule.lease(1, 4, finished=((1, 4),)).state == "dry"

    def test_a_lease_that_never_arrived_goes_back(self) -> None:
        rule = Rule().start()
        rule.lease(0)
        rule.get(Opened, 0, Open, 0, ledger="")
        assert numbers(rule.lease(1)) == [0]

    def test_two_who_claim_one_shard_are_told(self) -> None:
        rule = Rule(2, Rule().start().kept, taken_over=True)
        rule.get(Opened, 0, Open, 0, granted=((1, 2),))
        refused = rule.get(DataRefused, 1, Open, 1, granted=((1, 2),))
        assert refused.kind == "ledger"
        assert "shard 1 is leased to worker 0 on n0" in refused.text

    def test_an_epoch_may_end_with_some_dropped(self) -> None:
        rule = Rule().start()
        rule.lease(0)
        refused = rule.get(DataRefused, 0, NextEpoch, 1)
        assert refused.text == (
            "epoch 0 of train is not finished: 3 shards pending, 1 leased (worker 0 on n0). Finish it, or state how "
            "many records are dropped"
        )
        rule.get(Done, 0, NextEpoch, 1, 14)
        assert rule.notes[-1] == "data train: epoch 0 ends, dropping 14 records by its rule (4 shards not finished)"
        assert rule.lease(1, 1, epoch=0).state == "finished"

    def test_a_request_said_twice_is_done_once(self) -> None:
        rule = Rule().start()
        text = messages.encode(Lease(50, NAME, 0, 1))
        first = rule.body(0, text)
        assert rule.body(0, text) == first
        assert numbers(rule.lease(1)) == [1]
        refused = rule.body(0, messages.encode(Lease(49, NAME, 0, 1)))
        assert isinstance(refused, DataRefused)
        assert (refused.kind, refused.last) == ("old", 50)
        other = rule.body(0, messages.encode(Lease(50, NAME, 0, 2)))
        assert isinstance(other, DataRefused)


class TestPoison:
    def test_it_goes_to_others_first_and_then_it_is_left_out(self) -> None:
        rule = Rule(2).start(DataSetOptions(shuffle=False, failures=2), small(sizes=(4, 4)))
        assert numbers(rule.lease(0)) == [0]
        rule.lease(0, 0, failed=((0, 1, "bad magic"),))
        assert rule.notes[-1] == (
            "data train: worker 0 on n0 could not read part-0, 0 to 4 (attempt 1 of 2): bad magic"
        )
        assert numbers(rule.lease(0)) == [1]
        assert rule.lease(0).state == "dry"
        granted = rule.lease(1)
        assert [(given.shard.index, given.upto) for given in granted.leases] == [(0, 1)]
        rule.lease(1, 0, failed=((0, 1, "bad magic"),))
        assert rule.flaws == {
            "data/train": "data train: 1 shard skipped as unreadable: part-0 0-4 after 1 record. "
            "worker 0 on n0: bad magic"
        }
        assert rule.lease(1, 1, epoch=0).state == "dry"
        assert rule.lease(0, 0, finished=((1, 4),)).state == "finished"
        after = Rule(2, rule.kept, taken_over=True)
        assert after.flaws == rule.flaws
        assert after.get(Opened, 0, Open, 0).quarantined == ((0, 1),)

    def test_who_failed_gets_it_again_if_nobody_else_asks(self) -> None:
        rule = Rule(2).start(manifest=small(sizes=(4,)))
        rule.lease(0)
        assert rule.lease(0, 1, failed=((0, 0, "x"),)).state == "dry"
        rule.now_s += 6.0
        assert numbers(rule.lease(0)) == [0]


class TestRefusals:
    def test_another_round(self) -> None:
        rule = Rule().start()
        refused = rule.say(0, Lease, 0, 1, round=0)
        assert isinstance(refused, DataRefused)
        assert (refused.kind, refused.text) == (
            "stale",
            "train: request from round 0; the current world is that of round 1. Wait for the next round and open again",
        )
        rule.do(rule.machine.step(WorldEnded(Round(1), "over"), 1.0))
        refused = rule.say(0, Lease, 0, 1)
        assert isinstance(refused, DataRefused)
        assert "there is no world at present" in refused.text

    def test_a_shard_of_another_worker(self) -> None:
        rule = Rule().start()
        rule.lease(0)
        granted = rule.lease(1, 0, finished=((0, 4), (3, 4), (99, 1)))
        assert granted.refused == (
            (0, "shard 0 is leased to worker 0 on n0, not to worker 0 on n1"),
            (3, "shard 3 is pending, not leased to worker 0 on n1"),
            (99, "there is no shard 99; there are 4"),
        )
        wrong = rule.lease(0, 0, finished=((0, 3),))
        assert wrong.refused == ((0, "shard 0 (part-0, 0 to 4) has 4 records, not 3"),)

    def test_other_files_while_in_use(self) -> None:
        rule = Rule().start()
        refused = rule.get(DataRefused, 0, RegisterFiles, small(sizes=(10,)).encode(), DataSetOptions(seed=5))
        assert refused.kind == "differs"
        assert "1 file removed: part-1; seed=5 instead of 0; shuffle=True instead of False" in refused.text
        rule.get(messages.FilesRegistered, 0, RegisterFiles, small().encode(), PLAIN)
        rule.begin(1)
        rule.get(messages.FilesRegistered, 0, RegisterFiles, small(sizes=(10,)).encode(), PLAIN)
        old = Ledger.of(small(), shuffle=False).encode()
        refused = rule.get(DataRefused, 0, Open, 0, ledger=old)
        assert refused.kind == "ledger"
        assert "(1 file removed: part-1)" in refused.text

    @pytest.mark.parametrize(
        ("rank", "word", "values", "kind"),
        [
            (1, RegisterFiles, (small().encode(), PLAIN), "rank"),
            (0, RegisterFiles, (b"junk", PLAIN), "malformed"),
            (1, NextEpoch, (1,), "rank"),
            (0, NextEpoch, (5,), "epoch"),
            (0, Open, (1,), "rank"),
            (0, Open, (0, 0, "", "abc"), "differs"),
            (0, Open, (0, 0, "", "", ((7, 9),)), "malformed"),
            (0, Ack, (0, ()), "mode"),
            (0, Commit, ("a",), "mode"),
        ],
    )
    def test_what_cannot_be(self, rank: int, word: type[Any], values: tuple[Any, ...], kind: str) -> None:
        refused = Rule().start().get(DataRefused, rank, word, *values)
        assert refused.kind == kind
        assert NAME in refused.text or word is RegisterFiles

    def test_unknown_data_and_who_has_not_opened(self) -> None:
        rule = Rule()
        assert rule.get(DataRefused, 0, Lease, 0, 1).kind == "unknown"
        rule.get(messages.FilesRegistered, 0, RegisterFiles, small().encode(), PLAIN)
        assert rule.get(DataRefused, 0, Lease, 0, 1).kind == "unopened"

    @pytest.mark.slow
    @given(
        st.text(max_size=40)
        | st.recursive(
            st.none() | st.integers() | st.text(max_size=5), lambda one: st.lists(one) | st.dictionaries(st.text(), one)
        ).map(json.dumps)
    )
    def test_nonsense_is_answered(self, body: str) -> None:
        refused = Rule(1).body(0, body)
        assert isinstance(refused, DataRefused)
        assert refused.kind == "malformed"

    @given(
        st.sampled_from(["register", "open", "lease", "nextepoch", "ack", "commit", "rollback", "gone", "granted"]),
        st.dictionaries(
            st.sampled_from(
                ["id", "dataset", "rank", "epoch", "want", "finished", "failed", "granted", "ledger", "acks"]
            ),
            st.integers() | st.text(max_size=9) | st.lists(st.lists(st.integers(), max_size=3), max_size=3),
        ),
    )
    def test_half_right_messages_raise_nothing(self, word: str, fields: dict[str, Any]) -> None:
        body = {"word": word, "id": 7, "dataset": NAME, "rank": 0, "epoch": 0, "want": 1, "name": "x", **fields}
        Rule(1).start().body(0, json.dumps(body))


class TestFree:
    def started(self) -> Rule:
        return Rule().start(DataSetOptions(shuffle=False, mode="free"))

    def test_acknowledged_is_kept_and_said_again(self) -> None:
        rule = self.started()
        rule.lease(0, 1)
        done = rule.get(Done, 0, Ack, 0, ((0, 2, False),))
        assert done.number > done.kept
        rule.wait(1.0)
        done = rule.get(Done, 0, Ack, 0, ((0, 4, True),))
        assert (done.number, done.kept) == (2, 1)
        after = Rule(2, rule.kept, taken_over=True)
        after.get(Opened, 0, Open, 0, acks=((0, 4, True),))
        after.get(Opened, 1, Open, 1)
        assert after.machine.sets[NAME].position.ledger.is_done(0)

    def test_the_dead_and_the_silent_give_back(self) -> None:
        rule = self.started()
        assert numbers(rule.lease(1, 1)) == [0]
        rule.begin(1)
        rule.get(Opened, 0, Open, 0)
        assert numbers(rule.lease(0, 1)) == [0]
        rule.wait(29.0)
        rule.wait(1.5)
        assert "worker 0 on n0 has not reported on its leases for 30 s; 1 shard returned to the queue" in rule.notes[-1]
        late = rule.get(Done, 0, Ack, 0, ((0, 4, True),))
        assert late.refused == ((0, "shard 0 is pending, not leased to worker 0 on n0"),)

    def test_back_to_a_name(self) -> None:
        rule = self.started()
        rule.lease(0, 1)
        rule.get(Done, 0, Ack, 0, ((0, 2, False),))
        rule.get(Done, 0, Commit, "one")
        rule.get(Done, 0, Ack, 0, ((0, 4, True),))
        assert rule.get(DataRefused, 0, messages.Rollback, "two").text.startswith(
            "train has no position named two; it has one"
        )
        rule.get(Done, 0, messages.Rollback, "one")
        assert rule.get(DataRefused, 0, Ack, 0, ((0, 4, True),)).kind == "unopened"
        opened = rule.get(Opened, 0, Open, 0, granted=((0, 1),))
        assert (opened.fence, [shard for shard, _ in opened.refused]) == (1, [0])
        assert rule.lease(0, 1).leases[0].upto == 2
        after = Rule(2, rule.kept, taken_over=True)
        assert list(after.machine.sets[NAME].independent.commits) == ["one"]

    def test_what_was_leased_before_a_rollback_counts_no_more(self) -> None:
        rule = self.started()
        rule.get(Done, 0, Commit, "nothing")
        rule.lease(0, 1)
        rule.get(Done, 0, Ack, 0, ((0, 2, False),))
        rule.get(Done, 1, messages.Rollback, "nothing")
        opened = rule.get(Opened, 0, Open, 0, granted=((0, 1),), acks=((0, 2, False),), fence=0)
        assert [shard for shard, _ in opened.refused] == [0]
        assert rule.machine.sets[NAME].position.ledger.count(0) == 0

    def test_gone_gives_back_at_once(self) -> None:
        rule = self.started()
        rule.lease(0, 1)
        rule.get(Done, 0, messages.Gone)
        assert numbers(rule.lease(1, 1)) == [0]


def test_messages_survive_encoding() -> None:
    words: list[messages.DataMessage] = [
        RegisterFiles(1, NAME, b"\0\1", PLAIN),
        Open(2, NAME, 3, 1, "x", "d", ((1, 2),), ((1, 2),), ((3, 4),), ((1, 2, True),), 5),
        Lease(3, NAME, 0, 9, ((1, 2),), ((3, 4, "why"),)),
        LeasesGranted(4, NAME, 0, (messages.Given(small().ref(2), 1),), "more", ((1, "no"),), 1, 2),
        DataRefused(5, NAME, "old", "text", 9),
    ]
    assert [messages.decode(messages.encode(word)) for word in words] == words
    assert messages.ranges([5, 1, 2, 3]) == ((1, 4), (5, 6))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"word":"lease","id":1,"dataset":"a","epoch":0,"want":-1}', r"data \(lease\): want=-1: Expected `int` >= 0"),
        ('{"word":"lease","id":1,"dataset":"a b","epoch":0,"want":1}', r"dataset=a b: Expected `str` matching regex"),
        ('{"word":"ack","id":1,"dataset":"a","epoch":0,"shards":[[1,2]]}', r"shards\[0\]=\[1, 2\]: Expected `array`"),
        ('{"word":"open","id":1,"dataset":"a","rank":0,"granted":[[5,7],[6,8]]}', "granted: ranges must rise"),
        ('{"word":"register","id":1,"dataset":"a","manifest":"!","options":{}}', "manifest=!: Invalid base64"),
        ('{"word":"register","id":1,"dataset":"a","manifest":"","options":{"mode":"x"}}', r"options\.mode=x"),
        (
            '{"word":"granted","id":1,"dataset":"a","epoch":0,"leases":[],"state":"more"}',
            "required field `rows`",
        ),
        ('{"word":"other"}', "word=other is none of its kinds"),
        ("[]", "not a message about data"),
    ],
)
def test_what_is_no_message_is_named(text: str, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        messages.decode(text)


@given(st.integers(1, 60), st.integers(0, 5), st.booleans(), st.data())
def test_an_order_gives_each_fresh_shard_once(shards: int, seed: int, shuffle: bool, data: st.DataObject) -> None:
    states = bytearray(data.draw(st.lists(st.sampled_from([0, 3]), min_size=shards, max_size=shards)))
    fresh = {shard for shard, state in enumerate(states) if state == 0}
    order = ShardOrder(shards, seed, 0, shuffle, shards - len(fresh))
    found = []
    for _ in range(len(fresh)):
        found.append(order.next(states))
        states[found[-1]] = 2
    assert sorted(found) == sorted(fresh)


def test_an_order_comes_back_to_what_was_left_behind() -> None:
    states = bytearray([3]) * 60_000
    for shard in (7, 59_999):
        states[shard] = 0
    order = ShardOrder(60_000, 1, 0, True, 59_998)
    first = order.next(states)
    states[first] = 2
    assert {first, order.next(states)} == {7, 59_999}


def carry_out(writes: list[Keep], store: dict[str, bytes]) -> None:
    for keep in writes:
        store[keep.name] = keep.value
        if not keep.value:
            del store[keep.name]


def test_long_values_are_kept_in_parts() -> None:
    chunked, store = ChunkedValues(), dict[str, bytes]()
    long = b"x" * (2 * PART_BYTES + 5)
    for value in (long, long, b"short", b"y" * PART_BYTES):
        carry_out(chunked.put("a", value), store)
        assert ChunkedValues().get(store, "a") == value
        assert max(map(len, store.values())) <= PART_BYTES + 1
    part = next(name for name in store if name != "a")
    store[part] = store[part].replace(b"y", b"z", 1)
    with pytest.raises(DataError, match="is damaged"):
        ChunkedValues().get(store, "a")
    del store[part]
    with pytest.raises(DataError, match="is incomplete"):
        ChunkedValues().get(store, "a")


@pytest.mark.parametrize("by_another", [False, True])
def test_nothing_of_a_long_value_stays_once_it_is_replaced_or_dropped(by_another: bool) -> None:
    def reader() -> ChunkedValues:
        """The writer, or the Master that reads the store after it."""
        after = ChunkedValues() if by_another else chunked
        after.get(store, "a")
        return after

    chunked, store = ChunkedValues(), dict[str, bytes]()
    carry_out(chunked.put("a", b"x" * (2 * PART_BYTES)), store)
    carry_out(reader().put("a", b"short"), store)
    assert list(store) == ["a"]
    carry_out(chunked.put("a", b"x" * (2 * PART_BYTES)), store)
    carry_out(reader().drop("a"), store)
    assert not store


def test_numbers_for_people() -> None:
    assert [scaled(n) for n in (0, 7.5, 870, 1200, 1_240_000, 3.6e11)] == ["0", "7.5", "870", "1.2 k", "1.2 M", "360 G"]
    assert [duration(s) for s in (0.2, 40, 180, 7500, 3e5)] == ["1 s", "40 s", "3 min", "2 h 5 min", "3 days"]
