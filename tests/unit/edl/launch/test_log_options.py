"""Options for what workers write: what they mean, and what is refused."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest

from edl.adapters.leftovers import OWNER
from edl.agent.workers.log_paths import server_log
from edl.config import LogLayout, LogPlan, StreamTarget
from edl.errors import SettingError
from edl.launch import log_options
from edl.launch.log_options import folder_name, log_plan, remarks, server_folder, stream_map, texts
from edl.launch.options import launcher_options
from edl.ports import CommandKind, WorkerCommand


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "torches.py").write_text("import torch\n")
    (tmp_path / "paddles.py").write_text("import paddle.distributed as dist\n")
    (tmp_path / "both.py").write_text("import torch, paddle\n")
    return tmp_path


def given(*arguments: str) -> dict[str, Any]:
    @click.command()
    def probe(**_: object) -> None: ...

    launcher_options(probe)
    command = click.Command("probe", params=probe.params)
    return command.make_context("probe", list(arguments)).params


def plan(*arguments: str, slots: int = 4, script: str = "torches.py", **env: str) -> LogPlan:
    return log_plan(given(*arguments), "job", "a", slots, WorkerCommand(CommandKind.SCRIPT, script, ()), env)


def refused(*arguments: str, slots: int = 4) -> str:
    with pytest.raises(SettingError) as caught:
        plan(*arguments, slots=slots)
    return str(caught.value)


class TestFolder:
    def test_without_a_word_it_is_a_temporary_one(self, folder: Path) -> None:
        made = plan()
        assert Path(made.folder).parent.name.startswith("edl-job-")
        assert Path(made.folder).parent.is_dir()
        assert made == LogPlan(made.folder, temporary=True, workers=4)

    def test_of_temporary_ones_those_stay_whose_launcher_lives(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(log_options, "KEPT_LAUNCHES", 1)
        folders = [Path(plan().folder).parent for _ in range(4)]
        for number, gone in enumerate(folders[:3]):
            (gone / OWNER).write_text(json.dumps({**json.loads((gone / OWNER).read_text()), "began": "long ago"}))
            os.utime(gone / OWNER, (1000 + number, 1000 + number))
        plan()
        assert [path.exists() for path in folders] == [False, False, True, True]

    def test_it_is_absolute_for_scripts_change_their_directory(self, folder: Path) -> None:
        assert plan("--log-dir=logs").folder == str(folder / "logs" / "job_a")

    def test_nothing_is_kept_in_the_null_device(self, folder: Path) -> None:
        made = plan(f"--log-dir={os.devnull}", "--tee=3", "-r", "3")
        assert made.folder == ""
        assert (made.stdout(0), made.stderr(1)) == (StreamTarget.CONSOLE, StreamTarget.CONSOLE)
        assert remarks(made) == []
        assert [path for path in folder.iterdir() if path.is_dir()] == []


def test_how_much_is_kept() -> None:
    logs = plan("--log-rounds=7", "--log-size=8M", "--log-days=1.5", "--log-reserve=20G")
    assert (logs.rounds, logs.most_bytes, logs.days, logs.reserve) == (7, 8 << 20, 1.5, 20 << 30)


class TestStreams:
    @pytest.mark.parametrize(
        ("text", "all_ranks", "by_rank"),
        [
            ("0", 0, {}),
            ("3", 3, {}),
            ("0:3", 0, {0: 3}),
            ("0:1,1:2,12:3", 0, {0: 1, 1: 2, 12: 3}),
            ("100:0", 0, {100: 0}),
        ],
    )
    def test_for_all_ranks_or_for_some(self, text: str, all_ranks: int, by_rank: dict[int, int]) -> None:
        logs = plan(f"--tee={text}", f"--redirects={text}", slots=101)
        assert (logs.tee_all, logs.tee) == (all_ranks, by_rank)
        assert (logs.redirect_all, logs.redirects) == (all_ranks, by_rank)

    def test_a_rank_beyond_nine_gets_its_streams(self) -> None:
        logs = plan("-r", "11:1", slots=12)
        assert logs.stdout(11) is StreamTarget.FILE
        assert logs.stdout(1) is StreamTarget.CONSOLE

    @pytest.mark.parametrize("text", ["", "4", "33", "0:4", "0:", ":3", "a:3", "0:3,", "0:3;1:1", "-1:3", "0: 3"])
    def test_other_texts_are_refused(self, text: str) -> None:
        with pytest.raises(SettingError, match="--tee"):
            stream_map("--tee", text)

    @pytest.mark.parametrize(
        ("arguments", "slots", "words"),
        [
            (["--tee=0:3,4:1"], 4, ["--tee=0:3,4:1", "no local rank 4", "local ranks 0 to 3"]),
            (["-r", "7:3"], 1, ["--redirects=7:3", "no local rank 7", "only local rank 0"]),
            (["--local-ranks-filter=0,9"], 2, ["--local-ranks-filter=0,9", "no local rank 9", "0 to 1"]),
            (["--local-ranks-filter=a"], 2, ["--local-ranks-filter=a", "such as 0,1"]),
            (["--local-ranks-filter=0,"], 2, ["--local-ranks-filter=0,", "such as 0,1"]),
            (["--logs-specs=mine"], 2, ["--logs-specs=mine", "--log-dir", "--tee"]),
        ],
    )
    def test_says_which_rank_is_not_there(self, arguments: list[str], slots: int, words: list[str]) -> None:
        message = refused(*arguments, slots=slots)
        assert [word for word in words if word not in message] == []
        assert "\n" not in message

    def test_the_console_may_show_some_ranks_only(self) -> None:
        logs = plan("--local-ranks-filter= 0, 2", "--tee=1:3,2:1", "-r", "3:3", "--logs-specs=default")
        assert logs.shown == {0, 2}
        shown = [(logs.stdout(rank), logs.stderr(rank)) for rank in range(4)]
        console, file, both, nowhere = (
            StreamTarget.CONSOLE,
            StreamTarget.FILE,
            StreamTarget.BOTH,
            StreamTarget.NOWHERE,
        )
        assert shown == [(console, console), (file, file), (both, console), (file, file)]
        assert plan("--local-ranks-filter=1").stdout(0) is nowhere


class TestTexts:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("", ()),
            ("apple", ("apple",)),
            ("apple,orange", ("apple", "orange")),
            ("a,,b,c", ("a,b", "c")),
            (",,", (",",)),
            ("loss: ,acc", ("loss: ", "acc")),
        ],
    )
    def test_commas_split_and_two_make_one(self, text: str, found: tuple[str, ...]) -> None:
        assert texts(text) == found
        assert plan(f"--duplicate-stdout-filters={text}").stdout_filters == found
        assert plan(f"--duplicate-stderr-filters={text}").stderr_filters == found

    def test_without_tee_they_have_nothing_to_look_at(self) -> None:
        (said,) = remarks(plan("--duplicate-stdout-filters=x"))
        assert "--duplicate-stdout-filters" in said and "--tee" in said
        teed = plan("--duplicate-stdout-filters=x", "--tee=1:1")
        assert remarks(teed) == [f"the workers' output is kept in {teed.folder}"]


def test_the_prefix_is_ours_before_torchruns() -> None:
    assert plan().prefix == ""
    assert plan(TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${rank}|").prefix == "${rank}|"
    assert plan("--log-prefix=>", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${rank}|").prefix == ">"


class TestLayout:
    @pytest.mark.parametrize(
        ("arguments", "script", "layout"),
        [
            ([], "paddles.py", LogLayout.TORCHRUN),
            (["--log-dir=logs"], "paddles.py", LogLayout.PADDLE),
            (["--log-dir=logs"], "torches.py", LogLayout.TORCHRUN),
            (["--log-dir=logs"], "both.py", LogLayout.TORCHRUN),
            (["--log-dir=logs"], "missing.py", LogLayout.TORCHRUN),
            (["--log-dir=logs", "-t", "3"], "paddles.py", LogLayout.TORCHRUN),
            (["--log-dir=logs", "--local-ranks-filter=0"], "paddles.py", LogLayout.TORCHRUN),
            (["--log-dir=logs", "--log-layout=torchrun"], "paddles.py", LogLayout.TORCHRUN),
            (["--log-layout=paddle"], "torches.py", LogLayout.PADDLE),
        ],
    )
    def test_is_paddles_where_paddle_is_spoken(self, arguments: list[str], script: str, layout: LogLayout) -> None:
        assert plan(*arguments, script=script).layout is layout

    def test_that_nobody_has_asked_for_hides_nothing(self, folder: Path) -> None:
        logs = plan("--log-dir=logs", script="paddles.py")
        assert (logs.stdout(0), logs.stderr(3)) == (StreamTarget.BOTH, StreamTarget.BOTH)
        assert not logs.prefixed(3, stderr=True)
        assert logs.links == str(folder / "logs")

    def test_of_paddle_has_its_folder_and_shows_the_first_worker(self, folder: Path) -> None:
        logs = plan("--log-layout=paddle", "--log-overwrite=true")
        assert (logs.links, logs.folder) == (str(folder / "log"), str(folder / "log" / "job_a"))
        assert logs.overwrite
        assert not (folder / "log").exists()
        assert (logs.stdout(0), logs.stderr(0)) == (StreamTarget.BOTH, StreamTarget.BOTH)
        assert (logs.stdout(1), logs.stderr(3)) == (StreamTarget.FILE, StreamTarget.FILE)
        assert not logs.prefixed(0, stderr=False)
        assert remarks(logs) == [f"the workers' output is kept in {logs.folder}"]

    def test_of_paddle_shows_others_where_that_is_asked_for(self) -> None:
        logs = plan("--log-layout=paddle", "--tee=2:3", "-r", "0:1")
        assert (logs.stdout(2), logs.stdout(0), logs.stderr(0)) == (
            StreamTarget.BOTH,
            StreamTarget.FILE,
            StreamTarget.BOTH,
        )
        assert logs.prefixed(2, stderr=True)

    def test_gives_pservers_a_folder_too(self, folder: Path) -> None:
        assert server_folder(given("--log-layout=paddle")) == str(folder / "log")
        assert server_folder(given("--log-layout=paddle", "--log-dir=logs")) == str(folder / "logs")
        assert server_folder(given("--log-layout=paddle", f"--log-dir={os.devnull}")) == ""
        assert server_folder(given("--log-dir=logs")) == ""
        assert server_log("/log", 3) == "/log/serverlog.3" and server_log("", 3) == ""


def test_the_longest_names_still_name_a_folder(tmp_path: Path) -> None:
    """A file system takes 255 bytes; a number is appended for later launches."""
    names = {folder_name("j" * 128, node * 128) for node in "ab"}
    for name in names:
        (tmp_path / f"{name}.100").mkdir()
    assert len(names) == 2
    assert folder_name("job", "a") == "job_a"
