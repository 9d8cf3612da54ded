"""The options that ``edl config`` shows."""

from __future__ import annotations

import click

from edl.launch.effective_options import HIDDEN, effective
from edl.launch.options import launcher_options
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
        one.flag: one for one in effective(resolved("--rdzv-conf=user=me,password=geheim", "--notify=slack://geheim"))
    }
    assert (values["--rdzv-conf"].value, values["--notify"].value) == (HIDDEN, HIDDEN)
    assert not any("geheim" in one.value for one in values.values())
