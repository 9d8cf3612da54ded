"""The lease table against a plain model of it: what a shard is, who has it, and what of it is consumed."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from data_service.file_list import ListVersion
from data_service.leases.lease_table import BACK, DONE, LEASED, QUARANTINED, RETRY_WAIT_S, LeaseTable
from data_service.leases.shard_order import FRESH
from data_service.ledger import Ledger
from edl.master.service import Caller
from edl.types import NodeId
from tests.unit.data_service.test_manifest import small

ANN, BOB = Caller(NodeId("a"), 0), Caller(NodeId("b"), 1)
RECORDS = 4
"""Records of each shard."""


def table_of(shards: int, shuffle: bool = False) -> LeaseTable:
    manifest = small(sizes=(RECORDS * shards,))
    return LeaseTable(manifest, Ledger.of(manifest, seed=3, shuffle=shuffle))


@dataclasses.dataclass
class Shard:
    """What is known of one shard, spelled out."""

    status: str = "pending"
    holder: Caller | None = None
    consumed: int = 0


class Model:
    """Both, with the same calls; each answer and all counts are compared."""

    def __init__(self, rng: random.Random, shards: int) -> None:
        self.rng, self.table = rng, table_of(shards, shuffle=rng.random() < 0.5)
        self.shards = [Shard() for _ in range(shards)]
        self.now_s = 0.0

    def of(self, status: str) -> list[int]:
        return [number for number, one in enumerate(self.shards) if one.status == status]

    def finish(self, number: int) -> None:
        one = self.shards[number]
        one.status, one.holder, one.consumed = "done", None, RECORDS

    def grant(self, who: Caller) -> None:
        most = self.rng.randint(0, 3)
        granted = self.table.grant(who, most, self.now_s)
        assert len(granted) == min(most, len(self.of("pending")))
        for number, upto in granted:
            one = self.shards[number]
            assert (one.status, upto) == ("pending", one.consumed)
            one.status, one.holder = "leased", who

    def take(self, who: Caller) -> None:
        number, upto = self.rng.randrange(len(self.shards)), self.rng.randint(0, RECORDS)
        complete = upto == RECORDS
        one = self.shards[number]
        new, why = self.table.take(who, number, upto, complete)
        if one.holder != who:
            assert (new, bool(why)) == (0, True)
            return
        assert (new, why) == (max(0, upto - one.consumed), "")
        one.consumed = max(upto, one.consumed)
        if complete:
            self.finish(number)

    def finish_many(self, who: Caller) -> None:
        numbers = self.rng.sample(range(len(self.shards)), min(4, len(self.shards)))
        said = [(number, self.rng.choice([RECORDS, RECORDS, RECORDS + 1])) for number in numbers]
        good = [
            (number, records)
            for number, records in said
            if self.shards[number].holder == who and not self.shards[number].consumed and records == RECORDS
        ]
        rest = [one for one in said if one not in good]
        assert self.table.finish_many(who, said, True) == (RECORDS * len(good), len(good), rest)
        for number, _ in good:
            self.finish(number)

    def hold(self, who: Caller) -> None:
        number = self.rng.randrange(len(self.shards))
        one = self.shards[number]
        agreed = one.status in ("pending", "done") or one.holder == who
        assert self.table.hold(who, number, self.now_s) == ("" if agreed else self.table.whose(number, who))
        if one.status == "pending":
            one.status, one.holder = "leased", who

    def give_up(self, who: Caller) -> None:
        mine = [number for number in self.of("leased") if self.shards[number].holder == who]
        kept = set(mine[:1]) if self.rng.random() < 0.5 else set()
        assert self.table.release(who, self.now_s, kept) == len(mine) - len(kept)
        for number in mine:
            if number not in kept:
                self.shards[number].status, self.shards[number].holder = "pending", None

    def quarantine(self, who: Caller) -> None:
        number = self.rng.randrange(len(self.shards))
        self.table.quarantine(number)
        one = self.shards[number]
        if one.status != "done":
            one.status, one.holder = "quarantined", None

    def raise_count(self, who: Caller) -> None:
        number, upto = self.rng.randrange(len(self.shards)), self.rng.randint(0, RECORDS - 1)
        self.table.raise_count(number, upto)
        if self.shards[number].status == "pending":
            self.shards[number].consumed = max(upto, self.shards[number].consumed)

    def extend(self, who: Caller) -> None:
        more = len(self.shards) + self.rng.randint(1, 5)
        manifest = small(sizes=(RECORDS * more,))
        self.table.extend(manifest, ListVersion(more, manifest.digest))
        self.shards += [Shard() for _ in range(more - len(self.shards))]

    def agree(self) -> None:
        table, ledger = self.table, self.table.ledger
        status = {FRESH: "pending", BACK: "pending", LEASED: "leased", DONE: "done", QUARANTINED: "quarantined"}
        assert [status[table.state(number)] for number in range(len(self.shards))] == [s.status for s in self.shards]
        assert {n: s.holder for n, s in enumerate(self.shards) if s.holder} == table.holders
        assert {(number, who) for who, leased in table.leases.items() for number in leased} == set(
            table.holders.items()
        )
        assert [ledger.is_done(number) for number in range(len(self.shards))] == [
            one.status == "done" for one in self.shards
        ]
        begun = {n: s.consumed for n, s in enumerate(self.shards) if s.consumed and s.status != "done"}
        assert set(table.back) >= {number for number in begun if self.shards[number].status == "pending"}
        assert (ledger.partial, ledger.records) == (begun, sum(one.consumed for one in self.shards))
        counts = Counter(one.status for one in self.shards)
        assert (table.pending, table.quarantined, ledger.done_shards) == (
            counts["pending"], counts["quarantined"], counts["done"],
        )  # fmt: skip
        assert table.finished == (counts["pending"] == counts["leased"] == 0)
        assert table.undone(range(len(self.shards))) == [n for n, s in enumerate(self.shards) if s.status != "done"]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_table_and_model_agree(seed: int) -> None:
    rng = random.Random(seed)
    model = Model(rng, rng.randint(1, 12))
    often = [model.grant, model.grant, model.take, model.take, model.finish_many, model.hold]
    seldom = [model.give_up, model.raise_count, model.raise_count, model.quarantine, model.extend]
    for _ in range(100):
        model.now_s += 1.0
        rng.choice(often if rng.random() < 0.7 else seldom)(rng.choice([ANN, BOB]))
        model.agree()
    # A Master that takes over begins with this position: nothing is leased, begun shards come first.
    excluded = model.of("quarantined")
    again = LeaseTable(model.table.manifest, model.table.ledger.copy(), [*excluded, len(model.shards)])
    assert again.pending == len(model.of("pending")) + len(model.of("leased"))
    assert [number for number in range(len(model.shards)) if again.state(number) == QUARANTINED] == excluded
    begun = {number for number in model.table.ledger.partial if number not in excluded}
    assert set(again.back) == begun
    granted = again.grant(ANN, len(model.shards), 0.0)
    assert {number for number, _ in granted[: len(begun)]} == begun
    assert sorted(number for number, _ in granted) == sorted(model.of("pending") + model.of("leased"))


def test_each_shard_is_granted_once_though_many_are_done_and_the_rest_lies_anywhere() -> None:
    """A position whose finished shards are not the first ones of the order."""
    shards = 12_000
    manifest = small(sizes=(RECORDS * shards,))
    ledger = Ledger.of(manifest, seed=3)
    rng = random.Random(1)
    for shard in rng.sample(range(shards), 9000):
        ledger.take(shard, RECORDS, True)
    left = [shard for shard in range(shards) if not ledger.is_done(shard)]
    granted = LeaseTable(manifest, ledger).grant(ANN, shards, 0.0)
    assert sorted(shard for shard, _ in granted) == left


class TestRetries:
    """A shard that a worker failed to read goes to another one, if there is one."""

    def failed(self, unreached: bool = False) -> LeaseTable:
        table = table_of(1)
        assert table.grant(ANN, 1, 0.0) == [(0, 0)]
        if unreached:
            table.put_back(0, 100.0, (ANN,), unreached=True)
        else:
            table.put_back(0, 100.0, (ANN,))
        return table

    def test_another_one_gets_it_at_once(self) -> None:
        assert self.failed().grant(ANN, 1, 100.0, [BOB]) == []
        assert self.failed().grant(BOB, 1, 100.0, [ANN]) == [(0, 0)]

    def test_if_there_is_none_the_same_one_tries_again(self) -> None:
        assert self.failed().grant(ANN, 1, 100.0) == [(0, 0)]
        assert self.failed().grant(ANN, 1, 100.0, [ANN]) == [(0, 0)]

    def test_if_the_file_was_out_of_reach_only_after_a_while(self) -> None:
        assert self.failed(unreached=True).grant(ANN, 1, 100.0) == []
        assert self.failed(unreached=True).grant(BOB, 1, 100.0) == [(0, 0)]

    @pytest.mark.parametrize("unreached", [False, True])
    def test_after_a_while_anybody_may(self, unreached: bool) -> None:
        table = self.failed(unreached)
        assert table.grant(ANN, 1, 100.0 + RETRY_WAIT_S - 0.1, [BOB]) == []
        assert table.pending == 1
        assert table.grant(ANN, 1, 100.0 + RETRY_WAIT_S, [BOB]) == [(0, 0)]

    def test_one_that_has_to_wait_does_not_keep_others_from_being_granted(self) -> None:
        table = table_of(3)
        table.grant(ANN, 2, 0.0)
        table.put_back(0, 100.0, (ANN,))
        table.put_back(1, 100.0)
        assert [shard for shard, _ in table.grant(ANN, 3, 100.0, [BOB])] == [1, 2]


class TestWords:
    def test_a_shard_cannot_end_before_what_is_consumed_of_it(self) -> None:
        table = table_of(1)
        table.grant(ANN, 1, 0.0)
        table.take(ANN, 0, 3, False)
        assert table.take(ANN, 0, 2, True) == (0, "shard 0 cannot end at record 2: 3 of its records are consumed")
        assert table.state(0) == LEASED
        assert table.take(ANN, 0, 3, True) == (0, "")
        assert table.finished

    def test_why_a_shard_is_not_leased_to_a_worker(self) -> None:
        table = table_of(4)
        table.grant(BOB, 2, 0.0)
        table.take(BOB, 0, RECORDS, True)
        table.quarantine(2)
        assert [table.whose(shard, ANN) for shard in range(-1, 5)] == [
            "there is no shard -1; there are 4",
            "shard 0 is done, not leased to worker 0 on a",
            "shard 1 is leased to worker 1 on b, not to worker 0 on a",
            "shard 2 is quarantined, not leased to worker 0 on a",
            "shard 3 is pending, not leased to worker 0 on a",
            "there is no shard 4; there are 4",
        ]

    def test_without_exact_counts_the_client_says_how_many_records_a_shard_had(self) -> None:
        table = table_of(2)
        table.grant(ANN, 2, 0.0)
        assert table.finish_many(ANN, [(0, 7)], False) == (7, 1, [])
        assert table.finish_many(ANN, [(1, 7)], True) == (0, 0, [(1, 7)])
