"""Derive a launcher's settings from a command line and variables, without starting anything."""

from __future__ import annotations

from collections.abc import Mapping

from edl.errors import SettingError
from edl.launch import __main__ as program
from edl.launch.cli import settings_from, with_both_spellings
from edl.launch.settings import LaunchSettings
from edl.launch.told import Told

SCRIPTS = (".py", ".sh", "json.tool")


def tell(*arguments: str, env: Mapping[str, str] | None = None) -> Told:
    """The settings of this command line. The script is ``train.py`` by default."""
    given = [*arguments] if any(one.endswith(SCRIPTS) for one in arguments) else [*arguments, "train.py"]
    context = program.run.make_context("edl-run", with_both_spellings(given))
    told = Told.by(context, context.params["script"], context.params["arguments"])
    try:
        program.settle(told, env or {})
    except SettingError as error:
        raise told.named(error) from error
    return told


def read(*arguments: str, env: Mapping[str, str] | None = None) -> LaunchSettings:
    """The settings that follow. ``train.py`` has to exist."""
    told = tell(*arguments, env=env)
    try:
        return settings_from(told.values, told.script, told.arguments)
    except SettingError as error:
        raise told.named(error) from error
