"""A worker's record of its imports."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.worker import import_record
from edl.worker.import_record import ImportRecord
from edl.worker.learnt import parse_record


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on the search path; all modules and finders are as before afterwards."""
    for name, text in {
        "outer": "import recorded_tests.inner\n",
        "inner": "",
        "broken": "1/0\n",
        "after": "",
    }.items():
        path = tmp_path / "recorded_tests" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "recorded_tests" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders, modules = sys.meta_path[:], set(sys.modules)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def recorded(record: ImportRecord) -> list[tuple[str, bool]]:
    return [(one.module.name, one.nested) for one in parse_record(record.text())]


def test_order_nesting_and_files_are_recorded(library: Path) -> None:
    record = ImportRecord()
    record.begin()
    importlib.import_module("recorded_tests.outer")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("recorded_tests.missing")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("recorded_tests.broken")
    importlib.import_module("recorded_tests.after")
    importlib.import_module("recorded_tests.after")
    assert recorded(record) == [
        ("recorded_tests", False),
        ("recorded_tests.outer", False),
        ("recorded_tests.inner", True),
        ("recorded_tests.broken", False),
        ("recorded_tests.after", False),
    ]
    assert parse_record(record.text())[2].module.origin == str(library / "recorded_tests" / "inner.py")


def test_variables_that_the_process_sets_are_recorded(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ImportRecord()
    record.begin()
    importlib.import_module("recorded_tests")
    monkeypatch.setenv("RECORDED_TESTS", "1")
    importlib.import_module("recorded_tests.inner")
    importlib.import_module("recorded_tests.after")
    kinds = [line.split("\t")[1:3] for line in record.text().splitlines()]
    assert kinds == [
        ["0", "recorded_tests"],
        ["2", "RECORDED_TESTS"],
        ["0", "recorded_tests.inner"],
        ["0", "recorded_tests.after"],
    ]


def test_a_forked_process_records_nothing(library: Path) -> None:
    record = ImportRecord()
    record.begin()
    pid = os.fork()
    if pid == 0:
        importlib.import_module("recorded_tests.inner")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert record.text() == ""
    importlib.import_module("recorded_tests.after")
    assert [name for name, _ in recorded(record)] == ["recorded_tests", "recorded_tests.after"]


def test_another_process_reads_what_is_written(library: Path) -> None:
    record = ImportRecord()
    pid = os.fork()
    if pid == 0:
        record.begin()
        importlib.import_module("recorded_tests.inner")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [name for name, _ in recorded(record)] == ["recorded_tests", "recorded_tests.inner"]
    record.clear()
    assert (record.length(), record.text()) == (0, "")


def test_a_full_record_stops_and_imports_go_on(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_record, "SIZE_BYTES", len(str(library)) + 60)
    record = ImportRecord()
    record.begin()
    importlib.import_module("recorded_tests.inner")
    importlib.import_module("recorded_tests.after")
    assert [name for name, _ in recorded(record)] == ["recorded_tests"]
