"""Names of the history files, and which ones are deleted."""

from __future__ import annotations

import random

import pytest

from edl.history.parts import MOST_FILES, HistoryPart, PartFile, part_bytes, part_of, surplus

RUN, OTHER = "0123456789ab", "ba9876543210"


def test_a_name_and_back() -> None:
    part = HistoryPart(RUN, 17, 3)
    assert part.name == "0123456789ab.17.3.jsonl"
    assert part_of(part.name) == part


@pytest.mark.parametrize(
    "name",
    [
        "",
        "events.jsonl",
        "0123456789ab.17.3.json",
        "0123456789AB.17.3.jsonl",
        "0123456789ab.017.3.jsonl",
        f"{RUN}.1.jsonl",
    ],
)
def test_files_of_others(name: str) -> None:
    assert part_of(name) is None


def test_a_small_limit_still_has_several_parts() -> None:
    assert part_bytes(1 << 20) == 128 << 10
    assert part_bytes(1 << 40) == part_bytes(0) == 8 << 20


def test_thousands_of_directories_keep_to_the_limits() -> None:
    draw = random.Random(7)
    for _ in range(3000):
        files = {
            HistoryPart(
                draw.choice((RUN, OTHER, "f" * 12)), draw.randrange(1, 40), draw.randrange(1, 9)
            ).name: PartFile(draw.randrange(0, 5000), draw.random() * 1000)
            for _ in range(draw.randrange(0, 40))
        }
        files |= {"notes.txt": PartFile(1 << 40, 0.0)}
        most, room = draw.choice((0, draw.randrange(1, 60_000))), draw.randrange(0, 9000)
        gone = surplus(files, RUN, most, room)
        assert len(set(gone)) == len(gone)
        parts = {name: one for name in files if (one := part_of(name)) is not None}
        left = [name for name in parts if name not in gone]
        size = sum(files[name].size for name in left)
        assert not most or not left or size + room <= most
        if gone:  # the last one had to go
            assert most and size + files[gone[-1]].size + room > most
        # Earlier runs first, and of each run the oldest parts.
        assert [parts[name].run == RUN for name in gone] == sorted(parts[name].run == RUN for name in gone)
        for run in {parts[name].run for name in gone}:
            mine = [parts[name] for name in gone if parts[name].run == run]
            assert mine == sorted(one for one in parts.values() if one.run == run)[: len(mine)]


def test_the_run_that_was_written_last_goes_last() -> None:
    files = {
        HistoryPart(OTHER, 1, 1).name: PartFile(10, 5.0),
        HistoryPart("f" * 12, 1, 1).name: PartFile(10, 9.0),
        HistoryPart(OTHER, 2, 1).name: PartFile(10, 7.0),
        HistoryPart(RUN, 1, 1).name: PartFile(10, 1.0),
    }
    assert surplus(files, RUN, 21, 0) == [HistoryPart(OTHER, 1, 1).name, HistoryPart(OTHER, 2, 1).name]


def test_there_are_never_too_many_files() -> None:
    files = {HistoryPart(RUN, term, 1).name: PartFile(1, 0.0) for term in range(1, MOST_FILES + 5)}
    assert surplus(files, RUN, 0, 0) == [HistoryPart(RUN, term, 1).name for term in range(1, 6)]
