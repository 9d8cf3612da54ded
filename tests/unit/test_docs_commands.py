"""Commands in the documentation's code blocks: each one is run by a test, or a table says why not; options exist."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edl.cli.__main__ import edl
from edl.errors import UsageError
from edl.launch.cli import settings_of
from edl.launch.options import BY_SPELLING
from edl.launch.options.option import Option
from tests.support.docs_commands import (
    BLOCK,
    DOCS,
    FATES,
    OTHERS,
    PAGES,
    SHELLS,
    Checked,
    Elsewhere,
    calls,
    commands,
    fates_of,
    is_run,
    lines_of,
)
from tests.support.docs_steps import ALONE, BEFORE_THE_END, IN_THE_JOB, SUBSTITUTES, Step, substituted
from tests.support.launching import tell
from tests.unit.test_house_rules import ROOT

NOT_IN_THE_TABLE = ("--help", "--version")
"""Options of the launcher that are not in its table."""


def option_of(word: str) -> Option | None:
    name = word.partition("=")[0].replace("_", "-")
    return BY_SPELLING.get(name) or BY_SPELLING.get(name[:2] if not name.startswith("--") else name)


def problem_of_launcher(words: list[str]) -> str:
    """Which option before the script the launcher does not have; empty: none."""
    left = list(words[1:])
    while left and left[0].startswith("-"):
        word = left.pop(0)
        option = option_of(word)
        if option is None:
            return "" if word in NOT_IN_THE_TABLE else f"no option {word}"
        if not option.flag_only and "=" not in word and (word.startswith("--") or len(word) == 2):
            left[:1] = []
    return ""


def problem_of_command(words: list[str], command: click.Command = edl) -> str:
    """Which subcommand or option ``edl`` does not have; empty: none."""
    if isinstance(command, click.Group) and len(words) > 1 and not words[1].startswith("-"):
        inner = command.get_command(click.Context(command), words[1])
        return problem_of_command(words[1:], inner) if inner is not None else f"no command {' '.join(words[:2])}"
    try:
        command.make_parser(click.Context(command, info_name=words[0])).parse_args(words[1:])
    except click.UsageError as error:
        return error.format_message()
    return ""


def problem(words: list[str]) -> str:
    return problem_of_command(words) if words[0] == "edl" else problem_of_launcher(words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_in_a_code_block_can_be_given(path: Path) -> None:
    wrong = [(line, why) for line in lines_of(path.read_text()) for call in calls(line) if (why := problem(call))]
    assert wrong == []


def test_many_commands_are_checked() -> None:
    found = [call for path in PAGES for line in lines_of(path.read_text()) for call in calls(line)]
    assert len(found) > 120
    assert {call[0] for call in found} >= {"edl", "edl-run", "edl.launch"}


@pytest.mark.parametrize(
    "line",
    [
        "edl frobnicate",
        "edl status --everything",
        "edl data remove train x",
        "edl drain a --within=60",
        "edl-run --nodes=2 train.py",
        "python -m edl.launch --nnodes 2 --lease train.py",
        'TOKEN="$(edl token --job=x)" edl status',
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert [why for call in calls(line) if (why := problem(call))] != []


@pytest.mark.parametrize(
    "line",
    [
        "edl status --json --rdzv-id=x | grep HTTP",
        "EDL_NNODES=2:4 edl-run --nnodes 2 --standalone -m train --unknown-to-edl",
        "edl data add train 'x/*' --when=now",
        "edl top [-n SECONDS] [--once] [--rdzv-endpoint HOST:PORT,…]",
        "python -m edl.launch.paddle --server_num=2 --devices=0,1 train.py",
    ],
)
def test_a_right_command_passes(line: str) -> None:
    assert [call for call in calls(line)] != []
    assert [problem(call) for call in calls(line)] == [""] * len(list(calls(line)))


# --- what becomes of each command ------------------------------------------------------------------------------------


def test_every_code_block_with_commands_is_read() -> None:
    languages = {language for path in PAGES for language, _ in BLOCK.findall(path.read_text())}
    assert languages <= {*SHELLS, *OTHERS}


def test_every_command_is_run_or_the_table_says_why_not() -> None:
    found = commands()
    wrong = {line: pages for line, pages in found.items() if len(fates_of(line)) + is_run(line) != 1}
    assert wrong == {}
    assert len(found) > 150


def test_every_command_that_is_run_is_in_the_documentation() -> None:
    steps = [step.line for step in (*ALONE, *IN_THE_JOB, *BEFORE_THE_END) if step.line]
    assert [line for line in steps if line not in commands()] == []
    assert len(steps) == len(set(steps))


def test_every_row_of_the_table_is_needed() -> None:
    lines = commands()
    assert [pattern for pattern, _ in FATES if not any(re.fullmatch(pattern, line) for line in lines)] == []


@pytest.mark.parametrize("fate", [fate for _, fate in FATES if isinstance(fate, Elsewhere)], ids=lambda fate: fate.test)
def test_the_test_that_runs_a_command_does_so(fate: Elsewhere) -> None:
    assert fate.text in (ROOT / fate.test).read_text()


def test_every_substitution_is_needed() -> None:
    for index, (pattern, _) in enumerate(SUBSTITUTES):
        before = SUBSTITUTES[:index]
        lines = [step.line for step in (*ALONE, *IN_THE_JOB) if not step.run]
        for earlier, other in before:
            lines = [re.sub(earlier, other, line) for line in lines]
        assert any(re.search(pattern, line) for line in lines), pattern


def test_a_usage_line_becomes_a_command() -> None:
    usage = "edl logs [-f] [--rank R]… [--lines N] [--rdzv-id JOB] [--rdzv-endpoint HOST:PORT,…] [--json]"
    run = substituted(Step(usage), job="j", endpoint="127.0.0.1:1")
    assert shlex.split(run) == shlex.split("edl logs --rank 0 --lines 1 --rdzv-id j --rdzv-endpoint 127.0.0.1:1 --json")


# --- command lines of launchers --------------------------------------------------------------------------------------

FILES = ("job.secret", "channels", "ca.pem", "client.pem", "client-key.pem", "edl/read-token")
"""Files of the reader that command lines name."""
OF_SRUN = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4"},
    **{
        "SLURM_STEP_NODELIST": "n[01-04]",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    },
}
"""Variables that srun sets."""
SECRET = "0123456789abcdef0123456789abcdef"


def launches() -> list[str]:
    return [line for line in commands() if any(isinstance(fate, Checked) for fate in fates_of(line))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the reader has."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("exec:/bin/true\n" if name == "channels" else SECRET)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("line", launches())
def test_the_launcher_accepts_its_command_lines(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its checks pass, of each value too. Nothing is started."""
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.fullmatch(r"[A-Z_]+=.*", word))
    variables |= OF_SRUN if words[0] == "srun" else {}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = list(calls(re.sub(r"(?<==)/(etc|shared)(?=/)", str(place), line).replace("10.0.0.1", "127.0.0.1")))
    assert len(found) == 1, line
    program, *rest = found[0]
    dialect = [f"--dialect={program.removeprefix('edl.launch.')}"] if program.startswith("edl.launch.") else []
    told = tell(*dialect, *rest, env=dict(os.environ), script="train.py" if "…" in line else "")
    assert settings_of(told) is not None


