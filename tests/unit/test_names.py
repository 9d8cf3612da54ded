"""One word for one thing: class names, file names, and words that docs/glossary.md has replaced."""

from __future__ import annotations

import ast
import collections
import functools
import re

import pytest

from tests.unit.test_house_rules import CODE_FOLDERS, ROOT, code_files

PRODUCT = ("edl", "ps", "data_service")
TWINS = ("edl/torch/", "edl/paddle/")
"""The same thing for two frameworks has the same name."""
REPLACED = {
    "nursery": "fork server", "nurseries": "fork servers", "flock": "child processes", "desk": "worker server",
    "steward": "checkpoint manager", "vault": "checkpoint storage", "shelf": "buffer table", "stock": "snapshot pool",
    "chores": "background tasks", "wishing": "requests", "plea": "request",
    "surroundings": "Deps", "errand": "request", "parcel": "sub-request", "lane": "pooled connection",
    "chart": "placement", "charted": "placement update", "uniting": "deduplication",
}  # fmt: skip
HISTORY = ("docs/decisions/", "docs/glossary.md", "CHANGELOG.md", "tests/unit/test_names.py")
ALLOWED = re.compile(r"flock\(|decisions/")


@functools.lru_cache(maxsize=1)
def class_names() -> dict[str, tuple[str, ...]]:
    """Files by the classes that they define; twins count once."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for path in code_files(*PRODUCT):
        name = str(path.relative_to(ROOT))
        for twin in TWINS:
            name = name.replace(twin, "edl/FRAMEWORK/")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(name)
    return {name: tuple(sorted(files)) for name, files in found.items()}


def shared_in(names: dict[str, tuple[str, ...]]) -> set[str]:
    """Names that more than one file defines."""
    return {name for name, files in names.items() if len(files) > 1}


def test_no_class_name_is_used_twice() -> None:
    names = class_names()
    shared = {name: names[name] for name in shared_in(names)}
    assert not shared, f"one class name in several files: {shared}. Rename the newer class after what it is"


def test_a_taken_name_is_found() -> None:
    names = class_names()
    taken = next(name for name, files in sorted(names.items()) if len(files) == 1)
    more = {**names, taken: (*names[taken], "edl/another.py")}
    assert shared_in(more) - shared_in(names) == {taken}


@functools.lru_cache(maxsize=1)
def prose() -> list[tuple[str, str]]:
    """Lines of code and docs, each with its place."""
    pages = [path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.parts)]
    named = [(path, str(path.relative_to(ROOT))) for path in [*code_files(*CODE_FOLDERS), *pages]]
    return [
        (f"{name}:{number}", line)
        for path, name in named
        if not name.startswith(HISTORY)
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


@pytest.mark.parametrize("word", REPLACED)
def test_words_that_have_been_replaced_do_not_come_back(word: str) -> None:
    old = re.compile(rf"(?<![a-z]){word}(?![a-z])|{word.capitalize()}(?![a-z])")
    lines = [place for place, line in prose() if old.search(line) and not ALLOWED.search(line)]
    assert not lines, f"{word!r} is {REPLACED[word]!r} now (docs/glossary.md): {', '.join(lines[:20])}"
