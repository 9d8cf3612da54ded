"""Messages that the documentation quotes are messages of the program."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from edl.agent.workers.hang_report import ALARM
from edl.exit_codes import ExitCode
from edl.watch.table import BY_NAME
from tests.unit.test_house_rules import ROOT, code_files

END = "\0"
"""Stands between two texts, and in no message."""
LEAST = 4
"""Characters of the shortest part of a message that one text of the program has to end or to begin with."""
COMMAND = re.compile(r"edl [a-z]+")


def page(name: str) -> str:
    """A page of the documentation."""
    return (ROOT / "docs" / name).read_text()


def texts(source: str) -> Iterator[tuple[str, bool]]:
    """Each text of a program, docstrings excepted, between the fields of f-strings; and whether a field follows it."""
    tree = ast.parse(source)
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for index, part in enumerate(node.values):
                if isinstance(part, ast.Constant):
                    yield str(part.value), index + 1 < len(node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (notes | inside):
            yield node.value, False


class Program:
    """The texts of a program, and which messages can be made of them."""

    def __init__(self, sources: Iterator[str]) -> None:
        found = [text for source in sources for text in texts(source)]
        self._all = END + END.join(text for text, _ in found) + END
        self._open = END.join(text for text, field in found if field) + END

    def says(self, part: str) -> bool:
        """Whether one text contains this part of a message, or it goes over from a text to what fills its field."""
        if part in self._all:
            return True
        splits = range(LEAST, len(part))
        return any(part[:at] + END in self._open and self._begins(part[at:]) for at in splits)

    def _begins(self, part: str) -> bool:
        if END + part in self._all:
            return True
        return any(END + part[:at] + END in self._all and self._begins(part[at:]) for at in range(LEAST, len(part)))


@functools.cache
def program() -> Program:
    files = (path for path in code_files("edl", "ps", "data_service") if "testing" not in path.parts)
    return Program(path.read_text() for path in files)


def unknown(message: str, known: Program) -> list[str]:
    """The parts of a message, between its ``…``, that the program does not say."""
    parts = (part.strip() for part in message.split("…"))
    return [part for part in parts if len(part) >= LEAST and not known.says(part)]


def seen(table_rows: str) -> list[str]:
    """The messages in the first column of each table: those in backticks, without names of commands."""
    cells = re.findall(r"^\| (.*?) \|", table_rows, re.MULTILINE)
    found = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    return [message for message in found if not COMMAND.fullmatch(message)]


def headings() -> list[str]:
    """The messages in bold type that begin the paragraphs of docs/troubleshooting.md."""
    return re.findall(r"\*\*`([^`]+)`\*\*", page("troubleshooting.md"))


def reasons(name: str) -> list[str]:
    """The messages in the tables of a page whose first column is called ``reason``."""
    tables = re.findall(r"^\| reason \|.*\n(?:\|.*\n)+", page(name), re.MULTILINE)
    return [message for table in tables for message in seen(table)]


MESSAGES = [*seen(page("failures.md")), *headings()]
REASONS = [*reasons("checkpoints.md"), *reasons("parameter-servers.md")]


@pytest.mark.parametrize("message", [*MESSAGES, *REASONS])
def test_every_quoted_message_is_one_of_the_program(message: str) -> None:
    assert unknown(message, program()) == []


def test_no_message_is_explained_twice() -> None:
    assert sorted({message for message in MESSAGES if MESSAGES.count(message) > 1}) == []


def test_the_pages_about_failures_quote_many_messages() -> None:
    assert len(seen(page("failures.md"))) > 100
    assert len(headings()) > 30
    assert len(REASONS) > 12


def test_a_message_that_the_program_does_not_say_is_found() -> None:
    source = '"""The store sings."""\nwhy = f"silent for {1} s (lease ended)"\nprint(f"node {1} lost: {why}; bye")\n'
    small = Program(iter([source]))
    for right in ("node … lost: …", "lost: silent for … s (lease ended)", "silent for … s", "lost: …; bye"):
        assert unknown(right, small) == []
    for wrong in ("node … left: …", "lost: silent since …", "The store sings", "silent for … s: bye"):
        assert unknown(wrong, small) != []


def test_every_alarm_is_on_the_page_about_failures() -> None:
    assert {*BY_NAME, ALARM} - set(seen(page("failures.md"))) == set()


def test_every_status_of_a_failure_is_on_one_of_the_pages() -> None:
    pages = page("failures.md") + page("troubleshooting.md")
    named = {int(number) for number in re.findall(r"(?:status |\()(\d+)\b", pages)}
    on_request = {ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.TERMINATED}
    assert set(ExitCode) - on_request - named == set()
