"""Files that join a data set while it is read: each record once in each epoch that the file belongs to."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service import scan as scanning
from data_service.file_list import files_of
from data_service.filesystems import FoundFile
from data_service.loader import trainers
from data_service.loader.prefetcher import Prefetcher
from data_service.loader.trainers import TrainerDataSets
from data_service.protocol import add_request
from data_service.protocol.add_request import AddRequest
from data_service.protocol.messages import Done, Opened
from edl.errors import DataError, SettingError
from edl.master.service import Answered, Ordered
from edl.wire.records import NO_SETTINGS, World
from tests.support.data_fixture import LIMIT_S, ArrayData, Bench, Board, Training, drawn, on_threads, write_ipc
from tests.unit.data_service.loader.test_independent import IndependentBenchData

FIRST, MORE, EACH = 400, 10, 20
"""Records at first; files that are added, and records of each."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "new").mkdir()
    for number in range(4):
        write_ipc(tmp_path / "data" / f"{number}.arrow", number * FIRST // 4, FIRST // 4)
    return tmp_path


@pytest.fixture
def bench() -> Bench:
    return Bench()


def maker(bench: Bench, folder: Path, **options: Any) -> Callable[[int], ArrayData]:
    options = {"batch_size": 8, "shard_records": 25, "tail": "join", **options}
    return lambda slot: ArrayData(bench, slot, "d", str(folder / "data"), **options)


def more(folder: Path, inside: str = "new") -> list[str]:
    """Write ten files."""
    for number in range(MORE):
        path = folder / inside / f"{number}.writing"
        write_ipc(path, FIRST + number * EACH, EACH)
        path.rename(folder / inside / f"added-{number}.arrow")
    return [str(folder / inside / f"added-{number}.arrow") for number in range(MORE)]


ALL = FIRST + MORE * EACH


def consists(training: Training, records: dict[int, int]) -> None:
    """Each epoch of so many records, each once."""
    found = training.lineage.epochs()
    assert sorted(found) == sorted(records)
    for epoch, count in records.items():
        assert sorted(found[epoch]) == list(range(count)), f"epoch {epoch}: {len(found[epoch])} records"


def ids(data: ArrayData) -> list[int]:
    return [int(one) for batch, share in data.shares() if share.samples for one in batch["id"]]


def together(found: list[list[int]]) -> list[int]:
    return sorted(one for part in found for one in part)


class Adding:
    """Rank 0 adds the files before its commit of this number, and says what has come of it."""

    def __init__(self, training: Training, folder: Path, commit: int, *, rank: int = 0, when: str = "now") -> None:
        self.training, self.folder, self.commit, self.rank, self.when = training, folder, commit, rank, when
        self.outcomes: list[str] = []
        training.disturb = self

    def __call__(self, rank: int, commit: int) -> None:
        if rank == self.rank and commit == self.commit and not self.outcomes:
            loader = self.training.loaders[rank]
            self.outcomes.append(loader.add(more(self.folder), when=self.when))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("when", "first"), [("now", ALL), ("next-epoch", FIRST)])
def test_files_join_the_epoch_that_is_said(
    bench: Bench, folder: Path, size: int, shuffle: bool, when: str, first: int
) -> None:
    training = Training(bench, maker(bench, folder, shuffle=shuffle), epochs=2)
    adding = Adding(training, folder, 4, rank=size - 1, when=when)
    assert training.world(size) == ["done"] * size
    assert adding.outcomes == [f"10 files, 10 shards, 200 records added, from epoch {int(first == FIRST)} on"]
    consists(training, {0: first, 1: ALL})


def test_the_same_files_again_change_nothing(bench: Bench, folder: Path) -> None:
    bench.begin(2)
    loaders = [maker(bench, folder)(slot) for slot in range(2)]
    added = more(folder)
    outcomes = on_threads(2, lambda rank: loaders[rank].add(added))
    assert sorted(outcomes) == [
        "10 files, 10 shards, 200 records added, from epoch 0 on",
        "nothing was added: 10 files already listed",
    ]
    assert together(on_threads(2, lambda rank: ids(loaders[rank]))) == list(range(ALL))


