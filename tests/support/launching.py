"""Derive a launcher's settings from a command line and variables, without starting anything."""

from __future__ import annotations

from collections.abc import Mapping

from edl.errors import SettingError
from edl.launch import __main__ as program
from edl.launch.cli import settings_of, with_both_spellings
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import LaunchSettings

SCRIPTS = (".py", ".sh", "json.tool")


def tell(*arguments: str, env: Mapping[str, str] | None = None, script: str = "train.py") -> ResolvedOptions:
    """What it is told. ``script``: the script if none is named; empty: none."""
    given = [*arguments] if not script or any(one.endswith(SCRIPTS) for one in arguments) else [*arguments, script]
    context = program.run.make_context("edl-run", with_both_spellings(given))
    told = ResolvedOptions.by(context, context.params["script"], context.params["arguments"])
    try:
        program.settle(told, env or {})
    except SettingError as error:
        raise told.named(error) from error
    return told


def launch_settings(told: ResolvedOptions) -> LaunchSettings:
    """The settings of a launcher that has workers."""
    settings = settings_of(told)
    assert isinstance(settings, LaunchSettings)
    return settings


def read(*arguments: str, env: Mapping[str, str] | None = None) -> LaunchSettings:
    """The settings that follow. ``train.py`` has to exist."""
    told = tell(*arguments, env=env)
    try:
        return launch_settings(told)
    except SettingError as error:
        raise told.named(error) from error
