"""Several streams on one console: what is written for each of their pieces."""

from __future__ import annotations

import io
import os

import pytest

from edl.agent.workers.console_lines import ConsoleLines, place_of


def shown(*pieces: tuple[str, bytes], prefixes: bool = True) -> bytes:
    """On one console. A piece is an owner, whose name is the prefix, and text."""
    lines = ConsoleLines()
    return b"".join(lines.shown(1, owner, owner.encode() if prefixes else b"", text) for owner, text in pieces)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"one\n\ntwo\n"], b">one\n>\n>two\n"),
        ([b"Name: ", b"edl\nnext\n"], b">Name: edl\n>next\n"),
        ([b"\r10%", b"\r20%", b"\r30%\n"], b"\r>10%\r>20%\r>30%\n"),
        ([b"10%", b"\r", b"20%\n"], b">10%\r>20%\n"),
        ([b"one\r\ntwo", b"\r", b"\n"], b">one\r\n>two\r\n"),
    ],
)
def test_what_is_at_the_left_margin_has_the_prefix(pieces: list[bytes], text: bytes) -> None:
    assert shown(*((">", piece) for piece in pieces)) == text
    assert shown(*((">", piece) for piece in pieces), prefixes=False) == b"".join(pieces)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([("1", b"10%"), ("2", b"hello\n"), ("1", b"\r20%")], b"110%\n2hello\n\r120%"),
        ([("1", b"10%\r"), ("2", b"hello\n")], b"110%\r\n2hello\n"),
        ([("1", b"wait"), ("2", b"wait"), ("1", b" done\n"), ("2", b"\n")], b"1wait\n2wait\n1 done\n"),
        ([("1", b"wait"), ("2", b"a\n"), ("1", b"\nb\n")], b"1wait\n2a\n1b\n"),
        ([("1", b"\r10%"), ("2", b"\r20%")], b"\r110%\n\r220%"),
    ],
)
def test_a_line_of_another_stream_ends_an_unfinished_one(pieces: list[tuple[str, bytes]], text: bytes) -> None:
    assert shown(*pieces) == text


def test_bars_without_prefix_are_drawn_in_place() -> None:
    assert shown(("1", b"\r10%"), ("2", b"\r20%"), ("1", b"\r30%"), prefixes=False) == b"\r10%\r20%\r30%"
    assert shown(("1", b"\r10%"), ("2", b"hello\n"), prefixes=False) == b"\r10%\nhello\n"


def test_the_launchers_own_line_begins_at_the_left_margin() -> None:
    lines = ConsoleLines()
    assert lines.interrupt(1) == b""
    lines.shown(1, "1", b"", b"10%")
    assert (lines.interrupt(2), lines.interrupt(1), lines.interrupt(1)) == (b"", b"\n", b"")
    assert lines.shown(1, "1", b">", b"\n") == b""
    assert lines.shown(1, "1", b">", b"20%\n") == b">20%\n"


def test_a_line_that_its_owner_has_left_unfinished_is_ended_and_nothing_is_kept_of_the_owner() -> None:
    lines = ConsoleLines()
    lines.shown(1, "1", b"1", b"last words")
    lines.forget("1")
    assert lines.shown(1, "2", b"2", b"hello\n") == b"\n2hello\n"
    assert (lines._ended, lines._unfinished) == (set(), {})
    lines.shown(1, "1", b"1", b"x")
    lines.interrupt(1)
    lines.forget("1")
    assert lines._ended == set()


def test_the_same_file_is_the_same_console() -> None:
    memory, (reading, writing) = io.BytesIO(), os.pipe()
    other = os.dup(writing)
    with open(reading, "rb") as end, open(writing, "wb") as one, open(other, "wb") as two:
        assert place_of(one) == place_of(two) != place_of(memory)
        assert place_of(end) == place_of(one), "both ends of a pipe are one file"
    assert place_of(memory) == place_of(memory) != place_of(io.BytesIO())
