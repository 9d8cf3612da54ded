"""The demo's report is computed correctly from step logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.demo_parts.measure import (
    StepLogs,
    StepRecord,
    WholeStep,
    first_whole_steps,
    missing_steps,
    parse_line,
    recovery,
)


def record(t_s: float, rank: int, world: int, step: int, round_number: int) -> StepRecord:
    return StepRecord(t_s, rank, world, step, round_number, pid=1000 + 10 * round_number + rank, node=rank, loss=1.0)


def steps(first: int, last: int, *, world: int, round_number: int, at_s: float) -> list[StepRecord]:
    """All ranks of a world finish steps first..last, one a second; rank r is r hundredths of a second late."""
    return [
        record(at_s + (step - first) + rank / 100, rank, world, step, round_number)
        for step in range(first, last + 1)
        for rank in range(world)
    ]


def line(**changes: object) -> str:
    data: dict[str, object] = {
        "t": 2.5,
        "rank": 1,
        "world": 3,
        "step": 7,
        "round": 2,
        "pid": 41,
        "node": 1,
        "loss": 0.5,
    }
    return json.dumps(data | changes) + "\n"


class TestParseLine:
    def test_reads_what_the_examples_write(self) -> None:
        assert parse_line(line()) == StepRecord(2.5, 1, 3, 7, 2, 41, 1, 0.5)

    @pytest.mark.parametrize(
        "text", ["", '{"t": 2.5, "rank"', "[]", "7", '{"t": 2.5}', line(step=None), line(rank="x")]
    )
    def test_refuses_a_torn_or_foreign_line(self, text: str) -> None:
        assert parse_line(text) is None


class TestStepLogs:
    def test_a_directory_that_does_not_exist_yet_is_empty(self, tmp_path: Path) -> None:
        assert StepLogs(tmp_path / "later").poll() == []

    def test_each_line_is_returned_once_and_kept(self, tmp_path: Path) -> None:
        logs = StepLogs(tmp_path)
        first, second = tmp_path / "rank0-1.jsonl", tmp_path / "rank1-2.jsonl"
        first.write_text(line(rank=0))
        assert [found.rank for found in logs.poll()] == [0]
        second.write_text(line(rank=1))
        with first.open("a") as file:
            file.write(line(rank=0, step=8))
        assert [(found.rank, found.step) for found in logs.poll()] == [(0, 8), (1, 7)]
        assert logs.poll() == []
        assert len(logs.records) == 3

    def test_an_unfinished_line_waits_for_its_end(self, tmp_path: Path) -> None:
        logs, path = StepLogs(tmp_path), tmp_path / "rank0-1.jsonl"
        path.write_text(line()[:20])
        assert logs.poll() == []
        path.write_text(line())
        assert len(logs.poll()) == 1
        assert logs.torn == 0

    def test_a_torn_line_is_counted_and_passed_over(self, tmp_path: Path) -> None:
        logs = StepLogs(tmp_path)
        (tmp_path / "rank0-1.jsonl").write_text(line()[:20] + line() + line(step=8))
        assert [found.step for found in logs.poll()] == [8]
        assert logs.torn == 1


class TestFirstWholeSteps:
    def test_is_the_moment_of_the_slowest_rank(self) -> None:
        assert first_whole_steps(steps(5, 6, world=3, round_number=1, at_s=10.0)) == [WholeStep(10.02, 1, 3, 5)]

    def test_a_round_in_which_one_rank_never_stepped_does_not_count(self) -> None:
        assert first_whole_steps([record(1.0, 0, 3, 1, 1), record(1.1, 2, 3, 1, 1)]) == []


class TestRecovery:
    def test_of_a_killed_worker(self) -> None:
        before = steps(1, 25, world=3, round_number=1, at_s=100.0)  # the last step ends at 124.00 to 124.02
        after = steps(21, 22, world=3, round_number=2, at_s=125.5)
        found = recovery(before + after, happened_s=124.5)
        assert found is not None
        assert found.seconds == pytest.approx(1.02)
        assert found.standstill_s == pytest.approx(1.5)
        assert found.redone == 5  # 21 to 25
        assert (found.world_before, found.world_after, found.round) == (3, 3, 2)

    def test_is_not_there_before_all_ranks_have_stepped(self) -> None:
        before = steps(1, 5, world=3, round_number=1, at_s=100.0)
        after = [record(106.0, 0, 2, 5, 2), record(106.1, 1, 2, 5, 2)]
        assert recovery([*before, after[0]], happened_s=105.0) is None
        assert recovery(before + after, happened_s=105.0) is not None

    def test_a_step_of_the_old_world_that_ends_after_the_kill_is_no_recovery(self) -> None:
        old = steps(1, 5, world=2, round_number=1, at_s=100.0)
        assert recovery(old, happened_s=103.5) is None

    def test_a_step_of_the_old_world_that_ends_after_the_kill_counts_as_redone(self) -> None:
        old = [*steps(1, 5, world=2, round_number=1, at_s=100.0), record(104.6, 0, 2, 6, 1)]
        found = recovery(old + steps(6, 6, world=1, round_number=2, at_s=107.0), happened_s=104.5)
        assert found is not None
        assert found.redone == 1
        assert found.standstill_s == pytest.approx(2.4)

    def test_nothing_is_redone_when_the_next_world_goes_on_where_the_old_one_stopped(self) -> None:
        old = steps(1, 5, world=2, round_number=1, at_s=100.0)
        found = recovery(old + steps(6, 7, world=3, round_number=2, at_s=104.7), happened_s=102.0, least_world=3)
        assert found is not None
        assert found.redone == 0
        assert found.seconds == pytest.approx(2.72)
        assert found.standstill_s == pytest.approx(0.71)

    def test_waits_for_a_world_of_the_wanted_size(self) -> None:
        records = steps(1, 5, world=2, round_number=1, at_s=100.0) + steps(6, 7, world=2, round_number=2, at_s=106.0)
        assert recovery(records, happened_s=103.5, least_world=3) is None
        records += steps(8, 8, world=3, round_number=3, at_s=110.0)
        found = recovery(records, happened_s=103.5, least_world=3)
        assert found is not None
        assert (found.round, found.world_before, found.world_after) == (3, 2, 3)

    def test_passes_over_a_world_that_broke_before_all_had_stepped(self) -> None:
        records = [*steps(1, 5, world=3, round_number=1, at_s=100.0), record(106.0, 0, 3, 6, 2)]
        found = recovery(records + steps(6, 6, world=2, round_number=3, at_s=108.0), happened_s=104.5)
        assert found is not None
        assert (found.round, found.redone) == (3, 1)

    def test_before_any_step_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"before 99\.000 s"):
            recovery(steps(1, 5, world=2, round_number=1, at_s=100.0), happened_s=99.0)


class TestMissingSteps:
    def test_none_when_each_was_done_by_somebody(self) -> None:
        records = steps(1, 3, world=2, round_number=1, at_s=0.0) + steps(3, 5, world=1, round_number=2, at_s=9.0)
        assert missing_steps(records, 5) == []

    def test_lists_what_was_skipped(self) -> None:
        records = steps(1, 2, world=2, round_number=1, at_s=0.0) + steps(5, 5, world=2, round_number=2, at_s=9.0)
        assert missing_steps(records, 6) == [3, 4, 6]
