"""Positions in a checkpoint of data sets that are not open in the process that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_service.ledger import Ledger
from data_service.loader import trainers
from data_service.loader.trainers import TrainerDataSets
from tests.support.data_fixture import Bench, write_ipc
from tests.unit.data_service.loader.test_independent import ledger_records, make


@pytest.fixture
def files(tmp_path: Path) -> str:
    write_ipc(tmp_path / "0.arrow", 0, 600)
    return str(tmp_path / "*.arrow")


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "trainers", TrainerDataSets())


def test_a_data_set_that_is_not_open_yet_keeps_the_position_of_the_last_checkpoint() -> None:
    trainers.begin_from("cut-1", {"d": "position"}, history=1)
    assert trainers.name_positions("cut-2") == {"d": "position"}


@pytest.mark.parametrize("again", [False, True])
def test_a_closed_data_set_has_its_present_position_in_a_checkpoint(bench: Bench, files: str, again: bool) -> None:
    """Other trainers may still read it; a second object of this name may be open here."""
    bench.begin(2)
    data, other = make(bench, files, acknowledge="next"), make(bench, files, 1, acknowledge="next")
    next(iter(data))
    data.close()
    assert Ledger.decode(trainers.name_positions("cut-1")["d"]).records == 8
    steps = iter(other)
    next(steps), next(steps)
    other.done()
    if again:
        next(iter(make(bench, files, acknowledge="next")))
    other.settle()
    del data
    assert Ledger.decode(trainers.name_positions("cut-2")["d"]).records == 24
    assert ledger_records(bench) == 24
    assert list(bench.machine.sets["d"].independent.commits) == ["cut-1", "cut-2"]
    next(steps)
    other.close()
