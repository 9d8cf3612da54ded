"""Which failures of a whole test run continuous integration may forgive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.unstable import CACHE, LAST_FAILED, LOST_WORKERS, unstable

ROOT = Path(__file__).parents[3]
REAL = [
    "tests/process/test_faults.py::test_a_kill[torch]",
    "tests/contract/test_store.py::test_a_write[etcd]",
    "tests/unit/ps/net/test_servers.py::test_two",
]
QUICK = ("-q", "-n", "1", "-p", "no:schemathesis")
"""For a run of pytest with one process of xdist."""


def test_a_few_tests_of_real_processes_may_pass_alone() -> None:
    assert unstable(1, [], REAL) == REAL
    assert unstable(1, [], REAL[:1]) == REAL[:1]


@pytest.mark.parametrize("status", [0, 2, 3, 4, 5, 137])
def test_a_run_that_was_not_completed_is_not_forgiven(status: int) -> None:
    assert unstable(status, [], REAL) == []


def test_a_run_that_lost_a_process_is_not_forgiven() -> None:
    """The tests that the process had still to run are in no list."""
    assert unstable(1, ["gw2"], REAL[:1]) == []


def test_no_test_named_means_that_something_else_failed() -> None:
    assert unstable(1, [], []) == []


@pytest.mark.parametrize(
    "name",
    [
        "tests/unit/edl/master/test_machine.py::test_one",
        "tests/sim/test_golden.py::test_golden",
        "tests/process/test_faults.py",  # it could not be imported
        "elsewhere/tests/process/test_faults.py::test_one",
    ],
)
def test_other_failures_are_not_forgiven(name: str) -> None:
    assert unstable(1, [], [*REAL[:1], name]) == []


def test_many_failures_are_not_forgiven() -> None:
    assert unstable(1, [], [*REAL, REAL[0] + "[again]"]) == []


def ended_with(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run a module of this checkout in another folder; returns its status and lines."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_it_reads_what_pytest_has_written(tmp_path: Path) -> None:
    program = ("-m", "scripts.unstable", "1")
    assert ended_with(tmp_path, *program)[0] == 1
    for name in (LAST_FAILED, LOST_WORKERS):
        (tmp_path / CACHE / name).parent.mkdir(parents=True)
    (tmp_path / CACHE / LAST_FAILED).write_text(json.dumps(dict.fromkeys(REAL, True)))
    assert ended_with(tmp_path, *program) == (0, REAL)
    (tmp_path / CACHE / LOST_WORKERS).write_text('["gw0"]')
    assert ended_with(tmp_path, *program)[0] == 1


def test_a_process_that_dies_is_recorded(tmp_path: Path) -> None:
    """By the hook of edl's tests: if xdist called it no more, every death would be forgiven."""
    (tmp_path / "conftest.py").write_text("from tests.lost_workers import pytest_testnodedown\n")
    (tmp_path / "test_two.py").write_text("import os\ndef test_one(): os._exit(1)\ndef test_two(): pass\n")
    run = ("-m", "pytest", *QUICK, "--max-worker-restart=0", "--rootdir", str(tmp_path), "test_two.py")
    assert ended_with(tmp_path, *run)[0] == 1
    assert json.loads((tmp_path / CACHE / LOST_WORKERS).read_text()) == ["gw0"]
    assert list(json.loads((tmp_path / CACHE / LAST_FAILED).read_text())) == ["test_two.py::test_one"]


def test_a_run_without_a_death_records_none(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.lost_workers import pytest_testnodedown\n")
    (tmp_path / "test_one.py").write_text("def test_one(): assert False\n")
    assert ended_with(tmp_path, "-m", "pytest", *QUICK, "--rootdir", str(tmp_path), "test_one.py")[0] == 1
    assert not (tmp_path / CACHE / LOST_WORKERS).exists()
