"""Commands in the documentation's code blocks can be given: subcommands and options exist. Nothing is started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edl.cli.__main__ import edl
from edl.launch.options import BY_SPELLING
from edl.launch.options.option import Option
from tests.unit.test_house_rules import ROOT

DOCS = ROOT / "docs"

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = ("console", "bash", "")
"""Languages of code blocks with commands; those in blocks of output, without a language, follow a ``$``."""
BETWEEN = ("|", "||", "&", "&&", ";")
LAUNCHER = re.compile(r"edl-run|edl\.launch(?:\.\w+)?")
NOT_IN_THE_TABLE = ("--help", "--version")
"""Options of the launcher that are not in its table."""


def lines_of(page: str) -> Iterator[str]:
    """The lines with commands in a page's code blocks: without comments, continued lines joined."""
    for language, text in BLOCK.findall(page):
        if language not in SHELLS:
            continue
        for line in text.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s)#.*$", "", line).strip()
            if command.startswith("$ "):
                yield command[2:].strip()
            elif language == "bash" or command.startswith("edl-run "):
                yield command


def calls(line: str) -> Iterator[list[str]]:
    """The words of each call of edl or its launcher in a line of a shell; usage lines without their brackets."""
    for inner in re.findall(r"\$\(([^)]*)\)", line):
        yield from calls(inner)
    words = shlex.split(re.sub(r"[\[\]…]", " ", line))
    call: list[str] = []
    for word in [*words, ";"]:
        if word in BETWEEN:
            while call and (re.fullmatch(r"\w+=.*", call[0]) or call[0] in ("exec", "(umask")):
                del call[0]
            if call[:2] in (["python", "-m"], ["python3", "-m"]):
                del call[:2]
            if call and (call[0] == "edl" or LAUNCHER.fullmatch(call[0])):
                yield call
            call = []
        else:
            call.append(word)


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
