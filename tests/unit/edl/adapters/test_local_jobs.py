"""The notes by which commands find the launchers of this host."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from edl.adapters import leftovers
from edl.adapters.local_jobs import LocalJob, local_jobs
from edl.launch.scaling import nodes_folder
from edl.types import JobId, NodeId


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalJob:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = LocalJob(JobId("job"), NodeId("a"), ("127.0.0.1:2379",))
    made.write()
    return made


def ended() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


def rewrite(note: LocalJob, **changes: Any) -> None:
    note.path.write_text(json.dumps({**json.loads(note.path.read_text()), **changes}))


def test_a_launcher_here_is_found(note: LocalJob) -> None:
    (found,) = local_jobs()
    assert (found.job, found.node, found.endpoints) == ("job", "a", ("127.0.0.1:2379",))


@pytest.mark.parametrize("changes", [{"pid": 0}, {"began": "1"}], ids=["gone", "another with its number"])
def test_the_note_of_a_dead_one_goes(note: LocalJob, changes: dict[str, Any]) -> None:
    rewrite(note, **{**changes, **({"pid": ended()} if "pid" in changes else {})})
    assert local_jobs() == []
    assert not note.path.exists()


@pytest.mark.parametrize("alive", [False, True])
def test_those_of_another_host_stay_and_do_not_count(note: LocalJob, alive: bool) -> None:
    """A temporary directory on a file server: a process here may have the same number."""
    where = json.loads(note.path.read_text()).get("where", ["", "pid:[4026531836]"])
    rewrite(note, where=["its boot", where[1]], host="another", **({} if alive else {"pid": ended()}))
    assert local_jobs() == []
    assert note.path.exists()


@pytest.mark.parametrize("alive", [False, True])
def test_those_of_another_container_stay_and_do_not_count(note: LocalJob, alive: bool) -> None:
    where = json.loads(note.path.read_text()).get("where", ["", ""])
    rewrite(note, where=[where[0], "pid:[1]"], **({} if alive else {"pid": ended()}))
    assert local_jobs() == []
    assert note.path.exists()


@pytest.mark.parametrize("change", [{"_host": "another"}, {"_where": ["its boot", "pid:[1]"]}])
def test_launchers_with_the_same_number_have_notes_of_their_own(
    note: LocalJob, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """The small numbers of containers that share a temporary directory are the same all the time."""
    path = note.path
    with monkeypatch.context() as elsewhere:
        for name, value in change.items():
            elsewhere.setattr(leftovers, name, lambda value=value: value)
        other = LocalJob(JobId("job"), NodeId("b"), ("127.0.0.1:2379",))
        other.write()
        nodes = nodes_folder(JobId("job"))
        assert other.path != path
        other.remove()
    assert [found.node for found in local_jobs()] == ["a"]
    assert nodes != nodes_folder(JobId("job"))


def test_the_name_of_a_note_outlives_a_reboot(note: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else a note from before it would stay for ever if its launcher began again with the same number."""
    path = note.path
    monkeypatch.setattr(leftovers, "boot_id", lambda: "the next")
    assert note.path == path


@pytest.mark.parametrize("alive", [False, True])
def test_of_an_older_edl_only_the_number_is_known(note: LocalJob, alive: bool) -> None:
    plain = json.loads(note.path.read_text())
    for name in ("where", "began", "host"):
        plain.pop(name, None)
    note.path.write_text(json.dumps(plain if alive else {**plain, "pid": ended()}))
    assert [found.node for found in local_jobs()] == (["a"] if alive else [])
    assert note.path.exists() is alive


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1, "where": 3, "began": ""}'])
def test_what_cannot_be_read_is_passed_over(note: LocalJob, text: str) -> None:
    note.path.write_text(text)
    assert local_jobs() == []
