"""Folders of killed launchers go, those of living ones and of strangers stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edl.adapters import leftovers
from edl.adapters.leftovers import OWNER, own, sweep

OWN = "import sys; from pathlib import Path; from edl.adapters.leftovers import own; own(Path(sys.argv[1]))"


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder whose process is gone."""
    folder = tmp_path / "runtime" / "job-a"
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"x" * 1000)
    subprocess.run([sys.executable, "-c", OWN, str(folder)], check=True)
    assert (folder / OWNER).exists()
    return folder


def test_what_a_killed_launcher_has_left_goes(left: Path) -> None:
    mine, unmarked = left.parent / "job-b", left.parent / "job-c"
    for folder in (mine, unmarked):
        folder.mkdir()
    own(mine)
    assert sweep(left.parent) == [left]
    assert sorted(os.listdir(left.parent)) == ["job-b", "job-c"]
    assert sweep(left.parent) == []


def test_the_newest_may_be_kept(left: Path) -> None:
    folders = [left.parent / f"job-{number}" for number in range(4)]
    for age, folder in enumerate(folders):
        shutil.copytree(left, folder)
        os.utime(folder / OWNER, (1000 - age, 1000 - age))
    shutil.copytree(left, left.parent / "another")
    assert sorted(sweep(left.parent, "job-*", keep=2)) == folders[1:]
    assert sorted(os.listdir(left.parent)) == ["another", "job-0", "job-a"]
    assert sweep(left.parent, "job-*", keep=2) == []


def test_what_somebody_else_has_marked_stays(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert sweep(left.parent) == []


def test_a_number_that_another_process_has_by_now_does_not_keep_it(left: Path) -> None:
    owner = json.loads((left / OWNER).read_text())
    (left / OWNER).write_text(json.dumps({**owner, "pid": os.getpid()}))
    assert sweep(left.parent) == [left]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "began": "1", "where": ["b", "n"]}'])
def test_what_cannot_be_read_stays(left: Path, text: str) -> None:
    (left / OWNER).write_text(text)
    assert sweep(left.parent) == []


def test_processes_of_another_container_are_not_to_be_seen_from_here(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot, namespace = leftovers._where()
    monkeypatch.setattr(leftovers, "_where", lambda: [boot, "pid:[1]"])
    assert sweep(left.parent) == []
    monkeypatch.setattr(leftovers, "_where", lambda: ["another boot", "pid:[1]"])
    assert sweep(left.parent) == []
    monkeypatch.setattr(leftovers, "_where", lambda: ["another boot", namespace])
    assert sweep(left.parent) == [left], "the host has been rebooted since"


@pytest.mark.parametrize("change", [{"host": "another"}, {"host": None}])
def test_processes_of_another_host_are_not_to_be_seen_from_here(left: Path, change: dict[str, object]) -> None:
    """A temporary directory on a file server. The first pid namespace has the same number on all hosts."""
    owner = json.loads((left / OWNER).read_text())
    boot, namespace = owner["where"]
    (left / OWNER).write_text(json.dumps({**owner, "where": [f"not {boot}", namespace], **change}))
    assert sweep(left.parent) == []
