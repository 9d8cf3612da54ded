"""Loaders of all ranks over one real lease machine: each record once in each epoch, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.formats.options import FormatOptions
from edl.errors import DataError, SettingError, StateError
from edl.wire.records import NO_SETTINGS
from edl.worker.boundary import RoundOver
from tests.support.data_fixture import ArrayData, Bench, Training, drawn, exactly_once, on_threads, write_ipc

RECORDS = 600


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number in range(3):
        write_ipc(tmp_path / f"{number}.arrow", number * RECORDS // 3, RECORDS // 3)
    return str(tmp_path / "*.arrow")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def maker(bench: Bench, files: str, **options: Any) -> Callable[[int], ArrayData]:
    options = {"batch_size": 8, "shard_records": 25, "tail": "join", **options}
    return lambda slot: ArrayData(bench, slot, "d", files, **options)


def alone(bench: Bench, files: str, **options: Any) -> ArrayData:
    bench.begin(1)
    return maker(bench, files, **options)(0)


def ids(data: ArrayData) -> list[int]:
    return [int(one) for batch in data for one in batch["id"]]


# --- each record once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"shuffle_shards": 4}, {"batch_size": 7, "prefetch": 1}])
def test_each_record_once_in_each_epoch(bench: Bench, files: str, size: int, options: dict[str, Any]) -> None:
    training = Training(bench, maker(bench, files, **options), epochs=2)
    assert training.world(size) == ["done"] * size
    exactly_once(training.lineage, RECORDS, 2)


def test_more_workers_than_shards(bench: Bench, files: str) -> None:
    training = Training(bench, maker(bench, files, shard_records=1000), epochs=1)
    assert training.world(6) == ["done"] * 6
    exactly_once(training.lineage, RECORDS, 1)


def test_epochs_differ_and_the_seed_says_how(bench: Bench, files: str) -> None:
    data = alone(bench, files)
    first, second = ids(data), ids(data)
    assert sorted(first) == sorted(second) == list(range(RECORDS)) and first != second and data.epoch == 2
    assert ids(alone(Bench(), files)) == first and ids(alone(Bench(), files, seed=1)) != first
    assert ids(alone(Bench(), files, shuffle=False)) == list(range(RECORDS))


def test_batches_come_from_many_places_from_the_first_to_the_last(bench: Bench, tmp_path: Path) -> None:
    """As from a global shuffle: the standard deviation of places, and the effective number of shards."""
    write_ipc(tmp_path / "all.arrow", 0, 6400)
    bench.begin(1)
    data = ArrayData(bench, 0, "d", str(tmp_path / "all.arrow"), batch_size=128, shard_records=100)
    batches = [np.array(batch["id"]) for batch in data]
    whole = np.random.default_rng(0).permutation(6400).reshape(50, 128)
    spread = np.mean([np.std(batch) for batch in batches]) / np.mean([np.std(batch) for batch in whole])
    assert spread > 0.9, spread
    sources = [1 / np.square(np.bincount(batch // 100) / len(batch)).sum() for batch in batches]
    assert np.mean(sources) > 12 and min(sources[:-8]) > 6, sources
    assert sorted(np.concatenate(batches).tolist()) == list(range(6400))


def test_shards_are_mixed_as_they_are_large(bench: Bench, tmp_path: Path) -> None:
    """All of them are open from the second batch on: the small one lasts as long as the large one."""
    write_ipc(tmp_path / "0.arrow", 0, 2000)
    write_ipc(tmp_path / "1.arrow", 2000, 100)
    bench.begin(1)
    data = ArrayData(bench, 0, "d", str(tmp_path), batch_size=100)
    counts = [int((np.array(batch["id"]) >= 2000).sum()) for batch in data]
    assert len(counts) == 21 and set(counts[1:-1]) <= {4, 5, 6} and sum(counts) == 100


def test_mixing_shards_is_the_same_each_time(bench: Bench, files: str) -> None:
    first = ids(alone(bench, files, shuffle_shards=6))
    assert ids(alone(Bench(), files, shuffle_shards=6)) == first
    assert len({record // 25 for record in first[:32]}) > 3


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 5 else pytest.mark.soak) for n in range(12)])
def test_nothing_is_lost_or_repeated_when_worlds_break_anywhere(bench: Bench, files: str, seed: int) -> None:
    draw = drawn(seed)
    options = {
        "shuffle_shards": draw.choice([1, 3]),
        "prefetch": draw.choice([1, 4]),
        "tail": draw.choice(["join", "pad"]),
    }
    training = Training(bench, maker(bench, files, **options), epochs=2)
    lost_at = 0
    for _ in range(8):
        break_at = len(training.lineage.steps) + draw.randrange(1, 25)
        by = draw.randrange(4)
        lost_at = break_at - draw.randrange(0, 4) if draw.random() < 0.5 else 0

        def disturb(rank: int, commit: int, by: int = by, at: int = break_at, lost: int = lost_at) -> None:
            if rank == 0 and commit == lost:
                bench.replace_master()
            if rank == by and commit >= at:
                bench.end()
                raise RoundOver("killed")

        training.disturb = disturb
        before = bench.size
        results = training.world(draw.randrange(by + 1, 6), keep=draw.randrange(before + 1))
        assert all(one == "done" or isinstance(one, RoundOver) for one in results), results
        if set(results) == {"done"}:
            break
    training.disturb = lambda rank, commit: None
    assert set(training.world(draw.randrange(1, 5))) == {"done"}
    if options["tail"] == "join":
        exactly_once(training.lineage, RECORDS, 2)
    else:
        assert all(set(seen) == set(range(RECORDS)) for seen in training.lineage.epochs().values())


@pytest.mark.parametrize("seed", range(6))
def test_a_master_that_dies_in_the_middle_of_it(bench: Bench, files: str, seed: int) -> None:
    """Words to and from it are lost at any moment before that."""
    draw = drawn(seed)
    training = Training(bench, maker(bench, files), epochs=2)
    dead = threading.Event()
    bench.lose = dead.is_set
    at = draw.randrange(1, 10)

    def disturb(rank: int, commit: int) -> None:
        if rank == 0 and commit % 12 == at:
            dead.set()
        if rank == 0 and commit % 12 == at + 1 and dead.is_set():
            dead.clear()
            bench.replace_master()

    def revive() -> None:
        if dead.is_set():
            dead.clear()
            bench.replace_master()

    training.disturb = disturb
    timer = [threading.Timer(0.3 * number, revive) for number in range(1, 30)]
    for one in timer:
        one.start()
    try:
        assert training.world(3) == ["done"] * 3
    finally:
        for one in timer:
            one.cancel()
    exactly_once(training.lineage, RECORDS, 2)


# --- tails -----------------------------------------------------------------------------------------------------------


def shares_of(bench: Bench, files: str, size: int, **options: Any) -> list[list[Any]]:
    bench.begin(size)
    make = maker(bench, files, **options)
    return on_threads(size, lambda rank: [(share, len(batch["id"])) for batch, share in make(rank).shares()])


def uneven_shares(files: str, tail: str) -> list[list[Any]]:
    """Train so that one of two ranks gets one of three shards. Retried, because on a busy machine one rank may get
    all."""
    for _ in range(50):
        found = shares_of(Bench(), files, 2, tail=tail, shard_records=1000)
        if any(isinstance(shares, DataError) for shares in found):
            continue  # tail="drop", and one has nothing
        if all(any(share.samples for share, _ in shares) for shares in found):
            return found
    raise AssertionError("one rank got all of the shards each time")


def test_all_ranks_take_the_same_steps_and_agree_on_their_samples(files: str) -> None:
    for tail in ("join", "pad", "drop"):
        found = uneven_shares(files, tail)
        assert len({len(shares) for shares in found}) == 1, tail
        for step in zip(*found, strict=True):
            assert {share.total for share, _ in step} == {sum(share.samples for share, _ in step)}, tail
            assert {share.full for share, _ in step} == {16}, tail
        total = sum(share.samples for shares in found for share, _ in shares)
        assert {"join": total == RECORDS, "pad": total > RECORDS, "drop": total < RECORDS}[tail], total
        if tail == "drop":
            assert {length for shares in found for _, length in shares} == {8}
        if tail == "join":
            assert any(share.samples == 0 and length for shares in found for share, length in shares)


def test_what_is_repeated_is_what_was_had(files: str) -> None:
    """And a script may write into its batches."""

    def records() -> list[list[set[int]]]:
        bench = Bench()
        bench.begin(2)
        make = maker(bench, files, tail="pad", shard_records=300)

        def work(rank: int) -> list[set[int]]:
            found = []
            for batch in make(rank):
                found.append({int(one) for one in batch["id"]})
                batch["id"][:] = -1
            return found

        return on_threads(2, work)

    for _ in range(50):
        results = records()
        assert all(-1 not in records for steps in results for records in steps)
        if any(len(steps) > 1 and steps[-1] & set().union(*steps[:-1]) for steps in results):
            return
    raise AssertionError("one of them had less, and repeated nothing")


def test_dropping_is_reported(files: str) -> None:
    for _ in range(50):
        bench = Bench()
        found = shares_of(bench, files, 2, tail="drop", shard_records=150, batch_size=64)
        if not any(isinstance(shares, DataError) for shares in found):  # on a busy machine one rank may get all shards
            assert any("dropping" in text and "by its rule" in text for text in bench.notes), bench.notes
            return
    raise AssertionError("one rank got all of the shards each time")


def test_dropping_everything_is_an_error(bench: Bench, files: str) -> None:
    with pytest.raises(DataError, match="fills a whole step of all workers"):
        ids(alone(bench, files, tail="drop", batch_size=601))


# --- shards that cannot be read --------------------------------------------------------------------------------------


def user_data(bench: Bench, folder: Path, read: Callable[[str, int, int], Any], **options: Any) -> ArrayData:
    (folder / "any.bin").write_bytes(b"x")
    shards: Any = lambda file: [(first, first + 10, 10) for first in range(0, 100, 10)]  # noqa: E731
    reading = FormatOptions(read=read, shards=shards)
    return ArrayData(bench, 0, "d", str(folder / "any.bin"), format="user", options=reading, batch_size=4, **options)


def test_an_unreadable_shard_is_skipped(bench: Bench, tmp_path: Path) -> None:
    def read(file: str, begin: int, end: int) -> Any:
        if begin == 30:
            raise OSError("the disk is broken")
        return {"id": np.arange(begin, end)}

    bench.begin(1)
    data = user_data(bench, tmp_path, read)
    assert sorted(ids(data)) == [one for one in range(100) if not 30 <= one < 40]
    assert "any.bin" in bench.flaws["data/d"] and "disk is broken" in bench.flaws["data/d"]
    assert len(ids(data)) == 90, "in the next epoch as well"


def test_when_nothing_can_be_read_it_is_an_error(bench: Bench, tmp_path: Path) -> None:
    def read(file: str, begin: int, end: int) -> Any:
        raise OSError("the disk is broken")

    bench.begin(1)
    with pytest.raises(DataError, match=r"all 10 shards were skipped, such as: .*the disk is broken"):
        ids(user_data(bench, tmp_path, read))


def test_one_failure_is_none(bench: Bench, tmp_path: Path) -> None:
    tries: list[int] = []

    def read(file: str, begin: int, end: int) -> Any:
        tries.append(begin)
        if begin == 30 and tries.count(30) == 1:
            raise OSError("once")
        return {"id": np.arange(begin, end)}

    bench.begin(1)
    assert sorted(ids(user_data(bench, tmp_path, read))) == list(range(100)) and not bench.flaws


def test_empty_shards_do_not_keep_an_epoch_from_ending(bench: Bench, tmp_path: Path) -> None:
    def read(file: str, begin: int, end: int) -> Any:
        return {"id": np.arange(begin, end if begin < 50 else begin)}

    bench.begin(1)
    data = user_data(bench, tmp_path, read)
    for _ in range(2):
        assert sorted(ids(data)) == list(range(50))


def test_a_file_that_vanishes_is_left_out(bench: Bench, files: str, tmp_path: Path) -> None:
    data = alone(bench, files, shuffle=False)
    steps = iter(data)
    found = [int(one) for one in next(steps)["id"]]
    (tmp_path / "2.arrow").unlink()
    found += [int(one) for batch in steps for one in batch["id"]]
    assert set(range(2 * RECORDS // 3)) <= set(found)
    assert "2.arrow" in bench.flaws["data/d"]


def test_no_files_and_wrong_files_say_so(bench: Bench, files: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing"):
        ids(alone(bench, str(tmp_path / "nothing*.arrow")))
    with pytest.raises(SettingError, match="no files are given"):
        bench.begin(1)
        ids(ArrayData(bench, 0, "d", batch_size=8))
    with pytest.raises(SettingError, match="shard_records=0: must be at least 1"):
        ids(alone(bench, files, shard_records=0))


def test_an_error_of_the_script_is_the_scripts(bench: Bench, files: str) -> None:
    def transform(batch: dict[str, Any]) -> Any:
        raise ZeroDivisionError("in the script")

    with pytest.raises(ZeroDivisionError, match="in the script"):
        ids(alone(bench, files, transform=transform))


def test_the_script_makes_of_a_batch_what_it_wants(bench: Bench, files: str) -> None:
    data = alone(bench, files, transform=lambda batch: (batch["id"] * 2, ["text"]))
    first, texts = next(iter(data))
    assert len(first) == 8 and not first[0] % 2 and texts == ["text"]


# --- the position ----------------------------------------------------------------------------------------------------


def test_going_on_in_the_middle_of_an_epoch(bench: Bench, files: str) -> None:
    data = alone(bench, files)
    steps = iter(data)
    seen = [int(one) for _ in range(5) for one in next(steps)["id"]]
    state = data.state_dict()
    rest = [int(one) for batch in steps for one in batch["id"]]
    other = alone(Bench(), files, batch_size=11)
    other.load_state_dict(state)
    again = ids(other)
    assert sorted(again) == sorted(rest) and sorted(seen + again) == list(range(RECORDS)) and other.epoch == 1


def test_the_end_of_an_epoch_is_a_position(bench: Bench, files: str) -> None:
    data = alone(bench, files, batch_size=RECORDS)
    steps = iter(data)
    next(steps)
    state = data.state_dict()
    other = alone(Bench(), files)
    other.load_state_dict(state)
    assert ids(other) == [] and other.epoch == 1
    assert sorted(ids(other)) == list(range(RECORDS)) and other.epoch == 2


def test_an_iterator_of_before_refuses_to_go_on(bench: Bench, files: str) -> None:
    data = alone(bench, files)
    steps = iter(data)
    next(steps)
    with pytest.raises(StateError, match="in which it has been used already"):
        data.load_state_dict(data.state_dict())
    bench.begin(1)
    data.load_state_dict(data.state_dict())
    with pytest.raises(StateError, match="create a new one with iter"):
        next(steps)
    assert len(ids(data)) == RECORDS - 8


def test_breaking_off_and_going_on(bench: Bench, files: str) -> None:
    data = alone(bench, files)
    first = next(iter(data))
    assert len(first["id"]) + len(ids(data)) == RECORDS and data.epoch == 1


def test_another_world_needs_the_position(bench: Bench, files: str) -> None:
    data = alone(bench, files)
    next(iter(data))
    bench.end()
    bench.begin(1)
    with pytest.raises(StateError, match=r"put it into the state: State\(data=data"):
        next(iter(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 5}, "seed=0"), ({"shuffle": False}, "shuffle=True")],
)
def test_the_position_in_something_else_is_refused(
    bench: Bench, files: str, change: dict[str, Any], message: str
) -> None:
    data = alone(bench, files)
    next(iter(data))
    other = alone(Bench(), files, **change)
    with pytest.raises(DataError, match=message):
        other.load_state_dict(data.state_dict())
        next(iter(other))


def test_another_size_of_shards_is_for_other_files(bench: Bench, files: str) -> None:
    data = alone(bench, files)
    first = [int(one) for one in next(iter(data))["id"]]
    other = alone(Bench(), files, shard_records=50)
    other.load_state_dict(data.state_dict())
    assert sorted(first + ids(other)) == list(range(RECORDS))


@pytest.mark.parametrize(
    ("change", "message"), [("other", "1 file whose size has changed .*0.arrow"), ("gone", "missing: .*0.a")]
)
def test_files_that_changed_are_refused(bench: Bench, files: str, tmp_path: Path, change: str, message: str) -> None:
    data = alone(bench, files)
    next(iter(data))
    (tmp_path / "0.arrow").unlink()
    if change == "other":
        write_ipc(tmp_path / "0.arrow", 0, 10)
    other = alone(Bench(), files)
    other.load_state_dict(data.state_dict())
    with pytest.raises(DataError, match=message):
        next(iter(other))


def test_progress_says_where_it_is(bench: Bench, files: str) -> None:
    data = alone(bench, files)
    next(iter(data))
    now = data.progress()
    assert (now.epoch, now.records, now.of_records, now.of_shards) == (0, 8, RECORDS, 24)


def test_the_position_of_many_shards_is_small(bench: Bench, tmp_path: Path) -> None:
    def read(file: str, begin: int, end: int) -> Any:
        return {"id": np.arange(begin, end)}

    (tmp_path / "any.bin").write_bytes(b"x")
    shards: Any = lambda file: [(first, first + 1, 1) for first in range(100_000)]  # noqa: E731
    bench.begin(1)
    reading = FormatOptions(read=read, shards=shards)
    data = ArrayData(bench, 0, "d", str(tmp_path / "any.bin"), format="user", options=reading, batch_size=4)
    steps = iter(data)
    for _ in range(5):
        next(steps)
    state = data.state_dict()
    assert len(repr(state["ledger"])) < 10_000 and len(state["files"]) < 20_000
    data.close()


# --- steps prescribed by the job -------------------------------------------------------------------------------------


def test_steps_of_a_prescribed_size(bench: Bench, files: str) -> None:
    bench.settings = replace(NO_SETTINGS, number=1, global_batch=30, local_batch=4)
    found = shares_of(bench, files, 2)
    for shares in found:
        assert [share.micro for share, _ in shares[:4]] == [0, 1, 2, 3] and shares[0][0].micros == 4
    assert {share.total for shares in found for share, _ in shares[:8]} == {30}
    assert sum(share.samples for shares in found for share, _ in shares) == RECORDS
    assert all(len(shares) == len(found[0]) and len(shares) % 4 == 0 for shares in found)


def test_other_settings_hold_from_the_next_step_on(bench: Bench, files: str) -> None:
    bench.begin(2)
    make = maker(bench, files, shuffle_shards=2)
    settings = replace(NO_SETTINGS, number=1, global_batch=24)
    seen: list[int] = []

    def work(rank: int) -> list[int]:
        data, totals = make(rank), []
        for batch, share in data.shares():
            seen.extend(int(one) for one in batch["id"] if share.samples)
            totals.append(share.total)
            bench.gather(rank, b"")  # a commit
            if len(totals) == 7:
                bench.settings = settings
            bench.gather(rank, b"")
        return totals

    totals = on_threads(2, work)
    assert totals[0] == totals[1] and totals[0][:7] == [16] * 7 and totals[0][7] == 24
    assert sorted(seen) == list(range(RECORDS)), "what was read ahead is cut again, not lost"


# --- other -----------------------------------------------------------------------------------------------------------


def test_fifty_rounds_leave_nothing_behind(bench: Bench, files: str) -> None:
    data = maker(bench, files)(0)
    threads, before = [], set(threading.enumerate())
    for _ in range(50):
        bench.begin(1)
        state = data.state_dict()
        data.load_state_dict(state)
        steps = iter(data)
        for _ in range(3):
            next(steps, None)
        bench.end()
        for thread in set(threading.enumerate()) - before:
            if thread.name == "edl-data":
                thread.join(20)
        threads.append(len(set(threading.enumerate()) - before))
    data.close()
    assert set(threads) == {threads[0]}
    assert sum(len(board._listeners) for board in bench.boards) == 0


@pytest.mark.parametrize("mode", ["independent", "free"])
def test_independent_workers_share_the_records(bench: Bench, files: str, mode: str) -> None:
    """``free`` is the former name of the mode."""
    bench.begin(3)
    make = maker(bench, files, mode=mode, tail=None)
    datas = [make(rank) for rank in range(3)]
    found = on_threads(3, lambda rank: ids(datas[rank]))
    assert sorted(record for one in found for record in one) == list(range(RECORDS))
    assert all(data.epoch == 1 and data.bench_context.exchanges == 0 for data in datas)


def test_exchanges_are_few_when_data_are_ready(bench: Bench, files: str) -> None:
    """As many steps as are ready are agreed upon at once."""
    bench.begin(2)
    make = maker(bench, files, prefetch=8)

    def work(rank: int) -> tuple[int, int]:
        data, steps = make(rank), 0
        for _ in data:
            steps += 1
            feed = data._prefetcher
            while feed is not None and steps % 8 == 0 and len(feed._steps) < 8 and not feed._idle:
                threading.Event().wait(0.001)
        return steps, data.bench_context.exchanges

    for steps, exchanges in on_threads(2, work):
        assert exchanges < steps / 2


def test_independent_workers_survive_a_master(bench: Bench, files: str) -> None:
    bench.begin(2)
    make = maker(bench, files, mode="independent", tail=None)
    datas = [make(rank) for rank in range(2)]

    def work(rank: int) -> list[int]:
        found = []
        for step, batch in enumerate(datas[rank]):
            found += [int(one) for one in batch["id"]]
            if rank == 0 and step in (5, 20):
                bench.replace_master()
        return found

    found = on_threads(2, work)
    assert sorted(record for one in found for record in one) == list(range(RECORDS))
