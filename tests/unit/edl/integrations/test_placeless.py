"""A worker gives up its place until it trains."""

from __future__ import annotations

import os

import pytest

from edl.errors import StateError
from edl.integrations.placeless import give_up_place, is_worker
from edl.worker import session as sessions


def test_only_the_worker_itself_is_one() -> None:
    assert not is_worker({})
    assert is_worker({"EDL_AGENT": "address"})
    assert is_worker({"EDL_AGENT": "address", "EDL_WORKER_PID": str(os.getpid())})
    assert not is_worker({"EDL_AGENT": "address", "EDL_WORKER_PID": str(os.getpid() + 1)}), "a process that loads data"


def test_what_is_left_is_the_environment_of_a_process_started_ahead_of_its_world() -> None:
    environment = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1", "EDL_ROUND": "1",
        "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "EDL_AGENT": "address", "HOME": "/home",
        "OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2", "MV2_COMM_WORLD_SIZE": "2",
    }  # fmt: skip
    give_up_place(environment, "EDLCallback", grouped=False)
    assert environment == {"EDL_AGENT": "address", "HOME": "/home"}


def test_a_worker_that_was_started_ahead_of_its_world_still_warms_its_device_up() -> None:
    environment = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "EDL_AGENT": "address"}
    for _ in range(2):
        give_up_place(environment, "EDLModel", grouped=False)
        assert environment == {"EDL_AGENT": "address", "EDL_AHEAD_LOCAL_RANK": "3"}


def test_a_process_that_has_a_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = sessions.Session(None, {})
    alone.place()
    monkeypatch.setattr(sessions, "_current", alone)
    environment = {"RANK": "1"}
    with pytest.raises(StateError, match=r"EDLCallback must be created before .* at the top of the script"):
        give_up_place(environment, "EDLCallback", grouped=False)
    assert environment == {"RANK": "1"}


def test_a_process_with_a_group_is_refused() -> None:
    environment = {"PADDLE_TRAINER_ID": "1"}
    with pytest.raises(StateError, match="EDLModel must be created before the process has a place"):
        give_up_place(environment, "EDLModel", grouped=True)
    assert environment == {"PADDLE_TRAINER_ID": "1"}
