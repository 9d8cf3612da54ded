"""Error files as torch writes and reads them: its decorator's are understood here, ours are understood there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.agent.failure_report import error_file
from edl.agent.machine.diagnosis import last_words
from edl.types import NodeId, Rank, Round
from edl.wire.records import Failure

errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")


@errors.record  # type: ignore[untyped-decorator]
def failing() -> None:
    raise ValueError("7 is odd")


def recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(ValueError, match="7 is odd"):
        failing()
    return path.read_text()


def failure(exception: str, traceback: str) -> Failure:
    return Failure(
        NodeId("a"), Round(1), Rank(3), 1, 1, "ended", exception, traceback, pid=4711, time_s=1_700_000_000.5
    )


def test_the_decorators_file_says_what_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = last_words(1, "something else on stderr", recorded(tmp_path / "error.json", monkeypatch))
    assert words.exception == "ValueError: 7 is odd"
    assert words.traceback.startswith("Traceback") and "in failing" in words.traceback
    assert not words.peer_loss


def test_it_is_handed_on_as_torchrun_hands_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = recorded(tmp_path / "worker.json", monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "theirs.json"))
    errors.get_error_handler().dump_error_file(str(tmp_path / "worker.json"), 1)
    ours = json.loads(error_file(failure("", ""), written))
    assert ours == json.loads((tmp_path / "theirs.json").read_text())


def test_torch_reads_the_one_that_we_make(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(error_file(failure("ValueError: 7 is odd", "Traceback (most recent call last):\n  …")))
    read = errors.ProcessFailure(local_rank=1, pid=4711, exitcode=1, error_file=str(path))
    assert read.timestamp == 1_700_000_000
    assert read.message["message"] == "ValueError: 7 is odd"
    report = str(errors.ChildFailedError("train.py", {3: read}))
    assert "Root Cause (first observed failure):" in report and "Traceback (most recent call last):" in report
