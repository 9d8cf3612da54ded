"""Epoch and position, whatever the framework: any history of steps, kills, resizes and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from edl.errors import DataError, StateError
from edl.wire.records import Settings
from edl.worker import feeding
from edl.worker.feeding import Batches, CoreStream
from edl.worker.sampler import WorldPlace
from tests.sampler_histories import Base, History, Sampler, Worker

pytest.importorskip("numpy")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_histories(part: int) -> None:
    """The committed line of any history has each sample once, in the order of seed and epoch. 10,000 with --soak."""
    for seed in range(part * 150, part * 150 + 150):
        try:
            History(seed).run()
        except AssertionError as error:
            raise AssertionError(f"History({seed}): {error}") from error


def test_a_loader_that_fetches_ahead_does_not_consume() -> None:
    worker = Worker(Sampler(40, 0, 2), batch_size=4, whole=False, blocks=False, ahead=3)
    loader = worker.iterate(whole_steps=False)
    assert worker.sampler.position == 0
    next(loader)
    assert worker.sampler.state_dict()["position"] == 8


def test_an_old_iteration_is_not_continued() -> None:
    worker = Worker(Sampler(40, 0, 2), batch_size=4, whole=False, blocks=False, ahead=3)
    loader = worker.iterate(whole_steps=False)
    next(loader)
    worker.sampler.load_state_dict(worker.sampler.state_dict())
    with pytest.raises(StateError, match="this iteration is over"):
        next(loader)
    second, third = worker.iterate(whole_steps=False), worker.iterate(whole_steps=False)
    next(third)
    with pytest.raises(StateError, match=r"another iteration has begun.*Call iter\(\) on the loader again"):
        next(second)


def test_an_iteration_of_another_round_is_not_continued() -> None:
    sampler = Sampler(40, 0, 2)
    sampler.at = WorldPlace(0, 2, round=3)
    loader = Worker(sampler, batch_size=4, whole=False, blocks=False, ahead=0).iterate(whole_steps=False)
    next(loader)
    sampler.at = WorldPlace(1, 3, round=4)
    with pytest.raises(StateError, match=r"began in round 3, and this is round 4"):
        next(loader)


@pytest.mark.parametrize("call", ["none", "set_epoch", "advance"])
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_sampler_outside_of_the_state_begins_anew_as_in_a_new_worker(
    capfd: pytest.CaptureFixture[str], epochs: int, call: str
) -> None:
    """Else survivors and new workers iterate over different samples, and different numbers of them."""

    def begun(worker: Worker) -> tuple[int, int]:
        sampler = worker.sampler
        if call == "set_epoch":
            sampler.set_epoch(epochs)
        elif call == "advance":
            sampler.advance(12)
        worker.iterate(whole_steps=False)
        return sampler.epoch, sampler.position

    survivor, new = (Worker(Sampler(40, 0, 2), batch_size=4, whole=False, blocks=False, ahead=0) for _ in range(2))
    survivor.sampler.at = WorldPlace(0, 2, round=3)
    for _ in range(epochs):
        assert list(survivor.iterate(whole_steps=False))
    next(survivor.iterate(whole_steps=False))
    survivor.sampler.at = new.sampler.at = WorldPlace(0, 1, round=4)
    assert begun(survivor) == begun(new)
    assert f"not part of the State, so its position 8 in epoch {epochs} was not kept" in capfd.readouterr().err


# --- epochs ----------------------------------------------------------------------------------------------------------


def finished(epoch: int) -> Sampler:
    """After the last sample of an epoch, before the loader was asked for more."""
    sampler = Sampler(6, 0, 1)
    sampler.set_epoch(epoch)
    loader = Worker(sampler, batch_size=3, whole=False, blocks=False, ahead=2).iterate(whole_steps=False)
    next(loader), next(loader)
    return sampler


def test_the_end_of_an_epoch_is_a_state_of_its_own() -> None:
    state = finished(3).state_dict()
    assert (state["epoch"], state["position"]) == (3, 6)
    for calls_set_epoch in (True, False):
        resumed = Sampler(6, 0, 1)
        resumed.load_state_dict(state)
        if calls_set_epoch:
            resumed.set_epoch(3)
        assert list(resumed) == [], "nothing of epoch 3 is repeated"
        assert resumed.epoch == 4
        assert sorted(list(resumed)) == list(range(6)), "nothing of epoch 4 is skipped"
        assert resumed.epoch == 5


def test_epochs_before_the_restored_one_are_passed_by() -> None:
    """``for epoch in range(EPOCHS)``: the script counts from 0 again."""
    sampler = Sampler(6, 0, 1)
    sampler.set_epoch(2)
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(4)]
    state = sampler.state_dict()
    resumed = Sampler(6, 0, 1)
    resumed.load_state_dict(state)
    got = []
    for epoch in range(4):
        resumed.set_epoch(epoch)
        assert epoch >= 2 or (resumed.state_dict()["epoch"], resumed.state_dict()["position"]) == (2, 4)
        got.append(list(resumed))
    assert got[:2] == [[], []]
    assert sorted(first + got[2]) == list(range(6)) and len(got[3]) == 6


def test_without_a_restored_state_an_epoch_may_be_gone_through_again() -> None:
    sampler = Sampler(6, 0, 1)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_set_epoch_in_the_middle_of_that_epoch_changes_nothing() -> None:
    sampler = Sampler(6, 0, 1)
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(2)]
    sampler.set_epoch(0)
    assert sorted(first + list(sampler)) == list(range(6))


# --- counting by hand ------------------------------------------------------------------------------------------------


def test_counting_by_hand() -> None:
    sampler = Sampler(10, 0, 2, counts=False)
    for epoch in range(2):
        indices = list(sampler)
        assert len(indices) == 5 and (sampler.epoch, sampler.position) == (epoch, 0), "only fetched"
        sampler.advance(4)
        assert sampler.state_dict()["position"] == 4
        sampler.advance(8)
        assert (sampler.epoch, sampler.position) == (epoch + 1, 0)


def test_advance_takes_over_from_counting() -> None:
    sampler = Sampler(10, 0, 2)
    iterator = iter(sampler)
    fetched = [next(iterator) for _ in range(4)]
    assert sampler.position == 8 and len(fetched) == 4
    sampler.advance(2)
    assert sampler.position == 2
    next(iterator)
    assert sampler.position == 2


def test_advance_too_late_says_what_to_do() -> None:
    sampler = Sampler(10, 0, 2)
    list(sampler)
    with pytest.raises(StateError, match="counts=False"):
        sampler.advance(2)
    with pytest.raises(StateError, match=r"advance\(-1\)"):
        sampler.advance(-1)


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (
            {"length": 11},
            DataError,
            r"is for a data set of 11 samples, and this one has 10.*the same data set as before",
        ),
        ({"seed": 8}, StateError, "seed=8, not 7"),
        ({"tail": "drop"}, StateError, "tail='drop', not 'pad'"),
        ({"order": "torch"}, StateError, "order='torch', not 'test'.*Construct it with the values of the state"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(other: dict[str, Any], error: type[Exception], text: str) -> None:
    sampler = Sampler(10, 0, 1)
    with pytest.raises(error, match=text):
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "position": 4, **other})
    assert (sampler.epoch, sampler.position) == (0, 0)


def test_a_base_sampler_that_is_not_a_matter_of_seed_and_epoch_is_found_out() -> None:
    sampler = Sampler(10, 0, 1, base=Base(10, groups=True))
    iterator = iter(sampler)
    next(iterator)
    state = sampler.state_dict()

    class Other(Base):
        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch + 1)

    Other.__name__ = "Base"
    resumed = Sampler(10, 0, 1, base=Other(10, groups=True))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state, "also before the order is known"
    with pytest.raises(DataError, match="base sampler Base yields another order for epoch 0"):
        iter(resumed)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tail": "wrap"}, "tail='wrap': it must be one of pad, drop, exact"),
        ({"order": "random"}, "order='random': it must be one of framework, computed"),
        ({"order": "computed", "base": Base(3, False)}, "order='computed' with base"),
        (
            {"base": iter([2, 1])},
            "base=…: a list_iterator can be iterated over only once",
        ),
    ],
)
def test_options_that_are_not_possible(options: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError, match=text):
        Sampler(10, 0, 1, **options)


class Lines:
    """Its iterations are itself, and begin anew."""

    def __iter__(self) -> Lines:
        self._left = ["a", "b"]
        return self

    def __next__(self) -> str:
        if not self._left:
            raise StopIteration
        return self._left.pop()


def test_a_stream_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    """In the next world a survivor would skip as many items again as it has consumed, and a new worker would not."""

    def stream(dataset: Any) -> CoreStream:
        return CoreStream(dataset, 1, 0, tail="pad", transform=None)

    file = tmp_path / "lines"
    file.write_text("a")
    with file.open() as opened:
        for once in ((line for line in "ab"), iter(["a"]), map(str, [1]), opened):
            with pytest.raises(StateError, match=rf"a {type(once).__name__} can be iterated over only once"):
                stream(once)
    for again in (["a", "b"], Lines()):
        assert [sorted(stream(again).items(0, 1)) for _ in range(2)] == [["a", "b"]] * 2


def test_a_batch_size_that_is_not_possible() -> None:
    with pytest.raises(StateError, match="batch_size=0"):
        Batches(Sampler(10, 0, 1), 0, False, False)


# --- groups and settings ---------------------------------------------------------------------------------------------


def test_groups_stay_together_and_shares_count_samples() -> None:
    workers = [Worker(Sampler(30, rank, 2, base=Base(30, True)), 1, False, False, 1) for rank in range(2)]
    groups = list(Base(30, True))
    loaders = [worker.iterate(whole_steps=True) for worker in workers]
    for step in range(3):
        both = [next(loader) for loader in loaders]
        assert [data for data, _ in both] == groups[2 * step : 2 * step + 2]
        assert [share.samples for _, share in both] == [len(data) for data, _ in both]
        assert both[0][1].total == both[1][1].total == sum(len(data) for data, _ in both)


def test_a_prescribed_batch_is_for_samples_and_not_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "settings", lambda: Settings(number=1, global_batch=8))
    worker = Worker(Sampler(30, 0, 2, base=Base(30, True)), 1, False, False, 0)
    data, _ = next(worker.iterate(whole_steps=True))
    assert data == next(iter(Base(30, True)))


def test_a_learning_rate_that_changes_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream would be read from its beginning again."""
    now = Settings(number=1, global_batch=8)
    monkeypatch.setattr(feeding, "settings", lambda: now)
    worker = Worker(Sampler(60, 0, 1), 8, False, False, 4)
    loader = worker.iterate(whole_steps=True)
    next(loader)
    with mock.patch.object(loader, "_start") as again:
        now = Settings(number=2, global_batch=8, scale=0.5, factor=0.5)
        next(loader)
        assert not again.called


def test_settings_that_change_drop_what_was_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Settings(number=1, global_batch=8)
    monkeypatch.setattr(feeding, "settings", lambda: now)
    workers = [Worker(Sampler(60, rank, 2), 4, False, False, 4) for rank in range(2)]
    loaders = [worker.iterate(whole_steps=True) for worker in workers]
    got = [[next(loader) for loader in loaders]]
    now = Settings(number=2, global_batch=12, local_batch=2)
    got += [[next(loader) for loader in loaders] for _ in range(3)]
    assert [both[0][1].total for both in got] == [8, 12, 12, 12]
    assert [both[0][1].micro for both in got] == [0, 0, 1, 2]
    order = workers[0].sampler.order().take(range(20))
    assert sorted(index for both in got for data, _ in both for index in data) == sorted(order)
    assert workers[0].sampler.position == 20
