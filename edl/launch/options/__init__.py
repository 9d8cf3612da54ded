"""The table of all options of ``python -m edl.launch``.

It is the source of the command line with its defaults, of ``--help``, of the checks of single values, of the tables in
docs/launcher.md (``python -m edl.launch.options --write``), of the comparison of launchers that must agree (see
``agreement``), and of the spellings of torchrun and paddle.distributed.launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from edl.launch.options import dropin, faults, health, job, learning, scheduling, state, watching, workers
from edl.launch.options.option import Option, Section

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

SECTIONS: tuple[Section, ...] = (
    *job.SECTIONS,
    *faults.SECTIONS,
    *health.SECTIONS,
    *state.SECTIONS,
    *learning.SECTIONS,
    *scheduling.SECTIONS,
    *watching.SECTIONS,
    *workers.SECTIONS,
    *dropin.SECTIONS,
)
OPTIONS: tuple[Option, ...] = tuple(option for section in SECTIONS for option in section.options)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
"""Options by ``Option.name``."""
BY_SPELLING: Mapping[str, Option] = {spelling: option for option in OPTIONS for spelling in option.names}
"""Options by flag and by other spellings, with dashes."""


def entry_of(option: str) -> Option:
    """The option that another launcher spells like this, such as ``--server_num``. Raises ``KeyError``."""
    return BY_SPELLING[option.replace("_", "-")]


def launcher_options(function: F) -> F:
    """Add all options of the launcher to a click command; a decorator."""
    for option in reversed(OPTIONS):
        function = option.click_option()(function)
    return function


def value_options() -> dict[str, bool]:
    """All spellings of all options, and whether each takes a value."""
    return {spelling: not option.flag_only for spelling, option in BY_SPELLING.items()}


def is_default(name: str, values: Mapping[str, Any]) -> bool:
    """Whether ``values`` holds an option's default."""
    return bool(values[name] == BY_NAME[name].default)


def value(name: str, values: Mapping[str, Any]) -> Any:
    """An option's value as the settings hold it, parsed and checked. Raises ``SettingError``."""
    return BY_NAME[name].value(values[name])


def record(kind: type[R], values: Mapping[str, Any], **more: Any) -> R:
    """Create a settings record from the options that fill its fields. ``more``: further fields, which take precedence.
    Raises ``SettingError``."""
    return kind(**{**fields(kind, values), **more})


def fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a settings record that a single option fills, with their values. Raises ``SettingError``."""
    return {option.setting.name: option.value(values[option.name]) for option in of_record(kind) if option.setting}


@functools.cache
def of_record(kind: type) -> tuple[Option, ...]:
    """The options that fill a field of this settings record."""
    return tuple(option for option in OPTIONS if option.setting is not None and option.setting.record is kind)


class SectionedCommand(click.Command):
    """A click command whose ``--help`` lists the options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one block for each section, then one for click's own options."""
        left = {parameter.name: parameter for parameter in self.get_params(ctx)}
        for section in SECTIONS:
            mine = [left.pop(option.name, None) for option in section.options]
            _write(ctx, formatter, section.title, mine)
        _write(ctx, formatter, "Other options", [left[name] for name in left])


def _write(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, parameters: list[click.Parameter | None]
) -> None:
    rows = [row for one in parameters if one is not None and (row := one.get_help_record(ctx)) is not None]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)
