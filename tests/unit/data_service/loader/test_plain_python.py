"""Loaders in a script without a launcher: the lease machine is in the same process."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from data_service.leases import lease_table
from data_service.loader.loader import Loader
from data_service.loader.worker_context import SessionContext, WorkerContext
from edl.errors import UnreachableData
from edl.worker import session as sessions
from edl.worker.session import Session
from tests.support.data_fixture import on_threads, write_ipc

MODES = pytest.mark.parametrize("mode", ["steps", "independent"])


class PlainData(Loader):
    def _make_context(self) -> WorkerContext:
        return SessionContext(None)  # type: ignore[arg-type]

    def _tensor(self, array: Any) -> Any:
        return array


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_current", Session(None, {}))
    monkeypatch.setattr(lease_table, "RETRY_WAIT_S", 0.0)


def user_data(path: Path, read: Any, shards: list[tuple[int, int, int]], mode: str) -> PlainData:
    path.write_bytes(bytes(10))
    options = {"read": read, "shards": lambda file: shards}
    return PlainData("d", str(path), format="user", options=options, batch_size=2, shuffle=False, mode=mode)


@MODES
def test_each_record_comes_once(tmp_path: Path, mode: str) -> None:
    write_ipc(tmp_path / "a.arrow", 0, 50)
    data = PlainData("d", str(tmp_path / "a.arrow"), batch_size=8, mode=mode)
    for epoch in (1, 2):
        assert sorted(int(one) for batch in data for one in batch["id"]) == list(range(50))
        assert data.epoch == epoch


@MODES
def test_data_that_cannot_be_reached_end_the_script(
    tmp_path: Path, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The failed attempts are reported, too."""
    attempts = []

    def read(file: str, begin: int, end: int) -> dict[str, list[int]]:
        if begin:
            attempts.append(begin)
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        return {"id": [0, 1]}

    data = user_data(tmp_path / "a.bin", read, [(0, 2, 2), (2, 4, 2)], mode)
    for _ in range(2):  # again for a script that catches the error
        (error,) = on_threads(1, lambda rank: list(data))
        assert isinstance(error, UnreachableData) and "no answer" in str(error) and "(3 attempts" in str(error)
        assert len(attempts) == 3
    assert "edl: data d: worker 0 on local could not read" in capfd.readouterr().err


def test_a_skipped_shard_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def read(file: str, begin: int, end: int) -> dict[str, list[int]]:
        if begin:
            raise OSError("image file is truncated")
        return {"id": [0, 1]}

    data = user_data(tmp_path / "a.bin", read, [(0, 2, 2), (2, 4, 2)], "steps")
    assert [int(one) for batch in data for one in batch["id"]] == [0, 1]
    said = capfd.readouterr().err
    assert said.count("is skipped from now on: 3 attempts to read it failed") == 1 and "as unreadable" not in said
