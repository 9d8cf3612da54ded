"""Requests of independent trainers to the lease machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from data_service.leases.grants import encode_quarantine
from data_service.leases.independent import KEEP_EVERY_S, LEAST_SILENCE_S, MOST_ENDED
from data_service.leases.machine import LeaseMachine
from data_service.leases.state import QuarantinedShard
from data_service.ledger import Ledger
from data_service.manifest import Manifest, ManifestBuilder
from data_service.protocol.messages import (
    INDEPENDENT,
    STEPS,
    Ack,
    Commit,
    DataRefused,
    DataSetOptions,
    Done,
    FilesRegistered,
    Gone,
    Lease,
    LeasesGranted,
    NextEpoch,
    Open,
    Opened,
    ReadRate,
    RegisterFiles,
    Rollback,
    decode,
    encode,
)
from edl.master.service import Caller, Effect, Keep, Said, TellWorker, Tick, WorldBegan
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Member, World

NODE = NodeId("n")


def listed(file: str = "file") -> Manifest:
    """A manifest of six shards of ten records."""
    builder = ManifestBuilder("ipc")
    builder.file(file, 100)
    for begin in range(0, 60, 10):
        builder.shard(begin, begin + 10, 10)
    return builder.build()


class Master:
    """A machine, two trainers, a clock. ``kept``: what an earlier one has stored."""

    def __init__(self, mode: str = INDEPENDENT, slots: int = 2, kept: Mapping[str, bytes] | None = None) -> None:
        self.machine = LeaseMachine()
        self.kept = dict(kept or {})
        self.store(self.machine.load(self.kept, 0.0))
        self.now_s = 0.0
        self.ids = 0
        self.manifest: Manifest = listed()
        self.options = DataSetOptions(seed=1, mode=mode)
        self.round = 0
        self.world(slots)

    def world(self, slots: int) -> None:
        """A world of this many slots begins."""
        self.round += 1
        world = World(Round(self.round), (Member(NODE, Incarnation(0), "h", slots, Rank(0), ()),), 0)
        self.store(self.machine.step(WorldBegan(world), self.now_s))

    def store(self, effects: Sequence[Effect]) -> None:
        for one in effects:
            if isinstance(one, Keep) and one.value:
                self.kept[one.name] = one.value
            elif isinstance(one, Keep):
                self.kept.pop(one.name, None)

    def ask(self, slot: int, kind: type[Any], **fields: Any) -> Any:
        self.ids += 1
        word = kind(self.ids, "d", **fields)
        effects = self.machine.step(Said(Caller(NODE, slot), Round(self.round), encode(word)), self.now_s)
        self.store(effects)
        answers = [decode(one.body) for one in effects if isinstance(one, TellWorker) and one.caller.slot == slot]
        return next((one for one in answers if getattr(one, "id", None) == self.ids), None)

    def begin(self, slot: int = 0) -> None:
        assert isinstance(
            self.ask(slot, RegisterFiles, manifest=self.manifest.encode(), options=self.options), FilesRegistered
        )
        for one in (0, 1):
            self.open(one)

    def open(self, slot: int, fence: int = 0) -> Opened:
        found = self.ask(slot, Open, rank=slot, fence=fence)
        assert isinstance(found, Opened)
        return found

    def consume(self, slot: int, shards: int) -> list[int]:
        """Lease and acknowledge whole shards."""
        found = []
        for _ in range(shards):
            granted = self.ask(slot, Lease, epoch=self.epoch, want=1)
            assert isinstance(granted, LeasesGranted) and granted.leases
            ref = granted.leases[0].shard
            count = self.machine.sets["d"].known.count(ref.index)
            assert not self.ask(slot, Ack, epoch=self.epoch, shards=((ref.index, count, True),)).refused
            found.append(ref.index)
        return found

    @property
    def epoch(self) -> int:
        return self.machine.sets["d"].position.epoch

    @property
    def done(self) -> int:
        return self.machine.sets["d"].position.ledger.done_shards


@pytest.fixture
def master() -> Master:
    made = Master()
    made.begin()
    return made


def test_anybody_may_list_the_shards() -> None:
    master = Master()
    master.begin(1)
    steps = Master(STEPS)
    refused = steps.ask(1, RegisterFiles, manifest=steps.manifest.encode(), options=steps.options)
    assert isinstance(refused, DataRefused) and refused.kind == "rank"


def test_a_named_position_is_reported(master: Master) -> None:
    master.consume(0, 2)
    done = master.ask(1, Commit, name="cut-1")
    assert isinstance(done, Done) and Ledger.decode(done.ledger).done_shards == 2


def test_going_back_is_done_once_for_each_history(master: Master) -> None:
    master.consume(0, 1)
    ledger = master.ask(0, Commit, name="cut-1").ledger
    master.consume(0, 1)
    assert isinstance(master.ask(0, Rollback, name="cut-1", ledger=ledger, history=2), Done) and master.done == 1
    assert master.ask(0, Lease, epoch=0, want=1).kind == "unopened"
    fence = master.open(0).fence
    master.open(1)
    master.consume(0, 1)
    for history in (1, 2):
        assert isinstance(master.ask(1, Rollback, name="cut-1", ledger=ledger, history=history), Done)
        assert master.done == 2 and master.open(1).fence == fence
    assert isinstance(master.ask(1, Rollback, name="cut-1", history=3), Done) and master.done == 1


def test_another_masters_machine_remembers_the_history_and_the_named_positions(master: Master) -> None:
    ledger = master.ask(0, Commit, name="cut-1").ledger
    master.ask(0, Rollback, name="cut-1", ledger=ledger, history=5)
    after = Master(kept=master.kept).machine.sets["d"].independent
    assert (after.history, list(after.commits)) == (5, ["cut-1"])


def test_named_positions_do_not_outlive_their_data(master: Master) -> None:
    master.ask(0, Commit, name="cut-1")
    for slot in (0, 1):
        master.ask(slot, Gone)
    master.manifest = listed("other")
    master.begin()
    after = Master(kept=master.kept)
    for slot in (0, 1):
        after.open(slot)
    assert after.ask(0, Rollback, name="cut-1", history=2).kind == "commit"


def test_what_is_known_of_unreadable_data_is_not_believed_of_other_data(master: Master) -> None:
    master.ask(0, Commit, name="cut-1")
    skipped = QuarantinedShard(3, "file", 30, 40, 0, 0, ("unreadable",))
    stored = Master(kept={**master.kept, "quarantine/d": b"=" + encode_quarantine({3: skipped})})
    assert 3 in stored.machine.sets["d"].quarantine
    del stored.kept["free/d"]
    after = Master(kept=stored.kept)
    assert after.ask(0, Open, rank=0).kind == "ledger"
    after.manifest = listed("other")
    after.begin()
    for one in (after, Master(kept=after.kept)):
        data = one.machine.sets["d"]
        assert not data.quarantine and not data.independent.commits and data.position.pending == 6


def test_a_position_of_other_data_is_refused(master: Master) -> None:
    other = Ledger("0" * 32, 3, seed=1, shuffle=True).encode()
    refused = master.ask(0, Rollback, name="cut-1", ledger=other, history=2)
    assert isinstance(refused, DataRefused) and refused.kind == "ledger" and "belongs to data of digest" in refused.text
    assert master.ask(0, Rollback, name="cut-1", ledger="{}", history=2).kind == "ledger"
    assert master.ask(0, Rollback, name="cut-9", history=2).kind == "commit"


def test_who_was_away_goes_on_in_the_epoch_of_the_others(master: Master) -> None:
    for epoch in range(1, 4):
        while master.ask(0, Lease, epoch=master.epoch, want=0).state != "finished":
            master.consume(0, 1)
        assert master.ask(0, NextEpoch, epoch=epoch).epoch == epoch
    assert master.ask(1, NextEpoch, epoch=1).epoch == 3
    assert master.ask(1, NextEpoch, epoch=5).kind == "epoch"


def test_a_sign_of_life_keeps_shards(master: Master) -> None:
    for slot in (0, 1):
        assert master.ask(slot, Lease, epoch=0, want=1).leases
    for _ in range(10):
        master.now_s += LEAST_SILENCE_S / 3
        master.ask(0, ReadRate, records_per_s=0.0)
        master.machine.step(Tick(), master.now_s)
    holders = master.machine.sets["d"].position.holders.values()
    assert {caller.slot for caller in holders} == {0}


def test_a_worker_that_was_idle_has_its_time_from_the_grant_on(master: Master) -> None:
    master.now_s += 10 * LEAST_SILENCE_S
    assert master.ask(0, Lease, epoch=0, want=1).leases
    master.now_s += LEAST_SILENCE_S - 1
    master.machine.step(Tick(), master.now_s)
    assert master.machine.sets["d"].position.holders
    master.now_s += 1
    master.machine.step(Tick(), master.now_s)
    assert not master.machine.sets["d"].position.holders


def test_who_asks_for_everything_leaves_some_to_the_others(master: Master) -> None:
    first = master.ask(0, Lease, epoch=0, want=100).leases
    second = master.ask(1, Lease, epoch=0, want=100).leases
    assert 0 < len(second) <= len(first) < 6 - len(second)
    while granted := master.ask(0, Lease, epoch=0, want=100).leases:
        first += granted
    assert len(first) + len(second) == 6, "the last ones go one by one"


def test_reports_of_an_epoch_that_is_over_do_not_count(master: Master) -> None:
    done = master.consume(0, 6)
    assert master.ask(0, NextEpoch, epoch=1).epoch == 1
    late = master.ask(1, Lease, epoch=0, want=1, finished=((done[0], 10),), failed=((done[1], 0, "unreadable"),))
    assert isinstance(late, LeasesGranted) and not late.leases and late.state == "finished"
    assert [shard for shard, _ in late.refused] == done[:2] and "is over" in late.refused[0][1]
    assert master.done == 0 and not master.machine.sets["d"].failures


def test_all_who_were_lost_together_are_named() -> None:
    """However many: what each had begun to push has to be made again by those who go on."""
    many = MOST_ENDED + 44
    master = Master(slots=many)
    master.begin()
    for slot in range(many):
        assert isinstance(master.ask(slot, Open, rank=slot, trainer=slot + 1), Opened)
    for slot in range(many):  # all are started again
        master.ask(slot, Open, rank=slot, trainer=many + slot + 1)
    assert master.ask(0, Lease, epoch=0, want=1).ended == tuple(range(1, many + 1))


# --- a worker opens again with what it holds --------------------------------------------------------------------------


@dataclass
class TakenOver:
    """A shard that a lost worker, slot 1, has begun, and that slot 0 continues as trainer 7."""

    master: Master
    shard: int
    others: int
    """The records that slot 1 has used."""

    @property
    def holder(self) -> Caller | None:
        return self.master.machine.sets["d"].position.holders.get(self.shard)

    def open_again(self, *acks: tuple[int, bool], granted: bool = True) -> Opened:
        """Slot 0 opens with its acknowledgements for the shard."""
        found = self.master.ask(
            *(0, Open),
            rank=0,
            trainer=7,
            granted=((self.shard, self.shard + 1),) if granted else (),
            acks=tuple((self.shard, *one) for one in acks),
        )
        assert isinstance(found, Opened)
        return found

    def replace_master(self) -> None:
        """Another Master takes over, a second after the last report."""
        self.master.now_s += KEEP_EVERY_S
        self.master.store(self.master.machine.step(Tick(), self.master.now_s))
        self.master.machine = LeaseMachine()
        self.master.machine.load(self.master.kept, self.master.now_s)
        self.master.world(1)


@pytest.fixture(params=[4, 0], ids=["begun", "unreadable-to-another"])
def taken(request: pytest.FixtureRequest, master: Master) -> TakenOver:
    others = int(request.param)
    shard = master.ask(1, Lease, epoch=0, want=1).leases[0].shard.index
    if others:
        master.ask(1, Ack, epoch=0, shards=((shard, others, False),))
    else:
        master.ask(1, Lease, epoch=0, want=0, failed=((shard, 0, "unreadable"),))
    master.world(1)
    assert master.ask(0, Open, rank=0, trainer=7).refused == ()
    leases = master.ask(0, Lease, epoch=0, want=1).leases
    assert [(one.shard.index, one.upto) for one in leases] == [(shard, others)]
    return TakenOver(master, shard, others)


@pytest.mark.parametrize("new_master", [False, True])
@pytest.mark.parametrize(
    ("acks", "granted", "count"),
    [((), True, 0), (((8, False),), True, 8), (((10, True),), False, 0)],
    ids=["nothing acknowledged", "a lost acknowledgement", "a lost last acknowledgement"],
)
def test_who_continues_a_lost_workers_shard_keeps_it(
    taken: TakenOver, new_master: bool, acks: tuple[tuple[int, bool], ...], granted: bool, count: int
) -> None:
    if new_master:
        taken.replace_master()
    else:
        taken.master.world(2)
    before = ((taken.others, False),) if taken.others and granted else ()
    assert taken.open_again(*(acks or before), granted=granted).refused == ()
    table, now = taken.master.machine.sets["d"].position, taken.master.machine.sets["d"].independent
    assert 7 not in now.ended
    assert taken.holder == (Caller(NODE, 0) if granted else None)
    assert table.ledger.count(taken.shard) == (count or taken.others * granted)
    assert table.ledger.is_done(taken.shard) is not granted


def test_who_was_silent_while_another_took_over_is_refused(taken: TakenOver) -> None:
    """Even before the other one has acknowledged anything."""
    taken.master.world(2)
    taken.open_again((8, False))
    taken.master.now_s += LEAST_SILENCE_S
    taken.master.machine.step(Tick(), taken.master.now_s)
    taken.master.open(1)
    assert [one.upto for one in taken.master.ask(1, Lease, epoch=0, want=1).leases] == [8]
    for acks in [(8, False)], [(9, False)]:
        refused = taken.open_again(*acks).refused
        assert [shard for shard, _ in refused] == [taken.shard] and taken.holder == Caller(NODE, 1)
    assert "worker 1 on n has continued it" in taken.open_again((10, True), granted=False).refused[0][1]
    assert 7 in taken.master.machine.sets["d"].independent.ended


def test_what_a_worker_has_returned_may_be_continued_by_others(taken: TakenOver) -> None:
    """Its own count, which it repeats, is no longer of interest."""
    taken.master.world(2)
    taken.open_again((8, False))
    taken.master.ask(0, Lease, epoch=0, want=0, failed=((taken.shard, 8, "unreadable"),))
    taken.master.open(1)
    taken.master.ask(1, Lease, epoch=0, want=1)
    taken.master.ask(1, Ack, epoch=0, shards=((taken.shard, 9, False),))
    assert taken.open_again((8, False), granted=False).refused == ()


def test_a_worker_that_has_reported_the_end_of_a_shard_need_not_hold_it(taken: TakenOver) -> None:
    taken.master.ask(0, Ack, epoch=0, shards=((taken.shard, 10, True),))
    taken.master.world(2)
    assert taken.open_again().refused == ()
