"""The last lines of each worker, against a plain reference."""

from __future__ import annotations

import random

import pytest

from edl.agent.workers.recent_output import ANSWER_BYTES, CUT, LINE_BYTES, MOST_BYTES, MOST_LINES, RecentOutput
from edl.wire.node_requests import OutputLine, OutputRequest


def texts(lines: tuple[OutputLine, ...]) -> list[str]:
    return [line.text for line in lines]


def test_a_first_answer_has_the_last_lines_of_each_worker_in_order() -> None:
    recent = RecentOutput()
    assert recent.read(OutputRequest()).lines == ()
    recent.add(0, 4, 1, False, [b"a", b"b", b"c"])
    recent.add(1, 5, 1, True, [b"d", b"e", b"f"])
    recent.add(0, 4, 2, False, [b"g"])
    found = recent.read(OutputRequest(lines=2))
    assert texts(found.lines) == ["c", "e", "f", "g"]
    assert found.lines[1] == OutputLine(5, 1, True, "e")
    assert texts(recent.read(OutputRequest((5,), lines=9)).lines) == ["d", "e", "f"]
    assert recent.read(OutputRequest(lines=0)).lines == ()
    assert not found.gap


def test_a_reader_gets_every_later_line_once() -> None:
    recent = RecentOutput()
    begin = recent.read(OutputRequest(lines=0))
    recent.add(0, 0, 1, False, [b"one", b"two"])
    first = recent.read(OutputRequest(after=begin.next))
    recent.add(1, 1, 1, False, [b"three"])
    second = recent.read(OutputRequest(after=first.next))
    assert (texts(first.lines), texts(second.lines)) == (["one", "two"], ["three"])
    assert recent.read(OutputRequest(after=second.next)).lines == ()


def test_a_reader_that_is_too_slow_is_told() -> None:
    recent = RecentOutput()
    recent.add(0, 0, 1, False, [b"first"])
    begin = recent.read(OutputRequest())
    recent.add(0, 0, 1, False, [b"x"] * MOST_LINES)
    assert not recent.read(OutputRequest(after=begin.next)).gap
    recent.add(0, 0, 1, False, [b"x"] * (3 * MOST_LINES))
    found = recent.read(OutputRequest(after=begin.next))
    assert found.gap and len(found.lines) == MOST_LINES
    assert not recent.read(OutputRequest(after=found.next)).gap
    for _ in range(MOST_LINES + 1):
        recent.add(0, 0, 1, False, [b"y"])
    assert recent.read(OutputRequest(after=found.next)).gap


def test_lines_that_other_ranks_have_lost_are_not_missed() -> None:
    """Also those of another rank that the same worker slot had before."""
    recent = RecentOutput()
    recent.add(0, 4, 1, False, [b"first"])
    recent.add(1, 5, 1, False, [b"first"])
    begin = recent.read(OutputRequest()).next
    recent.add(1, 5, 1, False, [b"x"] * (2 * MOST_LINES))
    recent.add(1, 6, 2, False, [b"y"] * MOST_LINES)
    for ranks, gap in (((4,), False), ((5,), True), ((6,), False), ((4, 5), True), ((), True)):
        assert recent.read(OutputRequest(ranks, after=begin)).gap is gap, ranks


def test_a_position_of_an_earlier_launcher_gets_all_lines() -> None:
    recent = RecentOutput()
    recent.add(0, 0, 1, False, [b"new"])
    assert texts(recent.read(OutputRequest(after=99)).lines) == ["new"]


def test_memory_is_bounded() -> None:
    recent = RecentOutput()
    recent.add(0, 0, 1, False, [b"\xff" * (2 * LINE_BYTES)])
    (line,) = recent.read(OutputRequest()).lines
    assert line.text.endswith(CUT.decode()) and len(line.text) == LINE_BYTES
    for _ in range(100):
        recent.add(0, 0, 1, False, [b"y" * LINE_BYTES])
    found = recent.read(OutputRequest(lines=MOST_LINES)).lines
    assert sum(len(line.text) for line in found) <= MOST_BYTES


@pytest.mark.parametrize("follows", [False, True])
def test_an_answer_is_bounded(follows: bool) -> None:
    """The newest lines for a first request; of a reader that follows, the next answers have the rest."""
    recent = RecentOutput()
    begin = recent.read(OutputRequest()).next
    for local_rank in range(8):
        recent.add(local_rank, local_rank, 1, False, [b"%d-%d" % (local_rank, n) + b"." * 1000 for n in range(240)])
    seen: list[str] = []
    after = begin if follows else 0
    while True:
        found = recent.read(OutputRequest(lines=MOST_LINES, after=after))
        assert sum(len(line.text) for line in found.lines) <= ANSWER_BYTES
        seen += [line.text.partition(".")[0] for line in found.lines]
        after = found.next
        if not found.lines or not follows:
            break
    every = [f"{local_rank}-{n}" for local_rank in range(8) for n in range(240)]
    assert seen == (every if follows else every[-len(seen) :])
    assert len(seen) > 1000


def test_random_readers_against_a_list() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        recent, written = RecentOutput(), list[tuple[int, str]]()
        ranks = rng.choice(((), (1,), (0, 2)))
        after = recent.read(OutputRequest(ranks, 0)).next
        seen: list[str] = []
        for _ in range(rng.randrange(60)):
            rank = rng.randrange(3)
            lines = [f"{len(written) + n}" for n in range(rng.randrange(12))]
            written += [(rank, line) for line in lines]
            recent.add(rank, rank, 1, bool(rank), [line.encode() for line in lines])
            if rng.random() < 0.5:
                found = recent.read(OutputRequest(ranks, after=after))
                after = found.next
                seen += texts(found.lines)
                assert not found.gap
        seen += texts(recent.read(OutputRequest(ranks, after=after)).lines)
        assert seen == [line for rank, line in written if not ranks or rank in ranks]
