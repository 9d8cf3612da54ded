"""The site of the documentation: its navigation has every page, its reference every public name; nothing is loaded."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.site_parts import navigation, offline
from tests.unit.test_house_rules import ROOT

API = ROOT / "docs" / "api"
DIRECTIVE = re.compile(r"^ *\.\. (auto|py:)(\w+):: (.*(?:\n {14}\S+)*)", re.MULTILINE)
MEMBERS = re.compile(r"^\.\. automodule:: (\S+)\n(?: +:.*\n)*? +:members:", re.MULTILINE)


def described() -> set[str]:
    """The dotted names in the reference. Of a module with all its members: the names in its ``__all__``."""
    found: set[str] = set()
    for path in API.glob("*.rst"):
        text = path.read_text()
        for _, kind, names in DIRECTIVE.findall(text):
            found |= set() if kind == "module" else {name.partition("(")[0] for name in names.split()}
        for module in MEMBERS.findall(text):
            found |= {f"{module}.{name}" for name in public(module)}
    return found


def source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public(module: str) -> list[str]:
    """``__all__`` of a module, or its classes without an underscore, read without importing it."""
    tree = ast.parse(source(module).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


PUBLIC = (
    *("edl", "edl.errors", "edl.exit_codes", "edl.launch.api", "edl.paddle", "edl.paddle.ps", "edl.torch"),
    *("edl.torch.ps", "edl.integrations.fleet", "ps.export"),
)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    names = described()
    assert [name for name in public(module) if f"{module}.{name}" not in names] == []


def test_the_reference_describes_what_exists() -> None:
    by_module = {module: public(module) for module in PUBLIC}
    wrong = []
    for name in described():
        module, _, last = name.rpartition(".")
        if module in by_module:
            wrong += [] if last in by_module[module] else [name]
        elif module.endswith("lightning"):  # made at import
            wrong += [] if re.search(rf"\b{last}\b", source(module).read_text()) else [name]
        else:
            tree = ast.parse(source(module).read_text())
            found = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
            wrong += [] if last in found else [name]
    assert wrong == []


def test_names_that_the_guides_import_are_in_the_reference() -> None:
    names = described()
    used: set[str] = set()
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.*")]:
        if path.suffix in (".md", ".py"):
            for module, imported in re.findall(
                r"^\s*from ((?:edl|ps|data_service)[\w.]*) import ([\w, ]+)", path.read_text(), re.MULTILINE
            ):
                used |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    used -= {"edl.integrations.fleet"}  # a module
    assert sorted(used - names) == []
    assert len(used) > 8


def test_the_page_of_the_reference_lists_its_parts() -> None:
    listed = re.findall(r"\]\(api/(\S+)\.rst\)", (ROOT / "docs" / "reference.md").read_text())
    assert sorted(listed) == sorted(path.stem for path in API.glob("*.rst"))


def test_the_navigation_has_each_page_once() -> None:
    pages = list(navigation.pages())
    there = {navigation.name_of(path) for pattern in navigation.SOURCES for path in ROOT.glob(pattern)}
    there |= {navigation.name_of(ROOT / name) for name in navigation.OTHER_SOURCES}
    assert len(pages) == len(set(pages))
    assert set(pages) == there


def test_every_page_of_the_documentation_is_a_source() -> None:
    pages = {navigation.name_of(path) for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")}
    assert pages <= set(navigation.pages())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<script src="https://cdn.example/a.js"></script>', ["https://cdn.example/a.js"]),
        ('<link rel=stylesheet href="//fonts.example/css">', ["//fonts.example/css"]),
        ("<style>@import 'http://a.example/x.css'; b { src: url(https://c.example/d.woff) }</style>",
         ["http://a.example/x.css", "https://c.example/d.woff"]),
        ('<p style="background: url(https://e.example/f.png)">', ["https://e.example/f.png"]),
        ('<a href="https://example.org">elsewhere</a><img src="_images/a.png"><script src="_static/b.js">', []),
    ],
)  # fmt: skip
def test_what_a_page_loads_from_elsewhere_is_found(text: str, found: list[str]) -> None:
    assert offline.loaded_by(text) == found


@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, ("sphinx", "myst_parser", "furo"))), reason="needs edl[docs]")
def test_the_site_builds(tmp_path: Path) -> None:
    """Every link, anchor and name resolves: Sphinx warns otherwise, and a warning is an error."""
    words = [sys.executable, "-m", "scripts.build_site", f"--out={tmp_path}", "--check"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
