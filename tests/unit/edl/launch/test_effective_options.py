"""The options that ``edl config`` shows."""

from __future__ import annotations

import click
import pytest

from edl.config import NO_HANGS, HangTimeout
from edl.errors import SettingError
from edl.launch.effective_options import HIDDEN, effective
from edl.launch.options import launcher_options
from edl.launch.options.parsing import hang_timeout
from edl.launch.resolved_options import OptionSource, ResolvedOptions
from edl.wire.node_requests import OptionValue


def resolved(*words: str) -> ResolvedOptions:
    found: list[ResolvedOptions] = []

    @click.command(context_settings={"auto_envvar_prefix": "EDL"})
    @launcher_options
    @click.pass_context
    def launch(context: click.Context, /, **_: object) -> None:
        found.append(ResolvedOptions.by(context))

    launch.main([*words], standalone_mode=False)
    return found[0]


def test_values_sources_and_defaults() -> None:
    options = resolved("--nnodes=1:4", "--hang-timeout=auto:60", "--drain-signals=TERM")
    options.offer("max_restarts", 7, OptionSource.PADDLE, "PADDLE_MAX_RESTARTS")
    values = {one.flag: one for one in effective(options)}
    assert values["--nnodes"] == OptionValue("--nnodes", "1:4", "command-line", "", "1:1")
    assert values["--max-restarts"] == OptionValue("--max-restarts", "7", "paddle", "PADDLE_MAX_RESTARTS", "3")
    assert (values["--hang-timeout"].value, values["--hang-timeout"].default) == ("auto:60", "auto")
    assert values["--lease-ttl"] == OptionValue("--lease-ttl", "3", "default", "", "3")


def test_what_may_contain_a_password_is_hidden() -> None:
    values = {
        one.flag: one
        for one in effective(
            resolved(
                *("--rdzv-conf=user=me,password=geheim", "--notify=slack://geheim"),
                *("--otlp-endpoint=https://me:geh@eim@collector:4318", "--checkpoint-dir=ftp://me:geheim@files/job"),
            )
        )
    }
    assert values["--otlp-endpoint"].value == "https://…@collector:4318"
    assert values["--checkpoint-dir"].value == "ftp://…@files/job"
    assert (values["--rdzv-conf"].value, values["--notify"].value) == (HIDDEN, HIDDEN)
    assert not any("geheim" in one.value for one in values.values())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", HangTimeout()),
        ("auto:60", HangTimeout(auto=True, seconds=60.0)),
        ("600", HangTimeout(auto=False, seconds=600.0)),
        ("0", NO_HANGS),
    ],
)
def test_the_timeout_for_hangs_is_shown_as_it_is_written(text: str, value: HangTimeout) -> None:
    assert hang_timeout("--hang-timeout", text) == value
    assert str(value) == text


@pytest.mark.parametrize("text", ["", "soon", "auto:", "auto:soon", "auto:inf", "nan", "auto60"])
def test_another_timeout_for_hangs_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="must be auto, auto:SECONDS or a number of seconds"):
        hang_timeout("--hang-timeout", text)
