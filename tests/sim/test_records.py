"""Random histories of pushes and the records that they are made of: each record is in the rows exactly once."""

from __future__ import annotations

from typing import Any

import pytest

from data_service.loader import replay
from data_service.loader.lease_client import LeaseClient
from ps.intents import Intent, Intents, home
from tests.sim.lease_net import Violation
from tests.sim.records_world import RecordSim

SEEDS = 24
KNOWN = (11, 16, 19, 29, 2013, 3025)
"""Histories in which a record was there twice: a shard that was begun before was given away at a change of the Master
while its holder went on; an acknowledgement that the Master refused was forgotten though its push was in the rows; who
began in a later epoch claimed nothing after a change of the Master; of a push of several batches some
were acknowledged when its trainer died."""


@pytest.mark.parametrize("seed", [*KNOWN, *(100 + seed for seed in range(SEEDS))])
def test_every_record_is_there_exactly_once(seed: int) -> None:
    RecordSim(seed).play()


@pytest.mark.soak
@pytest.mark.parametrize("begin", range(0, 2000, 100))
def test_many_histories(begin: int) -> None:
    kills = sum(RecordSim(1000 + seed).play().kills for seed in range(begin, begin + 100))
    assert kills > 200


def nothing_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intents, "fence", lambda self, trainer: self.of(home(trainer)).get(trainer, Intent()))


def nothing_redone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "decode", lambda *_: None)


def refusals_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseClient, "_keep_refused", lambda *_: None)


def redone_under_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replay.decode

    def changed(text: str, dataset: str, epoch: int, trainer: int, seq: int) -> Any:
        return real(text, dataset, epoch, trainer, seq + 1)

    monkeypatch.setattr(replay, "decode", changed)


@pytest.mark.parametrize(
    "plant",
    [nothing_fenced, nothing_redone, refusals_forgotten, redone_under_another_number],
    ids=lambda one: str(one.__name__),
)
def test_planted_defects_are_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in (*KNOWN, *range(60)):
            RecordSim(seed).play()
