"""Every option and variable of the installed Paddle's launchers, held against ours."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from edl.errors import SettingError
from edl.launch import __main__ as program
from edl.launch import paddle_options
from edl.launch.cli import with_both_spellings
from edl.launch.dropin_table import Fate, Row
from edl.launch.options import value_options
from edl.launch.paddle_table import OTHER_VARIABLES, PADDLE_ROWS, WEAK_VARIABLES
from edl.launch.resolved_options import OptionSource, ResolvedOptions
from edl.launch.settings import LaunchSettings
from scripts import dropin_paddle
from scripts.dropin_paddle import Theirs
from tests.support.launching import launch_settings

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def theirs() -> list[Theirs]:
    pytest.importorskip("paddle")
    before = dict(os.environ)
    found = dropin_paddle.options()
    os.environ.clear()
    os.environ.update(before)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


VALUES = {
    "--master": "etcd://h:1",
    "--devices": "0",
    "--gpus": "0",
    "--npus": "0",
    "--xpus": "0",
    "--selected_gpus": "0",
    "--selected_xpus": "0",
    "--ips": "127.0.0.1",
    "--run_mode": "collective",
    "--log_level": "DEBUG",
    "--auto_parallel_config": "auto.json",
    "--backend": "gloo",
    "--np": "1",
    "--elastic_server": "h:1",
    "--http_port": "0",
    "--nnodes": "1",
    "--nproc_per_node": "2",
    "--servers": "127.0.0.1:7001",
    "--trainers": "127.0.0.1:7002",
    "--workers": "127.0.0.1:7002",
}
"""A value that each option takes in Paddle; for the others 1."""


def tell(*arguments: str, **env: str) -> ResolvedOptions:
    context = program.run.make_context("edl-run", with_both_spellings([*arguments, "train.py"]))
    told = ResolvedOptions.by(context, "train.py", ())
    program.settle(told, env)
    return told


def settings(*arguments: str, **env: str) -> LaunchSettings:
    told = tell(*arguments, **env)
    return launch_settings(told)


def test_every_option_of_either_launcher_is_in_the_table(theirs: list[Theirs]) -> None:
    known = dropin_paddle.rows_by_spelling()
    there = {spelling for one in theirs for spelling in one.spellings}
    accelerated = {"--selected_gpus", "--selected_xpus"}  # only builds for them have these
    spelt = {"--gpus", "--npus", "--xpus"}  # aliases
    assert sorted(there - set(known)) == []
    passed_over = {"--hosts"}  # no option there, and no reason not to run
    assert sorted(set(known) - there - accelerated - spelt - passed_over) == []
    assert len(there) > 45


def test_the_table_has_their_defaults(theirs: list[Theirs]) -> None:
    known = dropin_paddle.rows_by_spelling()
    of_launch = {spelling for one in theirs if one.launcher == "launch" for spelling in one.spellings}
    for one in theirs:
        if one.launcher == "legacy" and one.spellings[0] in of_launch:
            continue  # one command line can have one default only: that of the newer launcher
        if one.spellings[0] != "--backend":  # the variable that it takes its default from is in our environment
            assert known[one.spellings[0]].default == one.default, one


def test_every_variable_that_overrides_an_option_is_in_the_table(theirs: list[Theirs]) -> None:
    ours = {variable: row.option for row in PADDLE_ROWS for variable in row.variables}
    there = dropin_paddle.variables()
    assert {variable: ours[variable] for variable in there} == there
    assert set(ours) - set(there) - WEAK_VARIABLES == {"PADDLE_TRAINER_ID"}


@pytest.mark.parametrize("row", PADDLE_ROWS, ids=[row.option for row in PADDLE_ROWS])
def test_each_is_an_option_here_in_every_spelling(row: Row) -> None:
    """Accepted with a value, as there; or refused in the words of the table."""
    known = value_options()
    for spelling in (row.option, *row.aliases):
        assert known[spelling.replace("_", "-")] is True, f"{spelling} takes a value"
        more = ["--job_id=j", "--np=1"] if spelling == "--elastic_server" else []
        if spelling == "--auto_parallel_config":
            Path("auto.json").write_text('{"tuner_run_mode": "run_only"}')
        given = [spelling, VALUES.get(spelling, "1")]
        env = {"CUDA_VISIBLE_DEVICES": "0"}
        if row.fate is Fate.REFUSED:
            with pytest.raises(SettingError) as refused:
                tell(*given, *more, **env)
            assert row.why in str(refused.value)
            assert row.advice in str(refused.value)
        else:
            told = tell(*given, *more, **env)
            explained = [line for line in told.remarks if line.startswith(f"{row.option}=") and line.endswith(row.why)]
            assert len(explained) == (row.fate is Fate.EXPLAINED)


EFFECTS: dict[str, Callable[[LaunchSettings], object]] = {
    "--rank": lambda settings: settings.node.rank,
    "--nnodes": lambda settings: settings.spec.nodes,
    "--max_restart": lambda settings: settings.spec.max_restarts,
    "--log_dir": lambda settings: Path(settings.logs.links).name,
    "--log_overwrite": lambda settings: settings.logs.overwrite,
    "--job_id": lambda settings: settings.spec.job,
}
"""What has the default of an option, in text, where Paddle's dialect is spoken."""


