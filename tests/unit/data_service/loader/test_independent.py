"""Independent mode of trainers whose worlds change around them: nothing lost, nothing twice, and positions by name."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_service.leases import independent
from data_service.loader import trainers
from data_service.loader.deps import LoaderDeps
from data_service.loader.lease_client import LeaseClient, PendingRequest
from data_service.loader.trainers import TrainerDataSets
from data_service.loader.worker_context import RankAssignment
from edl.adapters.system_threads import SystemThreads
from edl.errors import DataError, SettingError
from tests.support.data_fixture import LIMIT_S, ArrayData, Bench, BenchContext, drawn, on_threads, write_ipc

RECORDS = 600


class IndependentBenchContext(BenchContext):
    """The context of a worker that outlives rounds."""

    def independent(self) -> IndependentBenchContext:
        return self

    def where(self) -> tuple[int, int]:
        places = self.bench.world().members[0].used
        return self.bench.round, places.index(self.slot) if self.slot in places else self.slot

    def place(self) -> RankAssignment:
        return RankAssignment(*self.where(), self.bench.size)

    def over(self, number: int) -> bool:
        return False


class IndependentBenchData(ArrayData):
    def __init__(self, bench: Bench, slot: int, *arguments: Any, **named: Any) -> None:
        super().__init__(bench, slot, *arguments, **{"mode": "independent", **named})

    def _make_context(self) -> BenchContext:
        self.bench_context = IndependentBenchContext(self.bench_context.bench, self.bench_context.slot)
        return self.bench_context


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number in range(3):
        write_ipc(tmp_path / f"{number}.arrow", number * RECORDS // 3, RECORDS // 3)
    return str(tmp_path / "*.arrow")


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trainers, "trainers", TrainerDataSets())
    yield


def make(bench: Bench, files: str, slot: int = 0, **options: Any) -> IndependentBenchData:
    return IndependentBenchData(bench, slot, "d", files, **{"batch_size": 8, "shard_records": 25, **options})


def ids(batch: dict[str, Any]) -> list[int]:
    return [int(one) for one in batch["id"]]


def change(bench: Bench, size: int) -> None:
    """Another world, around those that live."""
    bench.begin(size)
    bench.reattach()


def ledger_records(bench: Bench) -> int:
    return bench.machine.sets["d"].position.ledger.records


class PausingThreads(SystemThreads):
    """System threads on which a wait of the test's own thread takes no time, but moves a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock_s = 0.0
        self.paused: Callable[[], None] = lambda: None
        """Called after each such wait."""
        self.main = threading.current_thread()

    def sleep(self, seconds: float) -> object:
        if threading.current_thread() is not self.main:
            return super().sleep(seconds)
        self.clock_s += seconds
        self.paused()
        return None


def test_a_worker_without_data_asks_less_and_less_often_but_again_within_a_second(bench: Bench, files: str) -> None:
    bench.begin(2)
    first, second = make(bench, files, 0), make(bench, files, 1)
    threads = PausingThreads()
    second._deps = LoaderDeps(threads)
    begun = iter(first)
    seen = [*ids(next(begun))]
    asked_s: list[float] = []
    said = bench.said

    def ask(slot: int, text: str, number: int) -> None:
        if slot == 1 and threads.clock_s:
            asked_s.append(threads.clock_s)
        said(slot, text, number)

    def paused() -> None:
        if threads.clock_s >= 10.0 and not finished:
            finished.append(True)
            seen.extend(one for batch in begun for one in ids(batch))

    finished: list[bool] = []
    bench.said, threads.paused = ask, paused  # type: ignore[method-assign]
    seen.extend(one for batch in second for one in ids(batch))
    assert sorted(seen) == [*range(RECORDS)]
    waiting = [at_s for at_s in asked_s if at_s < 10.0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(waiting)]
    assert 10 <= len(waiting) <= 60, "not every 10 ms"
    assert max(gaps) == pytest.approx(0.25)
    assert gaps[:3] == pytest.approx([0.02, 0.04, 0.08])


