"""The file in which a script's imports are kept for its next job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl.worker.learnt import LearntModules, ModuleFile
from edl.worker.learnt_file import LearntFile, installed

LEARNT = LearntModules((ModuleFile("heavy", "/x/heavy.py"),), {"bad": "why"}, {"A": "heavy"}, True, ("HOME",), True)


def file_of(
    cache: Path, target: str = "/job/train.py", imports: tuple[str, ...] = ("heavy",), loaded: tuple[str, ...] = (),
    changes: tuple[str, ...] = (),
) -> LearntFile:  # fmt: skip
    return LearntFile.of("script", target, imports, changes, loaded, {"XDG_CACHE_HOME": str(cache)})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    assert file.load() == LearntModules()
    assert file.save(LEARNT) == ""
    assert file.load() == LEARNT
    assert [path.name for path in Path(file.path).parent.iterdir()] == [Path(file.path).name], "nothing temporary stays"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"modules": 3}', b'{"modules": [{"name": 1}]}', b"\xff\xfe"])
def test_a_damaged_file_is_none(tmp_path: Path, text: bytes) -> None:
    file = file_of(tmp_path)
    file.save(LEARNT)
    Path(file.path).write_bytes(text)
    assert file.load() == LearntModules()
    assert file.save(LEARNT) == "" and file.load() == LEARNT


def test_a_file_of_another_user_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path)
    file.save(LEARNT)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert file.load() == LearntModules()


def test_the_name_depends_on_script_imports_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.setattr("sys.path", [str(site)])
    paths = [file_of(tmp_path).path, file_of(tmp_path, "/job/other.py").path, file_of(tmp_path, imports=()).path]
    paths.append(file_of(tmp_path, loaded=("preloaded",)).path)
    paths.append(file_of(tmp_path, changes=("os.environ['OFFLINE'] = '1'", "import heavy")).path)
    (site / "heavy-1.0.dist-info").mkdir()
    assert installed([str(site)]) == [f"{site}/heavy-1.0.dist-info"]
    paths.append(file_of(tmp_path).path)
    (site / "heavy-1.0.dist-info").rename(site / "heavy-2.0.dist-info")
    paths.append(file_of(tmp_path).path)
    assert len(set(paths)) == 7
    assert file_of(tmp_path).path == paths[-1]


@pytest.mark.parametrize(
    ("environment", "beginning"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/edl/imports/"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/c"}, "/c/edl/imports/"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}, "/home/me/.cache/edl/imports/"),
    ],
)
def test_the_place_is_the_users_cache(environment: dict[str, str], beginning: str) -> None:
    assert LearntFile.of("script", "/job/train.py", (), (), (), environment).path.startswith(beginning)


def test_without_a_home_nothing_is_kept() -> None:
    file = LearntFile.of("script", "/job/train.py", (), (), (), {})
    assert (file.path, file.save(LEARNT), file.load()) == ("", "", LearntModules())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "edl").write_text("a file")
    file = file_of(tmp_path)
    assert file.path in file.save(LEARNT)
    assert file.load() == LearntModules()