@pytest.mark.parametrize("row", [row for row in PADDLE_ROWS if row.option in EFFECTS], ids=lambda row: row.option)
def test_defaults_have_the_same_effect(row: Row) -> None:
    many = settings("--master=etcd://h:1", "--nnodes=1")
    assert str(EFFECTS[row.option](many)) == row.default


def test_what_is_nothing_by_default_is_nothing_here() -> None:
    """Options without a default, and those that only count where they are given."""
    alone = settings("--dialect=paddle")
    assert (alone.store.endpoints, alone.node.local_addr, alone.spec.servers, alone.slots) == ((), "", None, 1)
    told = tell("--dialect=paddle")
    assert (told.environment, told.remarks) == ({}, [])
    for row in PADDLE_ROWS:
        name = paddle_options.SHARED.get(row.name, row.name)
        if row.default and row.name not in paddle_options.SHARED and row.name != "job_id":
            assert str(told.values[name]) in (row.default, str(bool(int(row.default))) if row.default == "0" else ""), (
                row
            )
        assert told.source(name) is OptionSource.DEFAULT


def test_wrong_types_are_refused_by_name() -> None:
    kinds = {
        **dict.fromkeys(("--rank", "--max_restart", "--elastic_level", "--elastic_timeout", "--start_port"), "x"),
        **dict.fromkeys(("--gloo_port", "--scale"), "1.5"),
        **dict.fromkeys(("--legacy", "--log_overwrite", "--sort_ip", "--enable_gpu_log", "--force"), "maybe"),
        **dict.fromkeys(("--auto_cluster_config", "--enable_auto_mapping"), "2"),
        "--run_mode": "magic",
    }
    for option, value in kinds.items():
        with pytest.raises(click.BadParameter) as refused:
            tell(f"{option}={value}")
        assert option in refused.value.format_message().replace("--", "\0").replace("-", "_").replace("\0", "--")
        assert value in refused.value.format_message()
    with pytest.raises(click.NoSuchOption):
        tell("--cluster_node_ips=a")


def test_the_page_lists_every_option_and_variable() -> None:
    page = (ROOT / "docs" / "paddle.md").read_text()
    for row in PADDLE_ROWS:
        line = next((line for line in page.splitlines() if line.startswith(f"| `{row.option}`")), "")
        assert line, f"{row.option} has no row in docs/paddle.md"
        for word in (*row.aliases, *row.variables):
            assert f"`{word}`" in line, f"{word} is missing in {line}"
        assert row.fate.value in line
    for variable in OTHER_VARIABLES:
        assert f"| `{variable}` |" in page, f"{variable} has no row in docs/paddle.md"


def test_the_program_names_what_differs(theirs: list[Theirs], capsys: pytest.CaptureFixture[str]) -> None:
    text = dropin_paddle.report(theirs, dropin_paddle.variables())
    print(text)
    assert "MISSING" not in text
    exceptions = [line.split()[0] for line in text.partition("and why:\n")[2].splitlines()]
    of_theirs = {spelling for one in theirs for spelling in one.spellings}
    assert sorted(exceptions) == sorted(row.option for row in PADDLE_ROWS if row.exception and row.option in of_theirs)
    assert "--rank" not in exceptions
