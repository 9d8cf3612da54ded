"""One word for one thing: class names, file names, and words that docs/glossary.md has replaced."""

from __future__ import annotations

import ast
import collections
import functools
import re

import pytest

from tests.unit.test_house_rules import CODE_FOLDERS, ROOT, code_files

PRODUCT = ("edl", "ps", "data_service")
PRODUCT_FOLDERS = tuple(f"{folder}/" for folder in PRODUCT)
TWINS = ("edl/torch/", "edl/paddle/")
"""The same thing for two frameworks has the same name."""
REPLACED = {
    "nursery": "fork server", "nurseries": "fork servers", "flock": "child processes", "desk": "worker server",
    "steward": "checkpoint manager", "vault": "checkpoint storage", "shelf": "buffer table", "stock": "snapshot pool",
    "chores": "background tasks", "wishing": "requests", "plea": "request",
    "surroundings": "Deps", "errand": "request", "parcel": "sub-request", "lane": "pooled connection",
    "chart": "placement", "charted": "placement update", "uniting": "deduplication",
}  # fmt: skip
REPLACED_IN_PRODUCT = {
    "told": "what was given, by its name", "trip": "fan-out", "news": "update", "handed": "passed, unacknowledged",
    "gate": "barrier", "marker": "manifest", "keeper": "in-memory checkpoints", "wish": "request", "kit": "Deps",
    "birth": "start", "patience": "timeout",
}  # fmt: skip
"""English words for which the product has a term of the field. Tests may use them; ``handed_out`` is public."""
HISTORY = ("docs/decisions/", "docs/glossary.md", "CHANGELOG.md", "tests/unit/test_names.py")
ALLOWED = re.compile(r"flock\(|decisions/")
ALLOWED_IN_PRODUCT = re.compile(r"round trip|handed_out")


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


def with_word(word: str, lines: list[tuple[str, str]], allowed: re.Pattern[str] = ALLOWED) -> list[str]:
    """Places of lines with this word, also as a part of a name, of a class or of a constant."""
    forms = rf"(?<![a-z]){word}(?![a-z])|{word.capitalize()}(?![a-z])|(?<![A-Z]){word.upper()}(?![A-Z])"
    old = re.compile(forms)
    some = ((place, line) for place, line in lines if word in line.lower())  # an expression takes ten times as long
    return [place for place, line in some if old.search(line) and not allowed.search(line)]


@pytest.mark.parametrize("word", REPLACED)
def test_words_that_have_been_replaced_do_not_come_back(word: str) -> None:
    lines = with_word(word, prose())
    assert not lines, f"{word!r} is {REPLACED[word]!r} now (docs/glossary.md): {', '.join(lines[:20])}"


@pytest.mark.parametrize("word", REPLACED_IN_PRODUCT)
def test_words_that_the_product_has_replaced_do_not_come_back(word: str) -> None:
    product = [(place, line) for place, line in prose() if place.startswith(PRODUCT_FOLDERS)]
    lines = with_word(word, product, ALLOWED_IN_PRODUCT)
    assert not lines, f"{word!r} is {REPLACED_IN_PRODUCT[word]!r} in the product: {', '.join(lines[:20])}"


@pytest.mark.parametrize("line", ["the kit of a shell", "self._kit = 1", "class MyKit:", "KIT = 1", "A_KIT_S = 1"])
def test_a_replaced_word_is_found(line: str) -> None:
    assert with_word("kit", [("edl/new.py:1", line)]) == ["edl/new.py:1"]


def test_words_that_contain_a_replaced_word_are_not_found() -> None:
    assert with_word("kit", [("edl/new.py:1", "the kitchen, and a toolkit")]) == []


@pytest.mark.parametrize("package", ["edl.torch", "edl.paddle"])
def test_no_module_takes_a_public_name(package: str) -> None:
    """Importing a module sets an attribute of its package: a name that is imported on first use would be the module."""
    folder = ROOT / package.replace(".", "/")
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    exported = re.search(r"^__all__ = \[(.*?)\]", (folder / "__init__.py").read_text(), re.MULTILINE | re.DOTALL)
    assert exported is not None
    assert modules.isdisjoint(re.findall(r'"(\w+)"', exported[1]))