# --- worlds change ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_worlds_and_masters_change_and_each_record_comes_once(bench: Bench, files: str, seed: int) -> None:
    draw = drawn(seed)
    bench.begin(3)
    events = [draw.choice(["world", "master", "words"]) for _ in range(6)]
    lock = threading.Lock()
    seen: list[int] = []

    def work(slot: int) -> None:
        data = make(bench, files, slot)
        while data.epoch < 2:
            for batch in data:
                with lock:
                    seen.extend(ids(batch))
                    count = len(seen)
                    kind = events.pop() if events and count > (7 - len(events)) * 150 else ""
                if kind == "world":
                    change(bench, 3 + draw.randrange(3))
                elif kind == "master":
                    bench.replace_master()
                elif kind == "words":
                    bench.lose = lambda: True
                    data.done()
                    bench.lose = lambda: False
                    change(bench, 3)

    assert on_threads(3, work) == [None] * 3
    assert not events and sorted(seen) == sorted([*range(RECORDS)] * 2)


def test_a_trainer_that_dies_gives_its_shards_back_at_once(bench: Bench, files: str) -> None:
    bench.begin(2)
    first, second = make(bench, files, 0), make(bench, files, 1, shard_records=25)
    mine, its = iter(first), iter(second)
    seen = ids(next(mine)) + ids(next(mine))
    next(its)
    second._detach()  # without a word
    change(bench, 1)
    seen += [record for batch in mine for record in ids(batch)]
    assert sorted(seen) == list(range(RECORDS))


def test_a_process_in_the_same_place_begins_with_empty_hands(bench: Bench, files: str) -> None:
    bench.begin(1)
    before = iter(make(bench, files))
    used = ids(next(before))
    next(before)
    after = make(bench, files)
    assert sorted(used + [record for batch in after for record in ids(batch)]) == list(range(RECORDS))


def test_the_first_one_dies_before_it_has_listed_the_shards(bench: Bench, files: str) -> None:
    """And the one that waits for the list becomes the first."""
    bench.begin(2)
    data = make(bench, files, 1)
    waiting = threading.Event()
    say = bench.boards[1].say

    def noticed(text: str, number: int) -> None:
        say(text, number)
        waiting.set()

    bench.boards[1].say = noticed  # type: ignore[method-assign]
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(record for batch in data for record in ids(batch)))
    thread.start()
    assert waiting.wait(LIMIT_S)
    data.bench_context.slot = 0
    bench.boards[0], bench.boards[1] = bench.boards[1], bench.boards[0]
    bench.boards[0].slot = 0
    change(bench, 1)
    thread.join(LIMIT_S)
    assert sorted(found) == list(range(RECORDS))


def test_a_stale_message_is_repeated_when_the_place_is_known(bench: Bench, files: str) -> None:
    bench.begin(1)
    data = make(bench, files)
    steps = iter(data)
    seen = ids(next(steps))
    here = bench.round
    data.bench_context.where = lambda: (here, 0)  # type: ignore[method-assign]
    bench.begin(1)
    seen += ids(next(steps))
    data.bench_context.where = lambda: (bench.round, 0)  # type: ignore[method-assign]
    bench.reattach()
    assert sorted(seen + [record for batch in steps for record in ids(batch)]) == list(range(RECORDS))
    assert data._client is not None and ledger_records(bench) == 0 and data.epoch == 1


# --- epochs ----------------------------------------------------------------------------------------------------------


def test_a_newcomer_begins_in_the_present_epoch(bench: Bench, files: str) -> None:
    bench.begin(2)
    data = make(bench, files)
    for _ in range(2):
        assert len([batch for batch in data]) == RECORDS // 8
    late = make(bench, files, 1)
    assert late.epoch == 2 == data.epoch