def test_a_launcher_refuses_a_wrong_value_in_a_command_line(place: Path) -> None:
    with pytest.raises((UsageError, click.UsageError)):
        settings_of(tell("--nnodes=4:2", "train.py"))


# --- the README in Chinese -------------------------------------------------------------------------------------------


def code_of(page: str) -> set[str]:
    """The lines of a page's code blocks, without comments and without continuations of lines."""
    text = "\n".join(text.replace("\\\n", " ") for _, text in BLOCK.findall(page))
    lines = (" ".join(re.sub(r"(^|\s)#.*$", "", line).split()) for line in text.splitlines())
    return {line for line in lines if line}


def test_the_chinese_readme_has_the_code_of_the_english_one() -> None:
    english, chinese = (code_of((ROOT / name).read_text()) for name in ("README.md", "README.zh.md"))
    assert chinese == english


def test_a_command_of_the_chinese_readme_that_differs_is_found() -> None:
    block = "```console\n$ edl-run --nnodes=1:2 \\\n    train.py   # two nodes\n```\n"
    assert code_of(block) == code_of(block.replace("two nodes", "两个节点").replace("\\\n  ", ""))
    assert code_of(block) != code_of(block.replace("1:2", "1:3"))


# --- defaults that docs/tuning.md names ------------------------------------------------------------------------------


def defaults(page: str) -> Iterator[tuple[str, str]]:
    """Each option in the first column of a table, and its default in the second one."""
    for first, second in re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|", page, re.MULTILINE):
        flags = re.findall(r"`(--[a-z-]+)", first)
        said = re.split(r", (?!at )", second)
        yield from zip(flags, said if len(said) == len(flags) else [second] * len(flags), strict=True)


def test_the_page_about_tuning_names_the_defaults() -> None:
    wrong, checked = [], 0
    for flag, said in defaults((DOCS / "tuning.md").read_text()):
        default = BY_SPELLING[flag].default
        if default in (0, "0", "", "none", False) or BY_SPELLING[flag].flag.endswith("-size"):
            continue
        checked += 1
        expected = f"{default:g}" if isinstance(default, float) else str(default)
        if not re.match(rf"`?{re.escape(expected)}(?![\w.])", said):
            wrong.append((flag, said, expected))
    assert wrong == []
    assert checked > 20
