"""Scripts that are no source files: what they are taken for, and that they run as Python runs them."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import zipapp
import zipfile
from pathlib import Path

import pytest

from edl.errors import ScriptError
from edl.launch.origin import origin_of
from edl.launch.script_check import worker_command
from edl.ports import CommandKind, WorkerCommand
from edl.wire.fork_server import WorkerOrder
from edl.worker.bootstrap import _namesakes
from edl.worker.script_kind import ScriptKind, kind_of, script_folder
from edl.worker.spawn import command_line
from edl.worker.warm import find_plan

MAIN = (
    "import sys\nimport helper\n"
    "print(sys.argv, sys.path[0], __name__, __file__, __spec__ is None, type(__loader__).__name__, helper.VALUE)\n"
)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the same program as a source, a compiled file, a folder and an archive."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / "__main__.py").write_text(MAIN)
    (folder / "helper.py").write_text("VALUE = 7\n")
    (tmp_path / "helper.py").write_text("VALUE = 8\n")
    (tmp_path / "train.py").write_text(MAIN)
    py_compile.compile("train.py", "train.pyc")
    (tmp_path / "compiled").write_bytes((tmp_path / "train.pyc").read_bytes())
    zipapp.create_archive(folder, tmp_path / "app.pyz", interpreter="/usr/bin/env python3")
    (tmp_path / "train").write_bytes((tmp_path / "app.pyz").read_bytes())
    return tmp_path


KINDS = {
    "train.py": ScriptKind.FILE,
    "train.pyc": ScriptKind.COMPILED,
    "compiled": ScriptKind.COMPILED,
    "pack": ScriptKind.FOLDER,
    "app.pyz": ScriptKind.ARCHIVE,
    "train": ScriptKind.ARCHIVE,
}


@pytest.mark.parametrize(("name", "kind"), [*KINDS.items(), ("none.pyz", ScriptKind.FILE)])
def test_the_content_decides(name: str, kind: ScriptKind, scripts: Path) -> None:
    assert kind_of(name) is kind
    inside = kind in (ScriptKind.FOLDER, ScriptKind.ARCHIVE)
    assert script_folder(name) == str(scripts / name if inside else scripts)


def test_a_text_with_the_name_of_an_archive_is_source(scripts: Path) -> None:
    (scripts / "odd.zip").write_text("print(1)\n")
    (scripts / "empty.py").touch()
    assert kind_of("odd.zip") is kind_of("empty.py") is ScriptKind.FILE


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("name", KINDS)
def test_a_worker_runs_it_as_python_does(name: str) -> None:
    worker, python = command_line(WorkerOrder("script", name, ("--lr",))), [sys.executable, name, "--lr"]
    found, expected = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in (worker, python)
    )
    assert found == expected


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("name", KINDS)
def test_the_launcher_accepts_it(name: str) -> None:
    assert worker_command(False, False, name, ("--lr",)) == WorkerCommand(CommandKind.SCRIPT, name, ("--lr",))


def test_what_cannot_run_is_refused_with_its_place(scripts: Path) -> None:
    (scripts / "pack" / "__main__.py").write_text("import\n")
    zipapp.create_archive("pack", "bad.pyz")
    (scripts / "old.pyc").write_bytes(b"\0\0\r\n" + bytes(20))
    (scripts / "cut.pyc").write_bytes((scripts / "train.pyc").read_bytes()[:10])
    (scripts / "empty").mkdir()
    with zipfile.ZipFile("no-main.zip", "w") as archive:
        archive.writestr("other.py", "1")
    for name, text in {
        "pack": "pack/__main__.py, line 1: invalid syntax",
        "bad.pyz": "bad.pyz/__main__.py, line 1: invalid syntax",
        "old.pyc": "old.pyc: bad magic number",
        "cut.pyc": "cut.pyc: reached EOF",
        "empty": "empty: this folder has no __main__.py",
        "no-main.zip": "no-main.zip: this archive has no __main__.py",
        "none.pyz": "none.pyz: No such file",
    }.items():
        with pytest.raises(ScriptError) as refused:
            worker_command(False, False, name, ())
        assert str(refused.value).startswith(text)


def test_only_a_compiled_main_is_enough(scripts: Path) -> None:
    (scripts / "pack" / "__main__.py").unlink()
    (scripts / "pack" / "__main__.pyc").write_bytes((scripts / "train.pyc").read_bytes())
    with zipfile.ZipFile("compiled.zip", "w") as archive:
        archive.write("pack/__main__.pyc", "__main__.pyc")
    for name in ("pack", "compiled.zip"):
        assert worker_command(False, False, name, ()).target == name


def test_what_it_imports_is_imported_ahead(scripts: Path) -> None:
    (scripts / "pack" / "deep").mkdir()
    (scripts / "pack" / "deep" / "__init__.py").write_text("from . import model\n")
    (scripts / "pack" / "deep" / "model.py").write_text("import torch\n")
    (scripts / "pack" / "helper.py").write_text("import deep\n")
    zipapp.create_archive("pack", "own.pyz", compressed=True)
    for name in ("pack", "own.pyz"):
        found = find_plan("script", name, ())
        assert "torch" in found.found and "torch" in found.optional
    assert find_plan("script", "train.pyc", ()).found == frozenset()


def test_a_module_of_its_own_hides_a_library_that_is_loaded_already(scripts: Path) -> None:
    import click

    (scripts / "pack" / "click.py").write_text("")
    zipapp.create_archive("pack", "own.pyz")
    for name in ("pack", "own.pyz"):
        assert click.__name__ in _namesakes(str(scripts / name))
        assert "json" not in _namesakes(str(scripts / name))


def test_the_same_archive_is_the_same_script_whenever_it_was_built(scripts: Path) -> None:
    def digest(name: str) -> str:
        return origin_of(WorkerCommand(CommandKind.SCRIPT, name), "n", "").digest

    first = digest("app.pyz")
    os.utime("pack/__main__.py", (10**9, 10**9))
    zipapp.create_archive("pack", "later.pyz")
    assert (scripts / "later.pyz").read_bytes() != (scripts / "app.pyz").read_bytes()
    assert first and digest("later.pyz") == first
    assert digest("pack") == digest("train.py"), "the text of its __main__"
    (scripts / "pack" / "helper.py").write_text("VALUE = 9\n")
    zipapp.create_archive("pack", "other.pyz")
    assert digest("other.pyz") != first
    assert digest("train.pyc") == ""