def test_one_that_was_away_for_epochs_goes_on_with_the_others(bench: Bench, files: str) -> None:
    bench.begin(2)
    slow, quick = make(bench, files, 0), make(bench, files, 1)
    assert slow.epoch == 0
    steps = iter(slow)
    used = ids(next(steps))
    slow.done()
    slow._end_prefetcher(wait=True)
    assert slow._client is not None
    slow._client.gone().done.wait(LIMIT_S)
    rest = [record for batch in quick for record in ids(batch)]
    assert sorted(used + rest) == list(range(RECORDS))
    for _ in range(2):
        assert len([batch for batch in quick]) == RECORDS // 8
    slow.close()
    assert list(slow) == [] or slow.epoch >= 3
    assert slow.epoch >= 3


def test_a_loader_that_is_closed_leases_nothing_after_it_has_left(bench: Bench, files: str) -> None:
    """The Master would take the shard for one that is being read."""
    bench.begin(2)
    data = make(bench, files, 0)
    assert ids(next(iter(data)))
    client, prefetcher = data._client, data._prefetcher
    assert client is not None and prefetcher is not None
    gone, reading = client.gone, []

    def leave() -> PendingRequest:
        reading.append(prefetcher.alive)
        return gone()

    client.gone = leave  # type: ignore[method-assign]
    data.close()
    assert reading == [False]


def test_an_epoch_of_which_one_has_had_nothing(bench: Bench, files: str) -> None:
    bench.begin(2)
    idle, busy = make(bench, files, 0, shard_records=1000), make(bench, files, 1, shard_records=1000)
    assert idle.epoch == 0
    assert len([batch for batch in busy]) == RECORDS // 8
    assert sum(len(batch["id"]) for batch in idle) in (0, RECORDS)


# --- what counts, and when -------------------------------------------------------------------------------------------


def test_batches_count_when_they_are_done(bench: Bench, files: str) -> None:
    bench.begin(1)
    data = make(bench, files, acknowledge="done")
    steps = iter(data)
    for _ in range(4):
        next(steps)
    assert ledger_records(bench) == 0 and data.handed_out == 4
    data.done(3)
    data.settle()
    assert ledger_records(bench) == 24
    data.done()
    assert ledger_records(bench) == 32
    rest = 0
    for batch in steps:
        rest += len(batch["id"])
        data.done()
    assert rest == RECORDS - 32 and data.epoch == 1


def test_with_pushes_they_count_when_those_are_acknowledged(bench: Bench, files: str) -> None:
    bench.begin(1)
    trainers.hold()
    data, evaluation = make(bench, files), IndependentBenchData(bench, 0, "e", files, batch_size=8, acknowledge="next")
    steps, looks = iter(data), iter(evaluation)
    next(steps)
    mark = trainers.mark()
    next(steps), next(looks), next(looks)
    evaluation.settle()
    assert ledger_records(bench) == 0 and bench.machine.sets["e"].position.ledger.records == 8
    trainers.pushed(mark)
    assert ledger_records(bench) == 8
    trainers.pushed()
    trainers.settle()
    assert ledger_records(bench) == 16 and bench.machine.sets["e"].position.ledger.records == 8


