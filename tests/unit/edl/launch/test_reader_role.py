"""The command line of launchers that have readers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
import pytest

from edl.errors import SettingError, UsageError
from edl.launch import __main__ as program
from edl.launch.cli import settings_of, with_both_spellings
from edl.launch.readers import check_packages
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import Backend, ReaderPool, ReaderSettings
from tests.support.launching import launch_settings

STORE, JOB = "--rdzv-endpoint=h:2379", "--rdzv-id=j"


def read(*arguments: str) -> ReaderSettings:
    context = program.run.make_context("edl-run", with_both_spellings(["--role=reader", *arguments]))
    settings = settings_of(ResolvedOptions(context.params))
    assert isinstance(settings, ReaderSettings)
    return settings


def test_readers_need_to_know_where_the_job_is() -> None:
    settings = read(STORE, JOB, "--readers=3", "--node-id=n", "--recover-timeout=5", "--shutdown-timeout=7")
    assert (settings.helper.job, settings.helper.node, settings.readers) == ("j", "n", ReaderPool(3, 16))
    assert (settings.helper.recover_s, settings.helper.grace_s) == (5.0, 7.0)
    assert (settings.helper.store.backend, settings.helper.store.endpoints) == (Backend.EMBEDDED, ("h:2379",))
    assert read(STORE, JOB).readers.count == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([JOB], "readers join a job that runs elsewhere"),
        ([STORE, JOB, "--standalone"], "readers join a job that runs elsewhere"),
        ([STORE], "--role=reader needs the name of the job"),
        ([STORE, "--rdzv-id=a/b"], "'/' not allowed"),
        ([STORE, JOB, "--node-id=a/b"], "--node-id"),
        ([STORE, JOB, "--readers=-1"], "--readers=-1: must be from 0 to 1024"),
        ([STORE, JOB, "--readers=1025"], "--readers=1025: must be from 0 to 1024"),
        ([STORE, JOB, "--reader-capacity=0"], "--reader-capacity=0: must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        read(*arguments)


def test_a_training_launcher_may_have_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    context = program.run.make_context("edl-run", ["--readers=2", "--reader-capacity=3", "train.py"])
    options = dict(context.params)
    settings = launch_settings(ResolvedOptions(options, options.pop("script"), options.pop("arguments")))
    assert settings.readers == ReaderPool(2, 3)


def test_a_script_is_needed_unless_it_only_reads() -> None:
    with pytest.raises(click.MissingParameter):
        program.run.main(args=["--nnodes=1"], standalone_mode=False)
    with pytest.raises(click.UsageError, match="runs no script"):
        program.run.main(args=["--role=reader", STORE, JOB, "train.py"], standalone_mode=False)


def test_a_missing_package_is_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages(1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_packages(0)
    with pytest.raises(SettingError, match=r"pip install 'edl\[data\]'"):
        check_packages(1)
