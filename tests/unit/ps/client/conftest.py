"""What the tests of the client share."""

from __future__ import annotations

import pytest

from data_service.loader import trainers
from data_service.loader.trainers import TrainerDataSets


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own registry of data sets: a client that holds acknowledgements would do so in later tests."""
    monkeypatch.setattr(trainers, "trainers", TrainerDataSets())
