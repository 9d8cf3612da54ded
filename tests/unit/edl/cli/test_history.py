"""``edl history`` on files of jobs that have ended."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edl.cli.__main__ import edl
from edl.errors import SettingError
from edl.history.parts import FOLDER, HistoryPart
from edl.wire.history_lines import line_text
from tests.support.history_fixture import RUN, line, other

END = other(3, 4, 3, "end", {"exit_code": 0, "reason": "all done", "rounds": 2, "restarts": 0})


def write(folder: Path, job: str = "job", run: str = RUN) -> None:
    """A job of three events."""
    (folder / job).mkdir(parents=True)
    lines = [*(line(3, number, number, at_s=1e9 + number) for number in (1, 2, 3)), END]
    (folder / job / HistoryPart(run, 3, 1).name).write_bytes(b"".join(map(line_text, lines)))


def history(*words: str) -> Result:
    return CliRunner(env={"EDL_HISTORY_DIR": "", "EDL_CHECKPOINT_DIR": ""}).invoke(edl, ["history", *words])


class TestShowing:
    def test_a_job(self, tmp_path: Path) -> None:
        write(tmp_path)
        shown = history(str(tmp_path)).stdout.splitlines()
        assert shown[0].startswith(f"job  run {RUN}  succeeded  2 rounds, 0 restarts")
        assert [text.split()[-1] for text in shown[2:5]] == ["1", "2", "3"]
        assert shown[-1].endswith("exit code 0: all done")

    def test_the_last_rows_and_that_there_are_more(self, tmp_path: Path) -> None:
        write(tmp_path)
        shown = history(str(tmp_path), "--last=1").stdout.splitlines()
        assert shown[1] == "Earlier rows are left out; --last=0 shows all"
        assert len(shown) == 4

    def test_what_is_new(self, tmp_path: Path) -> None:
        write(tmp_path)
        assert "Nothing happened since then" in history(str(tmp_path), "--since=1h").stdout
        assert "text 3" in history(str(tmp_path), "--since=2001-09-09 00:00").stdout
        assert isinstance(history(str(tmp_path), "--since=yesterday").exception, SettingError)

    def test_lines_as_json(self, tmp_path: Path) -> None:
        write(tmp_path)
        done = history(str(tmp_path), "--json", "--last=2")
        assert [json.loads(text)["kind"] for text in done.stdout.splitlines()] == ["event", "end"]

    def test_the_end_is_found_although_a_checkpoint_was_complete_after_it(self, tmp_path: Path) -> None:
        write(tmp_path)
        with (tmp_path / "job" / HistoryPart(RUN, 3, 1).name).open("ab") as file:
            file.writelines(line_text(line(3, number + 1, number, at_s=1e9 + number)) for number in (4, 5, 6))
        assert "succeeded, 2 rounds, " in history(str(tmp_path), "--list").stdout
        assert "succeeded" in history(str(tmp_path), "--last=1").stdout

    def test_several_jobs_are_listed(self, tmp_path: Path) -> None:
        for job in ("one", "two"):
            write(tmp_path, job)
        assert [text.split()[2] for text in history(str(tmp_path)).stdout.splitlines()] == ["job", "job"]
        listed = [json.loads(text) for text in history(str(tmp_path), "--list", "--json").stdout.splitlines()]
        assert [(one["run"], one["outcome"]["exit_code"]) for one in listed] == [(RUN, 0)] * 2
        assert "text 3" in history(str(tmp_path), "--job=one").stdout

    def test_a_job_of_one_round(self, tmp_path: Path) -> None:
        (tmp_path / "job").mkdir()
        lines = [line(3, 1, 1), dataclasses.replace(END, body={**END.body, "rounds": 1})]
        (tmp_path / "job" / HistoryPart(RUN, 3, 1).name).write_bytes(b"".join(map(line_text, lines)))
        assert "succeeded, 1 round, " in history(str(tmp_path), "--list").stdout

    def test_an_unknown_job_is_named(self, tmp_path: Path) -> None:
        write(tmp_path, "one")
        for words in (("--list", "--job=three"), ("--job=three",)):
            failed = history(str(tmp_path), *words).exception
            assert isinstance(failed, SettingError) and "--job=three: this directory holds" in str(failed)

    def test_the_directory_comes_from_the_launchers_variables(self, tmp_path: Path) -> None:
        write(tmp_path / FOLDER)
        runner = CliRunner(env={"EDL_HISTORY_DIR": "auto", "EDL_CHECKPOINT_DIR": str(tmp_path)})
        assert "all done" in runner.invoke(edl, ["history"]).stdout

    def test_files_without_a_readable_line(self, tmp_path: Path) -> None:
        (tmp_path / "job").mkdir()
        (tmp_path / "job" / HistoryPart(RUN, 3, 1).name).write_bytes(b'{"torn')
        assert isinstance(history(str(tmp_path)).exception, SettingError)


def test_no_framework_and_no_store_client_is_imported(tmp_path: Path) -> None:
    write(tmp_path)
    look = "import sys; from edl.cli.__main__ import edl; edl.main(sys.argv[1:], standalone_mode=False)\n"
    look += "print([name for name in ('torch', 'paddle', 'grpc', 'numpy', 'rich') if name in sys.modules])"
    words = [sys.executable, "-c", look, "history", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [("--job=other",), ("--run=77",)])
def test_a_directory_of_another_job_is_an_error_that_names_what_there_is(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path)
    error = history(str(tmp_path), *words).exception
    assert isinstance(error, SettingError)
    assert "job" in str(error)


def test_a_stdout_that_lacks_a_letter_shows_an_escape(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    event = line(3, 1, 1, at_s=1e9)
    strange = dataclasses.replace(event, body={**event.body, "text": "caf\u00e9 \u8bad\u7ec3"})
    (tmp_path / "job" / HistoryPart(RUN, 3, 1).name).write_bytes(line_text(strange))
    words = [sys.executable, "-m", "edl.cli", "history", str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(words, env=environment, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"caf\xe9 \\u8bad\\u7ec3" in done.stdout
