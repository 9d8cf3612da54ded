"""Every option of ``python -m edl.launch``, each in exactly one entry.

From this table come the command line, its defaults, ``--help`` by sections, the errors about single values, the tables
in docs/launcher.md (``python -m edl.launch.options --write``), the comparison of launchers that must agree (see
``agreement``), and the spellings of torchrun and of paddle.distributed.launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from edl.launch.options import dropin, faults, job, learning, scheduling, state, workers
from edl.launch.options.option import Option, Section

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

SECTIONS: tuple[Section, ...] = (
    *job.SECTIONS,
    *faults.SECTIONS,
    *state.SECTIONS,
    *learning.SECTIONS,
    *scheduling.SECTIONS,
    *workers.SECTIONS,
    *dropin.SECTIONS,
)
OPTIONS: tuple[Option, ...] = tuple(option for section in SECTIONS for option in section.options)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
"""By their names among the values."""
BY_SPELLING: Mapping[str, Option] = {spelling: option for option in OPTIONS for spelling in option.names}


def entry_of(option: str) -> Option:
    """The entry for an option as another launcher spells it, such as ``--server_num``. Raises ``KeyError``."""
    return BY_SPELLING[option.replace("_", "-")]


def launcher_options(function: F) -> F:
    """Give a click command all options of the launcher."""
    for option in reversed(OPTIONS):
        function = option.click_option()(function)
    return function


def value_options() -> dict[str, bool]:
    """Each spelling of an option, and whether a value belongs to it."""
    return {spelling: not option.flag_only for spelling, option in BY_SPELLING.items()}


def is_default(name: str, values: Mapping[str, Any]) -> bool:
    """Whether an option has its default among these values."""
    return bool(values[name] == BY_NAME[name].default)


def value(name: str, values: Mapping[str, Any]) -> Any:
    """An option's value, parsed and checked by its entry. Raises ``SettingError``."""
    return BY_NAME[name].value(values[name])


def record(kind: type[R], values: Mapping[str, Any], **more: Any) -> R:
    """A settings record whose fields come from options. ``more``: fields that take more than one option to decide.
    Raises ``SettingError``."""
    return kind(**{**fields(kind, values), **more})


def fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a settings record that come from one option each. Raises ``SettingError``."""
    return {option.setting.name: option.value(values[option.name]) for option in of_record(kind) if option.setting}


@functools.cache
def of_record(kind: type) -> tuple[Option, ...]:
    """The options that fill fields of a settings record."""
    return tuple(option for option in OPTIONS if option.setting is not None and option.setting.record is kind)


class SectionedCommand(click.Command):
    """A command whose ``--help`` lists the options by the sections of the table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one block for each section, then what is in none."""
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