def test_the_last_batches_of_an_epoch_are_pushed_though_the_script_collects_more(
    bench: Bench, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that pushes every few batches cannot know which are the last: it waits for the next one."""
    bench.begin(1)
    trainers.hold()
    pushes: list[int] = []
    data = make(bench, files)

    def push() -> None:
        pushes.append(data.handed_out)
        trainers.pushed()

    trainers.joined(1, push, lambda number: (-1, ""))
    seen: list[int] = []

    def train() -> None:
        for number, batch in enumerate(data):
            seen.extend(ids(batch))
            if number % 7 == 6:
                push()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it waits for batches that only it could push"
    assert sorted(seen) == list(range(RECORDS))
    assert pushes[-1] == data.handed_out and data.epoch == 1


def test_settling_waits_for_the_master(bench: Bench, files: str) -> None:
    bench.begin(1)
    data = make(bench, files, acknowledge="done")
    next(iter(data))
    bench.lose = lambda: True
    data.done()
    settled = threading.Event()

    def settle() -> None:
        data.settle()
        settled.set()

    threading.Thread(target=settle).start()
    assert not settled.wait(0.1)
    bench.lose = lambda: False
    bench.replace_master()
    assert settled.wait(LIMIT_S) and ledger_records(bench) == 8


def test_a_wait_that_only_this_worker_can_end_is_reported(
    bench: Bench, files: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("data_service.loader.independent.SAY_S", 0.05)
    monkeypatch.setattr("data_service.loader.independent.IDLE_S", 0.01)
    idle = threading.Event()
    trainers.on_idle(idle.set)
    bench.begin(1)
    data = make(bench, files, batch_size=RECORDS, acknowledge="done")
    steps = iter(data)
    next(steps)
    ended = threading.Event()

    def take() -> None:
        next(steps, None)
        ended.set()

    threading.Thread(target=take).start()
    assert idle.wait(LIMIT_S)
    text = ""
    for _ in range(600):
        text += capsys.readouterr().err
        if "did not acknowledge" in text:
            break
        assert not ended.wait(0.05)
    assert "data set d: no batches left except 1 which this worker received" in text
    data.done()
    assert ended.wait(LIMIT_S)


def test_what_comes_next_can_be_looked_at(bench: Bench, files: str) -> None:
    bench.begin(1)
    data = make(bench, files)
    assert data.peek() is None
    steps = iter(data)
    next(steps)
    for _ in range(600):
        if data.peek() is not None:
            break
        threading.Event().wait(0.01)
    ahead = ids(data.peek())
    assert data.handed_out == 1 and ids(next(steps)) == ahead


def test_acknowledge_is_for_independent_data(bench: Bench, files: str) -> None:
    with pytest.raises(SettingError, match="is for mode=independent"):
        ArrayData(bench, 0, "d", files, batch_size=8, acknowledge="done")


def test_a_closed_one_hands_back_and_can_go_on(bench: Bench, files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_service.loader.loader.GONE_S", 60.0)  # the machine may be busy
    bench.begin(1)
    data = make(bench, files)
    seen = ids(next(iter(data)))
    data.close()
    assert not bench.machine.sets["d"].position.holders and ledger_records(bench) == 8
    assert sorted(seen + [record for batch in data for record in ids(batch)]) == list(range(RECORDS))


@pytest.mark.parametrize("error", [None, RuntimeError("the push failed")])
def test_a_push_that_is_on_its_way_counts_before_a_data_set_is_closed(
    bench: Bench, files: str, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise others would get its records again, and after an error would not learn of the push."""
    monkeypatch.setattr("data_service.loader.loader.GONE_S", 60.0)  # the machine may be busy
    bench.begin(1)
    trainers.hold()
    data = make(bench, files)

    def land() -> None:
        if error is not None:
            raise error
        trainers.pushed()

    trainers.joined(1, lambda: None, lambda number: (-1, ""), land)
    assert ids(next(iter(data)))
    with contextlib.nullcontext() if error is None else pytest.raises(RuntimeError, match="the push failed"):
        data.close()
    assert ledger_records(bench) == (8 if error is None else 0)
    assert bool(bench.machine.sets["d"].position.holders) is (error is not None)


# --- positions by name -----------------------------------------------------------------------------------------------


def cut_after(
    bench: Bench, data: IndependentBenchData, steps: Iterator[Any], batches: int
) -> tuple[list[int], dict[str, str]]:
    used = [record for _ in range(batches) for record in ids(next(steps))]
    trainers.pushed()
    trainers.settle()
    return used, trainers.name_positions("cut-1")


@pytest.mark.parametrize("new_job", [False, True])
def test_training_goes_back_to_a_cut(bench: Bench, files: str, new_job: bool) -> None:
    bench.begin(2)
    trainers.hold()
    data = make(bench, files)
    steps = iter(data)
    used, ledgers = cut_after(bench, data, steps, 10)
    for _ in range(5):
        next(steps)
        trainers.pushed()
    data._detach()
    bench = Bench() if new_job else bench
    if new_job:
        bench.begin(2)
    else:
        change(bench, 2)
    trainers.begin_from("cut-1", ledgers, history=2)
    lock = threading.Lock()
    again: list[int] = []

    def work(slot: int) -> None:
        mine = make(bench, files, slot, acknowledge="next")
        assert mine.epoch == 0
        for batch in mine:
            with lock:
                again.extend(ids(batch))

    assert on_threads(2, work) == [None, None]
    assert sorted(used + again) == list(range(RECORDS)) and len(used) == 80


def test_a_set_that_is_not_in_the_checkpoint_starts_over(bench: Bench, files: str) -> None:
    bench.begin(1)
    data = make(bench, files)
    next(steps := iter(data)), next(steps)
    data._detach()
    trainers.begin_from("cut-1", {}, history=2)
    assert len(list(make(bench, files))) == RECORDS // 8


def test_a_master_that_changes_remembers_what_was_begun(bench: Bench, files: str) -> None:
    bench.begin(1)
    trainers.begin_from("cut-1", {}, history=3)
    data = make(bench, files)
    steps = iter(data)
    seen = ids(next(steps)) + ids(next(steps))
    data.close()
    bench.replace_master()
    again = make(bench, files)
    assert sorted(seen + [record for batch in again for record in ids(batch)]) == list(range(RECORDS))


def test_a_cut_of_other_data_is_refused(bench: Bench, files: str) -> None:
    bench.begin(1)
    data = make(bench, files)
    next(iter(data))
    ledger = data.name_position("cut-1")
    other = Bench()
    other.begin(1)
    listed = make(other, files, shard_records=30)
    next(iter(listed))
    listed._detach()
    trainers.begin_from("cut-1", {"d": ledger}, history=2)
    with pytest.raises(DataError, match="the same files, split differently"):
        next(iter(make(other, files, shard_records=30)))


Work = Callable[[int], None]


# --- the end of an epoch and a new Master ----------------------------------------------------------------------------


def at_the_end(monkeypatch: pytest.MonkeyPatch, bench: Bench, call: Callable[[LeaseClient], None]) -> None:
    """Lose the request for the next epoch, call this once, and replace the Master."""
    real = LeaseClient.next_epoch
    left = [call]

    def next_epoch(self: LeaseClient, *arguments: Any, **named: Any) -> Any:
        if not left:
            return real(self, *arguments, **named)
        bench.lose = lambda: True
        asked = real(self, *arguments, **named)
        bench.lose = lambda: False
        left.pop()(self)
        bench.replace_master()
        return asked

    monkeypatch.setattr(LeaseClient, "next_epoch", next_epoch)
    monkeypatch.setattr(independent, "KEEP_EVERY_S", 1e9)


def test_a_new_master_hears_of_the_epoch_that_is_being_left(
    bench: Bench, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledgements that were not stored are repeated although the trainer waits for the next epoch."""
    at_the_end(monkeypatch, bench, lambda client: None)
    bench.begin(1)
    data = make(bench, files)
    seen = [one for batch in data for one in ids(batch)]
    assert sorted(seen) == [*range(RECORDS)] and data.epoch == 1


def test_an_epoch_goes_on_when_the_new_master_lacks_acknowledgements(
    bench: Bench, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were those of a trainer that is gone: its shards are read again, and no trainer fails."""

    def forget(client: LeaseClient) -> None:
        client._unkept.clear()

    at_the_end(monkeypatch, bench, forget)
    bench.begin(1)
    data = make(bench, files)
    seen = [one for batch in data for one in ids(batch)]
    assert set(seen) == {*range(RECORDS)} and len(seen) > RECORDS and data.epoch == 1