@pytest.mark.parametrize("seed", range(6))
def test_kills_and_rollbacks_around_an_addition(bench: Bench, folder: Path, seed: int) -> None:
    """Workers and the Master are lost before and after; the position restored may be older than the files."""
    draw = drawn(seed)
    training = Training(bench, maker(bench, folder, seed=seed), epochs=2)
    added, ends = draw.randrange(2, 8), sorted(draw.sample(range(3, 20), 3))
    files: list[str] = []
    outcomes: list[str] = []

    def disturb(rank: int, commit: int) -> None:
        loader = training.loaders[rank]
        if rank == 0 and commit >= added and not outcomes:
            files[:] = files or more(folder)
            outcomes.append(loader.add(files))
        if rank == 0 and ends and commit >= ends[0]:
            ends.pop(0)
            if draw.random() < 0.5:
                bench.replace_master()
            bench.end()

    training.disturb = disturb
    while training.world(draw.randint(1, 3), keep=draw.randrange(3))[0] != "done":
        if draw.random() < 0.3:
            bench.replace_master()
    consists(training, {0: ALL, 1: ALL})


@pytest.mark.parametrize("rescan", [None, 30, "epoch"])
def test_another_job_goes_on_with_the_files_that_there_are_now(folder: Path, rescan: object) -> None:
    first = Training(Bench(), maker(Bench(), folder), epochs=1)
    first.make = maker(first.bench, folder)

    def stop(rank: int, commit: int) -> None:
        if commit == 9:
            first.bench.end()
            raise RuntimeError("stop")

    first.disturb = stop
    first.world(2)
    more(folder, "data")
    bench = Bench()
    second = Training(bench, maker(bench, folder, rescan=rescan), epochs=2)
    second.lineage = first.lineage
    assert second.world(3) == ["done"] * 3
    consists(second, {0: ALL, 1: ALL})


def test_types_of_columns_stay_those_of_the_first_files(tmp_path: Path) -> None:
    """Also in another job: what has been read before would not fit what is read after."""

    def write(name: str, x: str) -> str:
        (tmp_path / name).write_text("id,x\n" + "".join(f"{record},{x}\n" for record in range(100)))
        return str(tmp_path / name)

    def data_of(bench: Bench) -> ArrayData:
        bench.begin(1)
        return ArrayData(bench, 0, "d", str(tmp_path / "*.csv"), batch_size=10)

    write("0.csv", "7")
    first = data_of(Bench())
    assert next(iter(first))["x"].dtype == np.int64
    with pytest.raises(DataError, match=r"1\.new: .*7\.5"):
        first.add(write("1.new", "7.5"))
    assert "1 file, 1 shard added" in first.add(write("2.new", "8"))
    state = first.state_dict()
    write("3.csv", "7.5")
    second = data_of(Bench())
    second.load_state_dict(state)
    with pytest.raises(DataError, match=r"3\.csv: .*7\.5"):
        next(iter(second))
    (tmp_path / "3.csv").unlink()
    third = data_of(Bench())
    third.load_state_dict(state)
    rest = list(third)
    assert sum(len(batch["id"]) for batch in rest) == 90 and {str(batch["x"].dtype) for batch in rest} == {"int64"}


def test_a_finished_epoch_stays_finished(folder: Path) -> None:
    bench = Bench()
    first = Training(bench, maker(bench, folder), epochs=1)
    assert first.world(1) == ["done"]
    more(folder, "data")
    again = Bench()
    second = Training(again, maker(again, folder), epochs=2)
    second.lineage = first.lineage
    assert second.lineage.state is not None and second.lineage.state["ledger"]["epoch"] == 0
    assert second.world(1) == ["done"]
    consists(second, {0: FIRST, 1: ALL})


def test_patterns_are_looked_at_again_after_each_epoch(bench: Bench, folder: Path) -> None:
    training = Training(bench, maker(bench, folder, rescan="epoch"), epochs=3)
    training.disturb = lambda rank, commit: (more(folder, "data"), None)[1] if (rank, commit) == (0, 5) else None
    assert training.world(2) == ["done"] * 2
    consists(training, {0: FIRST, 1: ALL, 2: ALL})


