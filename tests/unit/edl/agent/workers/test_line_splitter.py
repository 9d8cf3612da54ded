"""What is passed on of a worker's output, and when. The clock is the test's."""

from __future__ import annotations

import random

import pytest

from edl.agent.workers.line_splitter import LineSplitter, OutputPiece

HOLD_S = 0.2
MOST = 20


def splitter() -> LineSplitter:
    return LineSplitter(HOLD_S, MOST)


@pytest.mark.parametrize(
    ("data", "text", "lines", "line"),
    [
        (b"one\ntwo\n", b"one\ntwo\n", [b"one", b"two"], b""),
        (b"one\ntw", b"one\n", [b"one"], b"tw"),
        (b"tw", b"", [], b"tw"),
        (b"\r10%", b"", [], b"\r10%"),
        (b"\r10%\r20%", b"\r10%", [], b"\r10%\r20%"),
        (b"one\n10%\r20%", b"one\n10%", [b"one"], b"10%\r20%"),
        (b"one\r\ntwo\r", b"one\r\ntwo", [b"one\r"], b"two\r"),
        (b"x" * (MOST + 1), b"x" * (MOST + 1), [b"x" * (MOST + 1)], b""),
    ],
)
def test_whole_lines_and_earlier_states_of_a_bar_are_passed_on_at_once(
    data: bytes, text: bytes, lines: list[bytes], line: bytes
) -> None:
    it = splitter()
    assert it.feed(data, 0) == OutputPiece(text, lines)
    assert it.line == line
    assert it.due_s == (HOLD_S if line else None)


def test_the_rest_of_a_line_is_passed_on_when_it_is_due_and_not_again() -> None:
    it = splitter()
    assert it.feed(b"Name: ", 5) == OutputPiece()
    assert it.flush(5 + HOLD_S / 2) == OutputPiece()
    assert it.flush(5 + HOLD_S) == OutputPiece(b"Name: ")
    assert it.due_s is None and it.flush(99) == OutputPiece()
    assert it.line == b"Name: "
    assert it.feed(b"edl\n", 100) == OutputPiece(b"edl\n", [b"Name: edl"])


def test_a_line_that_grows_steadily_does_not_wait_for_a_pause() -> None:
    it = splitter()
    it.feed(b".", 0)
    it.feed(b".", HOLD_S * 0.9)
    assert it.due_s == HOLD_S
    it.feed(b"\n.", HOLD_S * 0.95)
    assert it.due_s == HOLD_S * 0.95 + HOLD_S


def test_a_long_line_is_cut_without_a_newline() -> None:
    it = splitter()
    it.feed(b"x" * MOST, 0)
    assert it.flush(1) == OutputPiece(b"x" * MOST)
    assert it.feed(b"yz", 1) == OutputPiece(b"yz", [b"x" * MOST + b"yz"])
    assert it.feed(b"\n", 1) == OutputPiece(b"\n", [b""])


def test_the_end_passes_on_what_is_left() -> None:
    it = splitter()
    it.feed(b"a\rb", 0)
    assert it.end() == OutputPiece(b"\rb", [b"a\rb"])
    assert it.end() == OutputPiece()


def test_whatever_arrives_is_passed_on_unchanged() -> None:
    chance = random.Random(7)
    for _ in range(300):
        data = bytes(chance.choices(b"ab\r\n", weights=[9, 9, 2, 2], k=60))
        it, text, lines, at = splitter(), b"", list[bytes](), 0
        while at < len(data):
            size = chance.randrange(1, 12)
            pieces = [it.feed(data[at : at + size], at), it.flush(at + chance.choice([0, 1]))]
            at += size
            text += b"".join(piece.text for piece in pieces)
            lines += [line for piece in pieces for line in piece.lines]
        last = it.end()
        assert text + last.text == data
        assert b"".join(lines + last.lines) == data.replace(b"\n", b"")
