"""A trainer that pushes every few batches dies in mid-push, and another one makes that push again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.formats.file_reader import FileReader
from data_service.leases.lease_table import RETRY_WAIT_S
from data_service.loader import trainers
from data_service.loader.trainers import TrainerDataSets
from data_service.manifest import ShardRef
from edl.errors import UnreachableData
from tests.support.data_fixture import Bench, write_ipc
from tests.unit.data_service.loader.test_independent import IndependentBenchData, ids

RECORDS, BATCH, OF_A_PUSH = 90, 4, 3


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trainers, "trainers", TrainerDataSets())
    yield


class Rows:
    """One row for each record. Every bucket, here of two rows, takes a push of one name once."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.seqs: dict[tuple[int, int], int] = {}

    def push(self, trainer: int, seq: int, records: list[int], buckets: range = range(RECORDS)) -> None:
        touched = {one // 2 for one in records if one // 2 in buckets}
        open_ = {one for one in touched if self.seqs.get((one, trainer), -1) < seq}
        self.counts.update(one for one in records if one // 2 in open_)
        self.seqs.update({(one, trainer): seq for one in open_})


class Trainer:
    """A script that pushes every three batches, with the part of a step that concerns its data."""

    def __init__(self, rows: Rows, number: int, said: dict[int, tuple[int, str]]) -> None:
        self.rows, self.number, self.said = rows, number, said
        self.collected: list[int] = []
        self.seq = 0
        trainers.hold()
        trainers.joined(number, self.step, lambda gone: self.said.get(gone, (-1, "")))

    def declare(self) -> tuple[int, int]:
        self.seq += 1
        text, redo = trainers.records()
        if redo is None:
            self.said[self.number] = self.seq, text
        return redo or (self.number, self.seq)

    def step(self) -> None:
        if trainers.redoing():
            return
        name = self.declare()
        self.rows.push(*name, self.collected)
        self.collected = []
        trainers.pushed()


@pytest.mark.parametrize("reached", [0, RECORDS // 4, RECORDS], ids=["nobody", "some", "all"])
@pytest.mark.parametrize("before", range(OF_A_PUSH))
def test_each_record_counts_once_wherever_the_script_pushes(tmp_path: Path, before: int, reached: int) -> None:
    """``reached``: the buckets that the push had come to. ``before``: how far the other script is in its own count."""
    write_ipc(tmp_path / "0.arrow", 0, RECORDS)
    bench, rows, said = Bench(), Rows(), dict[int, tuple[int, str]]()
    bench.begin(1)
    first = Trainer(rows, 1, said)
    data = IndependentBenchData(bench, 0, "d", str(tmp_path / "*.arrow"), batch_size=BATCH, shard_records=10)
    for number, batch in enumerate(data):
        first.collected += ids(batch)
        if number == 2 * OF_A_PUSH - 1:
            break
        if number % OF_A_PUSH == OF_A_PUSH - 1:
            first.step()
    rows.push(*first.declare(), first.collected, range(reached))
    data._detach(wait=True)
    second = Trainer(rows, 2, said)
    trainers.trainers._sets.clear()
    data = IndependentBenchData(bench, 0, "d", str(tmp_path / "*.arrow"), batch_size=BATCH, shard_records=10)
    for number, batch in enumerate(data, before):
        second.collected += ids(batch)
        if number % OF_A_PUSH == OF_A_PUSH - 1:
            second.step()
    assert data.epoch == 1
    assert rows.counts == Counter(np.arange(RECORDS).tolist())


# --- a push whose records cannot be read -----------------------------------------------------------------------------


class Readings:
    """Counts what is read by shard, and lets some of it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
        self.counts: Counter[int] = Counter()
        self.failing: dict[int, tuple[int, Exception]] = {}
        """By shard: so many times, and how."""
        read = FileReader.read

        def reading(reader: Any, ref: ShardRef) -> Any:
            self.counts[ref.index] += 1
            times, error = self.failing.get(ref.index, (0, None))
            if times and error is not None:
                self.failing[ref.index] = times - 1, error
                raise error
            return read(reader, ref)

        def pass_time() -> bool:
            bench.now_s += RETRY_WAIT_S  # so that who has failed gets the shard again: nobody else is there
            return False

        bench.lose = pass_time
        monkeypatch.setattr(FileReader, "read", reading)


def die_in_a_push(bench: Bench, pattern: str, rows: Rows, said: dict[int, tuple[int, str]], **options: Any) -> None:
    """A trainer dies in its second push, of records 12 to 23, which reached some rows."""
    first = Trainer(rows, 1, said)
    data = IndependentBenchData(bench, 0, "d", pattern, batch_size=BATCH, shuffle=False, **options)
    for number, batch in enumerate(data):
        first.collected += ids(batch)
        if number == 2 * OF_A_PUSH - 1:
            break
        if number == OF_A_PUSH - 1:
            first.step()
    assert first.collected == list(range(12, 24))
    rows.push(*first.declare(), first.collected, range(8))
    data._detach(wait=True)
    trainers.trainers._sets.clear()


def train_on(
    bench: Bench, pattern: str, rows: Rows, said: dict[int, tuple[int, str]], **options: Any
) -> IndependentBenchData:
    second = Trainer(rows, 2, said)
    data = IndependentBenchData(bench, 0, "d", pattern, batch_size=BATCH, shuffle=False, **options)
    for number, batch in enumerate(data):
        second.collected += ids(batch)
        if number % OF_A_PUSH == OF_A_PUSH - 1:
            second.step()
    assert data.epoch == 1
    return data


HOME, OTHER = 1, 2
"""The second push is made of records of these shards."""


@pytest.mark.parametrize("error", [OSError("broken"), UnreachableData("away")], ids=["unreadable", "unreachable"])
@pytest.mark.parametrize("shard", [HOME, OTHER])
def test_a_push_that_cannot_be_read_for_now_is_made_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: int, error: Exception
) -> None:
    """As a whole: nothing of it goes out before all of it has been read."""
    write_ipc(tmp_path / "0.arrow", 0, RECORDS)
    bench, rows, said = Bench(), Rows(), dict[int, tuple[int, str]]()
    bench.begin(1)
    die_in_a_push(bench, str(tmp_path), rows, said, shard_records=10)
    Readings(monkeypatch, bench).failing[shard] = 2, error
    train_on(bench, str(tmp_path), rows, said, shard_records=10)
    assert rows.counts == Counter(np.arange(RECORDS).tolist())
    attempts = [note for note in bench.notes if "could not read" in note]
    assert len(attempts) == 2 and all(f"shard {shard}: broken" in one or "away" in one for one in attempts)
    assert not bench.flaws


def test_a_shard_whose_push_is_unreadable_is_skipped_and_the_script_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ipc(tmp_path / "0.arrow", 0, RECORDS)
    bench, rows, said = Bench(), Rows(), dict[int, tuple[int, str]]()
    bench.begin(1)
    die_in_a_push(bench, str(tmp_path), rows, said, shard_records=10)
    reached = rows.counts.copy()
    readings = Readings(monkeypatch, bench)
    readings.failing[HOME] = 100, OSError("broken")
    data = train_on(bench, str(tmp_path), rows, said, shard_records=10)
    assert list(bench.machine.sets["d"].quarantine) == [HOME] and readings.counts[HOME] == 3
    assert bench.machine.sets["d"].quarantine[HOME].upto == 2, "what the first push had of it is used"
    assert [rows.counts[one] for one in range(24)] == [reached[one] for one in range(24)]
    assert all(rows.counts[one] == 1 for one in range(24, RECORDS))
    data.close()


def test_what_a_push_is_made_of_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ipc(tmp_path / "0.arrow", 0, RECORDS)
    bench, rows, said = Bench(), Rows(), dict[int, tuple[int, str]]()
    bench.begin(1)
    die_in_a_push(bench, str(tmp_path), rows, said, shard_records=30)
    readings = Readings(monkeypatch, bench)
    train_on(bench, str(tmp_path), rows, said, shard_records=30)
    assert rows.counts == Counter(np.arange(RECORDS).tolist())
    assert readings.counts == {0: 2, 1: 1, 2: 1}, "of the first one's three batches, and to go on"


def test_intents_of_lost_trainers_are_kept_while_the_master_names_them() -> None:
    """Trainers come and go for weeks; others may still get shards of those that are named."""
    asked, known = Counter[int](), TrainerDataSets()

    def fence(trainer: int) -> tuple[int, str]:
        asked[trainer] += 1
        return trainer, ""

    known.joined(1, lambda: None, fence)
    for first in range(2, 1000):
        known.ended(range(first, first + 3), "clicks", 0)
        known.ended([2, 3], "views", 0)
    assert set(asked) == set(range(2, 1002)) and set(asked.values()) == {1}
    assert len(known._said) == 5
    known.ended([], "views", 1)
    assert len(known._said) == 3