def test_whoever_begins_an_independent_epoch_has_looked_before(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be busy between two epochs; the others do not wait for it long."""
    monkeypatch.setattr(trainers, "trainers", TrainerDataSets())
    monkeypatch.setattr("data_service.loader.loader.RANK_0_LOOKS_S", 0.0, raising=False)
    bench.begin(2)
    files = str(folder / "data" / "*.arrow")
    first, second = (
        IndependentBenchData(bench, slot, "d", files, batch_size=8, shard_records=25, rescan="epoch")
        for slot in range(2)
    )
    assert sorted(int(one) for batch in first for one in batch["id"]) == list(range(FIRST))
    more(folder, "data")
    for epoch, records in ((1, FIRST), (2, ALL)):
        batches = iter(second)
        seen = [*next(batches)["id"]]
        assert second.epoch == epoch
        assert sorted(map(int, [*seen, *(one for batch in batches for one in batch["id"])])) == list(range(records))
    second.close()


def read_while_looking(bench: Bench, folder: Path, unfinished: str, seen: Callable[[], bool] = lambda: True) -> None:
    """An epoch in which good files come, and one that has no end yet. It lasts until the former are added."""
    bench.begin(1)
    data = maker(bench, folder, rescan=0.01)(0)
    found: list[int] = []
    for batch in data:
        if not found:
            more(folder, "data")
            (folder / "data" / unfinished).write_bytes(b"ARROW1\0\0 and no end yet")
        found += [int(one) for one in batch["id"]]
        if len(found) == 200:
            wait(lambda: added(bench.notes) == MORE and seen())  # a look may come between two of them
    data.close()
    assert sorted(found) == list(range(ALL))


def test_patterns_are_looked_at_again_after_some_time(bench: Bench, folder: Path) -> None:
    read_while_looking(bench, folder, "half.arrow")


def test_a_file_that_grows_during_each_scan_keeps_no_others_out(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing, scans, said = folder / "data" / "growing.arrow", [0], list[str]()
    split = scanning._split_all

    def while_it_grows(files: list[FoundFile], *rest: Any) -> Any:
        yield from split(files, *rest)
        if growing.exists():
            growing.write_bytes(growing.read_bytes() + b" more")
            scans[0] += 1

    monkeypatch.setattr(scanning, "_split_all", while_it_grows)
    monkeypatch.setattr("data_service.loader.growing_files.note", said.append)
    read_while_looking(bench, folder, growing.name, lambda: scans[0] > 5)
    assert len([text for text in said if "growing.arrow" in text]) == 1, said


def added(notes: Sequence[str]) -> int:
    """Files that have been added so far, as it was said."""
    return sum(int(count) for note in notes for count in re.findall(r"(\d+) files?, .* added", note))


def wait(condition: Callable[[], bool]) -> None:
    import time

    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


class SurvivingBench(Bench):
    """A node whose first slot is lost, from the second world on."""

    def world(self) -> World:
        world = super().world()
        if self.round < 2:
            return world
        return replace(world, members=(replace(world.members[0], places=(1,)),))

    def attached(self) -> list[Board]:
        return self.boards[1:2] if self.round > 1 else super().attached()


def test_patterns_are_looked_at_again_when_the_first_worker_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "trainers", TrainerDataSets())
    write_ipc(tmp_path / "0.arrow", 0, FIRST)
    bench = SurvivingBench()
    bench.begin(2)
    files = str(tmp_path / "*.arrow")
    lost, second = (
        IndependentBenchData(bench, slot, "d", files, batch_size=8, shard_records=25, rescan=0.01) for slot in range(2)
    )
    steps = iter(second)
    seen = [*next(iter(lost))["id"], *next(steps)["id"]]
    lost._detach()
    bench.begin(1)
    bench.reattach()
    assert second.rank == 0
    write_ipc(tmp_path / "more.writing", FIRST, 10)
    (tmp_path / "more.writing").rename(tmp_path / "more.arrow")
    wait(lambda: any("1 file, 1 shard, 10 records added" in note for note in bench.notes))
    seen += [one for batch in steps for one in batch["id"]]
    second.close()
    assert set(map(int, seen)) == set(range(FIRST + 10))


def test_nothing_is_looked_for_before_the_first_list_is_there(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first scan may take longer than the time between two looks."""
    from data_service.loader.file_list_client import FileListClient

    looked: list[int] = []
    look, register = FileListClient.look_again, FileListClient.register

    def looking(self: FileListClient, *rest: Any, **named: Any) -> None:
        looked.append(len(self.files.segments))
        look(self, *rest, **named)

    def slowly(self: FileListClient, *rest: Any) -> None:
        threading.Event().wait(0.1)  # many times the time between two looks
        register(self, *rest)

    monkeypatch.setattr(FileListClient, "look_again", looking)
    monkeypatch.setattr(FileListClient, "register", slowly)
    bench.begin(1)
    data = maker(bench, folder, rescan=0.005)(0)
    next(iter(data))
    wait(lambda: len(looked) > 2)
    data.close()
    assert all(looked)


def test_an_order_from_outside(bench: Bench, folder: Path) -> None:
    bench.begin(2)
    loaders = [maker(bench, folder)(slot) for slot in range(2)]
    answers: list[Answered] = []

    def order(dataset: str, files: list[str], when: str = "now") -> Answered:
        effects = bench.do(Ordered(len(answers), "me", add_request.encode(AddRequest(dataset, tuple(files), when))))
        answers.extend(one for one in effects if isinstance(one, Answered))
        return answers[-1]

    assert "no data set named d; it has none yet" in order("d", ["x"]).text

    def work(rank: int) -> list[int]:
        found = []
        for number, (batch, share) in enumerate(loaders[rank].shares()):
            if (rank, number) == (0, 2):
                assert order("d", more(folder)).ok and order("d", [str(folder / "nothing")]).ok
                wait(lambda: sum("order" in note for note in bench.notes) == 2)
            found += [int(one) for one in batch["id"]] if share.samples else []
        return found

    assert together(on_threads(2, work)) == list(range(ALL))
    notes = sorted(note for note in bench.notes if "order" in note)
    assert notes[0] == "data d: order 1 (me): 10 files, 10 shards, 200 records added, from epoch 0 on"
    assert notes[1].startswith("data d: order 2 (me): nothing was added: ") and "no such file" in notes[1]
    assert not bench.machine.sets["d"].orders
    assert "when=never" in order("d", ["x"], "never").text and "1 to 1000 paths" in order("d", []).text


def test_an_order_waits_for_a_worker_and_for_another_master(bench: Bench, folder: Path) -> None:
    bench.begin(1)
    data = maker(bench, folder)(0)
    next(iter(data))
    state = data.state_dict()
    bench.end()
    data._detach()
    bench.begin(1)
    body = add_request.encode(AddRequest("d", (str(folder / "new"),)))
    more(folder)
    effects = bench.do(Ordered(1, "me", body))
    assert any("waiting until a worker" in one.text for one in effects if isinstance(one, Answered))
    bench.replace_master()
    data.load_state_dict(state)
    found = []
    for batch in data:
        found += [int(one) for one in batch["id"]]
        wait(lambda: any("order 1" in note for note in bench.notes))
    assert len(found) == ALL - 8 and len(set(found)) == ALL - 8


def test_an_order_goes_to_a_worker_that_still_uses_the_data(bench: Bench, folder: Path) -> None:
    bench.begin(2)
    loaders = [maker(bench, folder)(slot) for slot in range(2)]
    on_threads(2, lambda rank: next(loaders[rank].shares()))
    loaders[0].close()
    bench.do(Ordered(1, "me", add_request.encode(AddRequest("d", tuple(more(folder))))))
    wait(lambda: any("order 1 (me): 10 files" in note for note in bench.notes))


@pytest.mark.parametrize(("when", "first"), [("now", ALL), ("next-epoch", FIRST)])
def test_independent_trainers_share_what_joins(bench: Bench, folder: Path, when: str, first: int) -> None:
    """The Master keeps the account, and another Master knows the files and the epoch that they join."""
    bench.begin(3)
    loaders = [maker(bench, folder, mode="independent")(slot) for slot in range(3)]
    adding = threading.Lock()  # on a busy machine the others may leave a given one of them nothing

    def work(rank: int) -> dict[int, list[int]]:
        data = loaders[rank]
        found: dict[int, list[int]] = {0: [], 1: []}
        while data.epoch < 2:
            epoch = data.epoch
            for number, batch in enumerate(data):
                if (epoch, number) == (0, 3) and adding.acquire(blocking=False):
                    assert "200 records added" in data.add(more(folder), when=when)
                    bench.replace_master()
                found[epoch] += [int(one) for one in batch["id"]]
        return found

    found = on_threads(3, work)
    for epoch, count in ((0, first), (1, ALL)):
        assert together([one[epoch] for one in found]) == list(range(count)), f"epoch {epoch}"


def test_a_named_position_knows_its_files(bench: Bench, folder: Path) -> None:
    """What a checkpoint of parameters names is taken up by another job, which finds more files."""
    bench.begin(1)
    data = maker(bench, folder, mode="independent", acknowledge="done")(0)
    steps = iter(data)
    first = [int(one) for _ in range(5) for one in next(steps)["id"]]
    data.done()
    data.settle()
    position = data.name_position("c1")
    data._detach()
    more(folder, "data")
    other = Bench()
    other.begin(1)
    again = maker(other, folder, mode="independent")(0)
    again._files.client.restore(files_of(position))
    _, client = again._connect()
    client.wait(client.rollback("c1", position, 1), lambda: None, Done)
    client.wait(client.open(0, ""), lambda: None, Opened)
    assert sorted(first + [int(one) for batch in again for one in batch["id"]]) == list(range(ALL))


def test_new_settings_right_after_files_have_joined(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are prepared again from the shards that are held, some of them new, before the Master is asked again."""
    monkeypatch.setattr(Prefetcher, "_enough", lambda self: 8)
    bench.begin(1)
    data = maker(bench, folder, shuffle_shards=1)(0)
    steps = data.shares()
    seen = next(steps)[0]["id"].tolist()
    data.add(more(folder))
    prefetcher = data._prefetcher
    assert prefetcher is not None
    while prefetcher.known.version < 2:
        seen += next(steps)[0]["id"].tolist()
        for _ in range(600):
            if len(prefetcher._steps) == 4 or prefetcher.known.version == 2:
                break
            threading.Event().wait(0.01)
    assert max(prefetcher.held.leases) >= 16, "it holds a new shard"
    with monkeypatch.context() as patch:
        patch.setattr(Prefetcher, "_ask_ahead", lambda self: None)
        bench.settings = replace(NO_SETTINGS, number=1, global_batch=6)
        while max(seen) < FIRST:
            seen += next(steps)[0]["id"].tolist()
    for batch, share in steps:
        seen += [int(one) for one in batch["id"] if share.samples]
    assert sorted(seen) == list(range(ALL))


# --- bad input -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_added_is_named(bench: Bench, folder: Path) -> None:
    bench.begin(1)
    data = maker(bench, folder)(0)
    first = next(iter(data))
    table = pa.table({"id": ["text"], "x": [1.0]})
    with pa.OSFile(str(folder / "new" / "other.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "new" / "half.arrow").write_bytes(b"ARROW1\0\0 no end")
    (folder / "new" / "a.csv").write_text("id,x\n1,2\n")
    for name, message in (
        ("other.arrow", "other.arrow: column id is string, but int64 in .*0.arrow"),
        ("half.arrow", "half.arrow: cannot be read"),
        ("nothing.arrow", "no such file"),
        ("a.csv", "is csv by its name, but format=ipc"),
    ):
        with pytest.raises(DataError, match=message):
            data.add(str(folder / "new" / name))
    with pytest.raises(SettingError, match="when=later: must be now or next-epoch"):
        data.add("x", when="later")
    write_ipc(folder / "data" / "0.arrow", 0, 7)
    with pytest.raises(DataError, match=r"1 file whose size has changed since they were listed: .*0\.arrow"):
        data.add(str(folder / "data"))
    assert len(bench.machine.sets["d"].listed.segments) == 1 and len(first["id"]) == 8


def test_files_without_records_are_listed(bench: Bench, folder: Path) -> None:
    bench.begin(2)
    loaders = [maker(bench, folder)(slot) for slot in range(2)]
    (folder / "new" / "none.arrow").write_bytes(b"")
    assert on_threads(2, lambda rank: rank or loaders[0].add(str(folder / "new")))[0] == (
        "1 file, 0 shards, 0 records added, from epoch 0 on"
    )
    assert together(on_threads(2, lambda rank: ids(loaders[rank]))) == list(range(FIRST))
    assert loaders[0].state_dict() == loaders[1].state_dict()


def test_a_file_that_was_replaced_after_it_was_listed_is_noticed(bench: Bench, folder: Path) -> None:
    """Also one of lines that only got longer: its new lines would be lost without a word."""
    (folder / "lines").mkdir()
    (folder / "lines" / "a.txt").write_text("one\n" * 30)
    bench.begin(1)
    data = ArrayData(bench, 0, "d", str(folder / "lines"), batch_size=4, shuffle=False)
    data._connect()
    with (folder / "lines" / "a.txt").open("a") as file:
        file.write("two\n" * 30)
    with pytest.raises(DataError, match=r"a\.txt.* has 240 bytes, but had 120 when it was listed"):
        next(iter(data))
    assert any("could not read" in note for note in bench.notes) or bench.flaws


def test_many_segments_are_one_list(bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many files that the list is scanned, registered and sent in parts."""
    from data_service import file_list
    from data_service.leases import file_additions
    from data_service.loader import file_list_client

    monkeypatch.setattr(file_list, "SEGMENT_FILES", 3)
    monkeypatch.setattr(file_list_client, "LARGE_BYTES", 100)
    monkeypatch.setattr(file_additions, "PART_BYTES", 64)
    more(folder, "data")
    training = Training(bench, maker(bench, folder), epochs=2)
    training.disturb = lambda rank, commit: bench.end() if (rank, commit) == (0, 9) else None
    assert training.world(2)[0] != "done"
    assert len(bench.machine.sets["d"].listed.segments) == 5
    training.bench = fresh = Bench()
    training.make = maker(fresh, folder)
    training.loaders.clear()
    training.disturb = lambda rank, commit: None
    assert training.world(3) == ["done"] * 3
    consists(training, {0: ALL, 1: ALL})
    assert os.listdir(folder / "new") == []
