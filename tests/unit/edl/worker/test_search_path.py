"""Folders that a script adds to where its modules are found, from its source text alone."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from edl.worker.preload import CONNECTING, ImportPlan
from edl.worker.search_path import Added, added_folders
from edl.worker.warm import find_plan

PADDLECLAS = """
from __future__ import absolute_import
import os
import sys
__dir__ = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.abspath(os.path.join(__dir__, '../')))

from ppcls.utils import config
from ppcls.engine.engine import Engine
"""


def added(text: str) -> list[tuple[str, bool]]:
    found = added_folders(f"import os, sys\nfrom pathlib import Path\n{text}", "/w/tools/train.py", "/run")
    return [(one.folder, one.first) for one in found]


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("sys.path.append('lib')", "/run/lib"),
        ("sys.path.append('/lib')", "/lib"),
        ("sys.path.append(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))", "/w"),
        ("here = os.path.dirname(__file__)\nsys.path.append(here + '/..')", "/w"),
        ("import os.path as osp\nsys.path.append(osp.join(osp.dirname(__file__), '..', 'src'))", "/w/src"),
        ("sys.path.append(str(Path(__file__).resolve().parents[1] / 'src'))", "/w/src"),
        ("ROOT = Path(__file__).parent.parent\nif str(ROOT) not in sys.path:\n    sys.path.append(str(ROOT))", "/w"),
        ("sys.path.append(os.getcwd())", "/run"),
        ("sys.path += ['/lib']", "/lib"),
    ],
)
def test_what_scripts_write(text: str, folder: str) -> None:
    assert added(text) == [(folder, False)]


def test_what_is_inserted_comes_before_libraries() -> None:
    assert added("sys.path.insert(0, '/lib')\nsys.path.append('/more')") == [("/lib", True), ("/more", False)]


@pytest.mark.parametrize(
    "text",
    [
        "sys.path.append(find())",
        "sys.path.append(os.environ['ROOT'])",
        "sys.path.append(os.path.dirname(__file__, 'x'))",
        "here = '/a'\nhere = find()\nsys.path.append(here)",
        "sys.path.append(*folders)",
        "sys.path.append()",
        "def f():\n    sys.path.append('/lib')",
        "x = (",
    ],
)
def test_what_cannot_be_told_is_passed_over(text: str) -> None:
    assert added(text) == []


def test_a_folder_that_is_added_twice_counts_once() -> None:
    assert added_folders("sys.path.append('a')\n" * 2, "t.py", "/r") == (Added("/r/a", False),)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The way in which PaddleClas, and many a repository, is laid out."""
    for name, text in {
        "tools/train.py": PADDLECLAS,
        "ppcls/__init__.py": "",
        "ppcls/utils/__init__.py": "from . import config",
        "ppcls/utils/config.py": "import yaml",
        "ppcls/engine/__init__.py": "",
        "ppcls/engine/engine.py": "import paddle",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("kind", "target"), [("script", "tools/train.py"), ("module", "tools.train")])
def test_a_framework_behind_a_package_that_the_script_has_to_look_for(project: Path, kind: str, target: str) -> None:
    assert find_plan(kind, target, ()).required == ("paddle",)
    assert "yaml" in find_plan(kind, target, ()).optional


def test_a_folder_of_libraries_hides_none(project: Path) -> None:
    libraries = project / "site"
    for name in ("torch", "yaml"):
        (libraries / name).mkdir(parents=True)
        (libraries / name / "__init__.py").write_text("")
    script = project / "tools" / "train.py"
    script.write_text(f"import sys\nsys.path.append({os.fspath(libraries)!r})\nimport torch, yaml\n")
    assert find_plan("script", str(script), ()).required == ("torch",)
    script.write_text(f"import sys\nsys.path.insert(0, {os.fspath(libraries)!r})\nimport torch, yaml\n")
    found = find_plan("script", str(script), ())
    assert found == ImportPlan((), (CONNECTING,)), "the script's own come first there"
    script.write_text(f"import sys\nsys.path.insert(0, {sysconfig.get_path('purelib')!r})\nimport yaml\n")
    assert find_plan("script", str(script), ()).optional == ("yaml",)
