"""Streams break while independent workers read: they open their data sets again, and keep what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data_service.loader import trainers
from data_service.loader.trainers import TrainerDataSets
from tests.support.data_fixture import LIMIT_S, ArrayData, Bench, on_threads, write_ipc
from tests.unit.data_service.loader.test_independent import IndependentBenchData, change, ids

RECORDS = 600


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number in range(3):
        write_ipc(tmp_path / f"{number}.arrow", number * RECORDS // 3, RECORDS // 3)
    return str(tmp_path / "*.arrow")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "trainers", TrainerDataSets())


def ended(bench: Bench) -> list[int]:
    return bench.machine.sets["d"].independent.ended


# --- inside run: worlds end, and the data set has no position in the state --------------------------------------------


def make_in_run(bench: Bench, files: str, slot: int) -> ArrayData:
    """A loader whose rounds end with its worlds."""
    return ArrayData(bench, slot, "d", files, batch_size=8, shard_records=25, mode="independent")


def read(data: ArrayData, disturb: Callable[[int], None] = lambda count: None) -> list[int]:
    """The rest of the epoch. ``disturb``: called after each batch with the number of batches."""
    found: list[int] = []
    for count, batch in enumerate(data, 1):
        found += ids(batch)
        disturb(count)
    return found


@pytest.mark.parametrize("again", [Bench.reattach, Bench.replace_master])
def test_leases_of_a_later_epoch_outlive_a_stream(bench: Bench, files: str, again: Callable[[Bench], None]) -> None:
    bench.begin(1)
    assert sorted(read(make_in_run(bench, files, 0))) == [*range(RECORDS)]
    bench.begin(2)

    def disturb(count: int) -> None:
        if count in (5, 12):
            again(bench)

    def work(slot: int) -> list[int]:
        return read(make_in_run(bench, files, slot), disturb if slot == 0 else lambda count: None)

    found = on_threads(2, work)
    assert sorted([*found[0], *found[1]]) == [*range(RECORDS)]


def test_a_new_world_goes_on_in_the_epoch_that_has_begun(bench: Bench, files: str) -> None:
    bench.begin(1)
    read(make_in_run(bench, files, 0))
    bench.begin(1)
    assert make_in_run(bench, files, 0).epoch == 1, "a loop over epochs must not read one more"


def test_a_data_set_that_is_closed_returns_its_shards(
    bench: Bench, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_service.loader.loader.GONE_S", LIMIT_S)
    bench.begin(2)
    data = make_in_run(bench, files, 0)
    seen = ids(next(iter(data)))
    data.close()
    assert not bench.machine.sets["d"].position.holders
    assert sorted(seen + read(make_in_run(bench, files, 1))) == [*range(RECORDS)]


# --- shards without records -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [lambda bench: change(bench, 1), Bench.reattach, Bench.replace_master])
def test_shards_without_records_cost_no_trainer(bench: Bench, tmp_path: Path, again: Callable[[Bench], None]) -> None:
    lines = [json.dumps({"id": number}) for number in range(60)]
    lines[20:20] = lines[50:50] = [""] * 3000
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    bench.begin(1)
    trainers.joined(7, lambda: None, lambda number: (-1, ""))
    data = IndependentBenchData(bench, 0, "d", str(tmp_path / "a.jsonl"), batch_size=4, shard_bytes=200)
    found: list[int] = []
    for batch in data:
        found += ids(batch)
        again(bench)
        assert ended(bench) == []
    assert sorted(found) == [*range(60)] and data.epoch == 1
