"""Output files of workers on a real disk: one set per round, and old ones are kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.agent.workers.log_paths import Attempt
from edl.agent.workers.outputs import Output, Outputs, claim
from edl.config import LogLayout, LogPlan
from edl.types import Round

NODE = {"ROLE_NAME": "default", "HOME": "/root", "RANK": "1"}


def attempt(round: int, local_rank: int = 0, *, ahead: bool = False) -> Attempt:
    return Attempt(Round(round), local_rank, -1 if ahead else local_rank + 1, ahead=ahead)


def play(plan: LogPlan, scenario: Callable[[Outputs], None], *, path_each_round: bool = True) -> list[str]:
    """What was said meanwhile."""
    said: list[str] = []

    async def whole() -> None:
        outputs = Outputs(plan, "a", {"HOME": "/root"}, said.append, path_each_round=path_each_round)
        scenario(outputs)
        for _ in range(2):  # what it has found of earlier launches may have to be removed
            assert await outputs.done(10)
            await asyncio.sleep(0)  # its warnings

    asyncio.run(whole())
    return said


def write(output: Output, text: str) -> None:
    os.write(output.stdout.write_fd, f"{text} out\n".encode())
    os.write(output.stderr.write_fd, f"{text} err\n".encode())


class TestRounds:
    def test_a_worker_that_lives_through_several_writes_into_the_files_of_each(self, tmp_path: Path) -> None:
        def scenario(outputs: Outputs) -> None:
            first = outputs.files(attempt(0, ahead=True))
            output = outputs.open(first, NODE)
            for round in (1, 2, 5):
                write(output, f"before {round}")
                outputs.move(output, outputs.files(attempt(round)), NODE)
                assert output.error_file == str(tmp_path / f"attempt_{round - 1}" / "0" / "error.json")
            write(output, "at last")
            assert output.stderr.tail().splitlines() == ["before 1 err", "before 2 err", "before 5 err", "at last err"]
            output.close()

        assert play(LogPlan(str(tmp_path), redirect_all=3), scenario) == []
        kept = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log") if path.is_file()}
        rounds = {"attempt_0_ahead": 1, "attempt_0": 2, "attempt_1": 5}
        assert {name: text for name, text in kept.items() if not name.startswith("latest")} == {
            **{f"{folder}/0/stdout.log": f"before {round} out\n" for folder, round in rounds.items()},
            **{f"{folder}/0/stderr.log": f"before {round} err\n" for folder, round in rounds.items()},
            "attempt_4/0/stdout.log": "at last out\n",
            "attempt_4/0/stderr.log": "at last err\n",
        }
        assert os.readlink(tmp_path / "latest") == "attempt_4"

    def test_a_worker_without_a_path_each_round_keeps_its_first_error_file(self, tmp_path: Path) -> None:
        def scenario(outputs: Outputs) -> None:
            output = outputs.open(outputs.files(attempt(1)), NODE)
            outputs.move(output, outputs.files(attempt(2)), NODE)
            assert output.error_file == str(tmp_path / "attempt_0" / "0" / "error.json")
            output.close()

        play(LogPlan(str(tmp_path)), scenario, path_each_round=False)

    def test_a_second_process_in_the_same_place_finds_nothing_of_the_first(self, tmp_path: Path) -> None:
        def scenario(outputs: Outputs) -> None:
            first, second = outputs.files(attempt(3, ahead=True)), outputs.files(attempt(3, ahead=True))
            assert Path(second.folder).name == "0.2"
            made.extend((first.folder, second.folder))

        made: list[str] = []
        play(LogPlan(str(tmp_path)), scenario)
        assert all(Path(folder).is_dir() for folder in made)

    def test_what_cannot_be_written_is_said_and_done_without(self, tmp_path: Path) -> None:
        (tmp_path / "taken").write_text("")

        def scenario(outputs: Outputs) -> None:
            output = outputs.open(outputs.files(attempt(1)), NODE)
            write(output, "gone")
            assert output.stderr.tail() == "gone err"
            output.close()

        said = play(LogPlan(str(tmp_path / "taken"), redirect_all=3, links=str(tmp_path)), scenario)
        assert len(said) == 3
        assert all("training continues" in line for line in said)

    def test_where_nothing_is_kept_nothing_is_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

        def scenario(outputs: Outputs) -> None:
            files = outputs.files(attempt(1))
            assert outputs.log_dir(files) == ""
            output = outputs.open(files, NODE)
            assert output.error_file == ""
            output.close()

        assert play(LogPlan("", redirect_all=3), scenario) == []
        assert list(tmp_path.iterdir()) == []


class TestRetention:
    def test_the_first_round_and_the_newest_are_kept_and_those_in_use(self, tmp_path: Path) -> None:
        def scenario(outputs: Outputs) -> None:
            outputs.ask_busy(lambda: {"attempt_3"})
            for round in range(1, 11):
                for rank in (0, 1):
                    output = outputs.open(outputs.files(attempt(round, rank)), NODE)
                    write(output, str(round))
                    output.close()

        play(LogPlan(str(tmp_path), redirect_all=3, rounds=4), scenario)
        kept = sorted(path.name for path in tmp_path.iterdir())
        assert kept == ["attempt_0", "attempt_3", "attempt_8", "attempt_9", "latest"]
        assert (tmp_path / "latest" / "1" / "stdout.log").read_text() == "10 out\n"

    def test_all_are_kept_where_that_is_wanted(self, tmp_path: Path) -> None:
        def scenario(outputs: Outputs) -> None:
            for round in range(1, 11):
                outputs.files(attempt(round))

        play(LogPlan(str(tmp_path), rounds=0), scenario)
        assert len(list(tmp_path.iterdir())) == 10


class TestFilters:
    def test_lines_of_all_workers_with_tee_come_together_with_their_prefix(
        self, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        def scenario(outputs: Outputs) -> None:
            for rank in (0, 1, 2):
                output = outputs.open(outputs.files(attempt(1, rank)), NODE)
                write(output, f"apple {rank}")
                write(output, f"pear {rank}")
                output.close()

        plan = LogPlan(
            str(tmp_path), tee={0: 1, 1: 3}, redirects={2: 3}, stdout_filters=("apple",), stderr_filters=("rr",)
        )
        play(plan, scenario)
        folder = tmp_path / "attempt_0"
        assert (folder / "filtered_stdout.log").read_text() == "[default1]:apple 0 out\n[default2]:apple 1 out\n"
        assert (folder / "filtered_stderr.log").read_text() == "[default2]:apple 1 err\n[default2]:pear 1 err\n"
        assert (folder / "1" / "stdout.log").read_text() == "apple 1 out\npear 1 out\n"
        shown = capfdbinary.readouterr()
        assert shown.out.startswith(b"[default1]:apple 0 out\n")
        assert b"apple 0 err\npear 0 err\n" in shown.err
        assert b"2 " not in shown.out + shown.err


class TestPaddle:
    def plan(self, folder: Path, *, overwrite: bool = False) -> LogPlan:
        return claim(
            LogPlan(f"{folder}/job_a", layout=LogLayout.PADDLE, quiet=True, links=str(folder), overwrite=overwrite)
        )

    def run(self, plan: LogPlan, *rounds: int) -> None:
        def scenario(outputs: Outputs) -> None:
            for round in rounds:
                for rank in (0, 1):
                    files = outputs.files(attempt(round, rank))
                    assert outputs.log_dir(files) == plan.links
                    output = outputs.open(files, NODE)
                    write(output, f"round {round} rank {rank}")
                    output.close()

        assert play(plan, scenario) == []

    def test_its_names_lead_to_the_newest_round_and_the_first_worker_is_shown(
        self, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        self.run(self.plan(tmp_path), 1, 2)
        for rank in (0, 1):
            assert (tmp_path / f"workerlog.{rank}").read_text() == f"round 2 rank {rank} out\nround 2 rank {rank} err\n"
            old = tmp_path / "job_a" / "attempt_0" / str(rank) / "workerlog"
            assert old.read_text() == f"round 1 rank {rank} out\nround 1 rank {rank} err\n"
            assert (tmp_path / f"envlog.{rank}").read_text() == "RANK=1\nROLE_NAME=default\n"
        shown = capfdbinary.readouterr()
        assert shown.out == b"".join(
            b"round %d rank 0 %s\n" % (round, name) for round in (1, 2) for name in (b"out", b"err")
        )
        assert shown.err == b""

    def test_a_file_of_somebody_else_is_set_aside(self, tmp_path: Path) -> None:
        (tmp_path / "workerlog.0").write_text("of paddle itself\n")
        self.run(self.plan(tmp_path), 1)
        assert (tmp_path / "workerlog.0").is_symlink()
        assert (tmp_path / "workerlog.0.2").read_text() == "of paddle itself\n"

    def test_where_a_folder_stands_in_its_way_nothing_is_left_over(self, tmp_path: Path) -> None:
        (tmp_path / "workerlog.0").mkdir()
        self.run(self.plan(tmp_path, overwrite=True), 1)
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
        assert (tmp_path / "workerlog.1").is_symlink()

    def test_or_overwritten_where_that_is_asked_for(self, tmp_path: Path) -> None:
        (tmp_path / "workerlog.0").write_text("of paddle itself\n")
        self.run(self.plan(tmp_path), 1, 2)
        self.run(self.plan(tmp_path, overwrite=True), 1)
        assert (tmp_path / "workerlog.0").read_text() == "round 1 rank 0 out\nround 1 rank 0 err\n"
        assert sorted(path.name for path in (tmp_path / "job_a").iterdir()) == [".launch", "attempt_0", "latest"]


class TestSize:
    def test_the_oldest_launches_and_parts_go_when_it_is_too_much(self, tmp_path: Path) -> None:
        plan = LogPlan(str(tmp_path / "job_a"), redirect_all=1, most_bytes=8 * 64 * 1024)
        stranger = tmp_path / "job_a.2"  # the first launch on a node called a.2
        stranger.mkdir()
        (stranger / ".launch").write_text("job_a.2")

        def scenario(outputs: Outputs) -> None:
            output = outputs.open(outputs.files(attempt(1)), NODE)
            for number in range(20):
                os.write(output.stdout.write_fd, b"%06d " % number + b"x" * 50_000 + b"\n")
                output.stdout.tail()
            output.close()

        folders = []
        for _ in range(3):
            made = claim(plan)
            folders.append(Path(made.folder))
            play(made, scenario)
            assert sum(path.stat().st_size for path in folders[-1].rglob("*.log*")) <= plan.most_bytes
        assert [folder.name for folder in folders] == ["job_a.3", "job_a.4", "job_a.5"]
        assert not folders[0].exists() and stranger.exists()
        kept = folders[2] / "attempt_0" / "0"
        last = (kept / "stdout.log").read_text().splitlines()
        assert last[0].startswith("[edl: older lines are in stdout.log.") and last[-1].startswith("000019 ")
        assert not (kept / "stdout.log.1").exists()


class TestClaim:
    def test_launches_of_long_ago_go_and_nothing_that_edl_has_not_written(self, tmp_path: Path) -> None:
        for name, written_s in (("job_a", 1e6), ("job_a.2", 9e6), ("job_a.3", 1e6)):
            (tmp_path / name / "attempt_0").mkdir(parents=True)
            files = [tmp_path / name / "attempt_0" / "stdout.log"]
            if name != "job_a.3":  # without the mark it is somebody else's
                files.append(tmp_path / name / ".launch")
            for file in files:
                file.write_text("job_a")
                os.utime(file, (written_s, written_s))
        plan = claim(LogPlan(str(tmp_path / "job_a"), redirect_all=3, days=10))

        async def whole() -> None:
            outputs = Outputs(plan, "a", {}, print, wall_clock_s=lambda: 9e6 + 86_400)
            outputs.files(attempt(1))
            for _ in range(2):
                assert await outputs.done(60)
                await asyncio.sleep(0)
            assert await outputs.done(60)

        asyncio.run(whole())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["job_a.2", "job_a.3", "job_a.4"]

    def test_each_launch_gets_a_folder_of_its_own(self, tmp_path: Path) -> None:
        plan = LogPlan(str(tmp_path / "logs" / "job_a"))
        folders = [Path(claim(plan).folder).name for _ in range(3)]
        assert folders == ["job_a", "job_a.2", "job_a.3"]
        assert sorted(os.listdir(tmp_path / "logs")) == folders

    def test_with_overwrite_the_same_one_without_its_rounds(self, tmp_path: Path) -> None:
        folder = tmp_path / "job_a"
        (folder / "attempt_7" / "0").mkdir(parents=True)
        (folder / "notes").write_text("mine")
        (folder / "latest").symlink_to("attempt_7")
        (folder / "error.json").write_text("{}")  # the next one may succeed
        assert claim(LogPlan(str(folder), overwrite=True)).folder == str(folder)
        assert os.listdir(folder) == ["notes"]

    def test_where_it_cannot_be_made_training_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "taken").write_text("")
        plan = LogPlan(str(tmp_path / "taken" / "job_a"))
        assert claim(plan) == plan
        assert claim(LogPlan("")) == LogPlan("")


class TestEnvironmentFiles:
    def test_values_that_are_no_text_are_written_as_they_are(self, tmp_path: Path) -> None:
        value = os.fsdecode(b"/data/caf\xe9")

        def scenario(outputs: Outputs) -> None:
            output = outputs.open(outputs.files(attempt(1)), {**NODE, "DATA": value})
            write(output, "after")
            output.close()

        plan = LogPlan(str(tmp_path), redirect_all=3, layout=LogLayout.PADDLE, links=str(tmp_path))
        assert play(plan, scenario) == []
        assert b"DATA=/data/caf\xe9\n" in (tmp_path / "envlog.0").read_bytes()
        assert (tmp_path / "workerlog.0").read_text() == "after out\nafter err\n"
