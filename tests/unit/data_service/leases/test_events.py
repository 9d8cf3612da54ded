"""Loaders when things happen at the worst moment: at an epoch's end, between an announcement and its batch."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.formats.options import FormatOptions
from data_service.leases.lease_table import LeaseTable
from data_service.leases.machine import LeaseMachine
from data_service.ledger import Ledger
from data_service.manifest import ManifestBuilder
from data_service.protocol import messages
from data_service.protocol.messages import Done, LeasesGranted, NextEpoch
from edl.errors import DataError, StateError
from edl.master.service import Caller, Said, WorldBegan
from edl.types import Round
from edl.wire.records import NO_SETTINGS
from edl.worker.boundary import RoundOver
from tests.support.data_fixture import NODE, ArrayData, Bench, Board, Training, exactly_once, write_ipc

RECORDS = 400


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number in range(2):
        write_ipc(tmp_path / f"{number}.arrow", number * RECORDS // 2, RECORDS // 2)
    return str(tmp_path / "*.arrow")


class Eventful(Bench):
    """Another Master comes right after the first one has begun an epoch."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.late = late
        """The answer about the epoch is lost, and others have been given shards of it by then."""
        self.granted = threading.Event()
        self.came = False

    def said(self, slot: int, text: str, number: int) -> None:
        if self.came or not isinstance(messages.decode(text), NextEpoch):
            super().said(slot, text, number)
            return
        self.came = True
        for board in self.boards:
            self._listen(board, board.hear)
        super().said(slot, text, number)
        if self.late:
            assert self.granted.wait(10), "the other worker gets shards of the epoch that has begun"
        self.replace_master()

    def attached(self) -> list[Board]:
        return super().attached()[::-1]  # the others' streams are there first

    def _listen(self, board: Any, hear: Any) -> None:
        def heard(text: str | None) -> None:
            word = None if text is None else messages.decode(text)
            if self.late and isinstance(word, Done) and not self.granted.is_set():
                return
            hear(text)
            if isinstance(word, LeasesGranted) and word.epoch == 1 and word.leases:
                self.granted.set()

        board.hear = heard


@pytest.mark.parametrize("late", [False, True])
def test_a_master_that_dies_right_after_it_has_begun_an_epoch(files: str, late: bool) -> None:
    bench = Eventful(late=late)
    training = Training(
        bench, lambda slot: ArrayData(bench, slot, "d", files, batch_size=8, shard_records=25, tail="join"), 2
    )
    results = training.world(2)
    assert results == ["done"] * 2, [str(one) for one in results]
    exactly_once(training.lineage, RECORDS, 2)


def test_two_of_one_name_do_not_wait_for_each_other(files: str) -> None:
    bench = Bench()
    bench.begin(1)
    one, two = (ArrayData(bench, 0, "d", files, batch_size=8, shard_records=25) for _ in range(2))
    steps = iter(one)
    next(steps)
    next(iter(two))
    with pytest.raises(StateError, match=r"two .* named d"):
        list(steps)
    two.close()


def test_a_position_cannot_be_restored_in_the_round_after_closing(files: str) -> None:
    """The Master counts on what has been read, and would not give it again."""
    bench = Bench()
    bench.begin(1)
    data = ArrayData(bench, 0, "d", files, batch_size=8, shard_records=25)
    state = data.state_dict()
    next(iter(data))
    data.close()
    with pytest.raises(StateError, match="used already"):
        data.load_state_dict(state)
    with pytest.raises(StateError, match="closed in this round"):
        next(iter(data))
    bench.begin(1)
    data.load_state_dict(state)
    assert sum(len(batch["id"]) for batch in data) == RECORDS


def test_what_was_announced_and_cannot_be_read_again_is_an_error(tmp_path: Path) -> None:
    """Other settings: what was announced is cut again. The Master may count it as done, so it cannot be given back."""
    (tmp_path / "any.bin").write_bytes(b"x")
    tries: list[int] = []
    broken, pause = threading.Event(), threading.Event()

    def read(file: str, begin: int, end: int) -> Any:
        tries.append(begin)
        if broken.is_set() and tries.count(begin) == 2:
            raise OSError("once")
        return {"id": np.arange(begin, end)}

    shards: Any = lambda file: [(first, first + 10, 10) for first in range(0, 100, 10)]  # noqa: E731
    bench = Bench()
    reading = FormatOptions(read=read, shards=shards)

    def make(slot: int) -> ArrayData:
        name = str(tmp_path / "any.bin")
        return ArrayData(
            bench, slot, "d", name, format="user", options=reading, batch_size=5, prefetch=8, shuffle_shards=1
        )

    training = Training(bench, make, 1)

    def disturb(rank: int, commit: int) -> None:
        held = training.loaders[0]._prefetcher.held  # type: ignore[union-attr]
        for _ in range(50):
            if not broken.is_set() and held.reported & held.leases.keys():
                broken.set()
                bench.settings = replace(NO_SETTINGS, number=1, global_batch=4)
            elif not broken.is_set():
                pause.wait(0.002)

    training.disturb = disturb
    (result,) = training.world(1)
    assert broken.is_set() and isinstance(result, DataError), result
    training.disturb = lambda rank, commit: None
    broken.clear()
    assert training.world(1) == ["done"]
    exactly_once(training.lineage, 100, 1)


def test_worlds_that_break_while_a_master_comes(files: str) -> None:
    bench = Bench()
    training = Training(
        bench, lambda slot: ArrayData(bench, slot, "d", files, batch_size=4, shard_records=8, tail="join"), 2
    )
    for at in (9, 23, 47, 48):

        def disturb(rank: int, commit: int, at: int = at) -> None:
            if rank == 0 and commit == at - 2:
                bench.replace_master()
            if rank == 1 and commit >= at:
                bench.end()
                raise RoundOver("killed")

        training.disturb = disturb
        training.world(2, keep=1)
    training.disturb = lambda rank, commit: None
    assert training.world(3) == ["done"] * 3
    exactly_once(training.lineage, RECORDS, 2)


def test_shards_that_the_position_has_are_not_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a million, and the Master's lease is renewed in the same loop."""
    builder = ManifestBuilder("ipc")
    builder.file("/data/all.arrow", 1)
    for number in range(100):
        builder.shard(number, number + 1, 1)
    manifest = builder.build()
    ledger = Ledger.of(manifest)
    for shard in range(90):
        ledger.take(shard, 1, True)
    looked: list[int] = []
    hold = LeaseTable.hold

    def counted(table: LeaseTable, by: Caller, shard: int, now_s: float) -> str:
        looked.append(shard)
        return hold(table, by, shard, now_s)

    monkeypatch.setattr(LeaseTable, "hold", counted)
    bench = Bench()
    bench.begin(1)
    machine = LeaseMachine()
    machine.load({}, 0.0)
    machine.step(WorldBegan(bench.world(), taken_over=True), 0.0)
    words: tuple[messages.DataMessage, ...] = (
        messages.RegisterFiles(1, "d", manifest.encode()),
        messages.Open(2, "d", 0, ledger=ledger.encode(), granted=((0, 95),), finished=((0, 92),)),
    )
    for word in words:
        machine.step(Said(Caller(NODE, 0), Round(1), messages.encode(word)), 0.0)
    table = machine.sets["d"].position
    assert sorted(looked) == [90, 91, 92, 93, 94]
    assert table.ledger.done_shards == 92 and sorted(table.holders) == [92, 93, 94]
