"""Types of the option table, and the click options made from its entries."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import click

from edl.errors import SettingError


class _Missing(enum.Enum):
    """The entry writes no default: that of the settings field applies."""

    MISSING = enum.auto()


Check = Callable[[Any], str]
"""A function from a value to what is wrong with it, such as ``must be at least 1``; empty: nothing."""
Parser = Callable[[str, str], Any]
"""A function from flag and text to the value that the settings hold. Raises ``SettingError``."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a settings record. The record defines the default, and checks the value when one is created."""

    record: type
    name: str

    @property
    def default(self) -> Any:
        """The field's default. Raises ``KeyError`` if it has none."""
        found = _defaults(self.record)[self.name]
        if found is dataclasses.MISSING:
            raise KeyError(f"{self.record.__name__}.{self.name} has no default")
        return found


@functools.cache
def _defaults(record: type) -> dict[str, Any]:
    """The defaults of a settings record by field."""
    return {one.name: one.default for one in dataclasses.fields(record)}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the launcher."""

    flag: str
    """Its name in messages and documentation, with dashes: ``--max-restarts``."""
    _: KW_ONLY
    help: str
    """Description in Markdown, for ``--help`` and for the tables in docs/launcher.md."""
    setting: Setting | None = None
    """The settings field that it fills; None: its value is used otherwise."""
    written_default: Any = _Missing.MISSING
    """The default, if it is not that of ``setting``."""
    others: tuple[str, ...] = ()
    """Other spellings, such as ``-m``."""
    choices: tuple[str, ...] = ()
    """All allowed values; empty: any of its type. Not needed if the default is a member of an enum."""
    type: click.ParamType[Any] | None = None
    """Type for click; None: the type of the default."""
    parse: Parser | None = None
    """Parser from text to the value in the settings; None: the value that click has parsed."""
    check: Check | None = None
    """Check of the value, if no settings record checks it."""
    advice: str = ""
    """The suggested action in the error of ``check``."""
    metavar: str | None = None
    repeated: bool = False
    """Whether it may be given more than once."""
    flag_only: bool = False
    """Whether it takes no value."""
    variable: bool = True
    """Whether ``EDL_<NAME>`` in the environment sets it. Options that only another launcher has do not."""
    old_variables: tuple[str, ...] = ()
    """Further variables that set it."""
    same_as: str = ""
    """The flag of edl's option of which this is another launcher's name; empty: none."""
    hidden: bool = False
    """Whether it is left out of ``--help``, because it is explained or refused."""
    parameter: str = ""
    """``name``, if that does not follow from the flag."""
    callback: Callable[[click.Context, click.Parameter, Any], Any] | None = field(default=None, repr=False)
    """Called while the command line is parsed, if the option is given; such an option has no value."""

    @property
    def name(self) -> str:
        """Its key in ``ResolvedOptions.values``: with underscores and without leading dashes."""
        return self.parameter or self.flag.lstrip("-").replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings, the longest first."""
        return tuple(sorted((self.flag, *self.others), key=len, reverse=True))

    @property
    def own_variable(self) -> str:
        """The ``EDL_*`` variable that sets it; empty: none."""
        return "EDL_" + self.flag.lstrip("-").replace("-", "_").upper() if self.variable else ""

    @property
    def default(self) -> Any:
        """The value that click returns if the option is not given: as text if the option has a parser or an enum."""
        if self.flag_only:
            return False
        value = self._written
        return default_text(self, value) if self.parse is not None or isinstance(value, enum.Enum) else value

    @property
    def _written(self) -> Any:
        """The default in the entry or, without one, in the settings record."""
        if self.written_default is _Missing.MISSING:
            return self.setting.default if self.setting is not None else ""
        return self.written_default

    def value(self, given: Any) -> Any:
        """Convert and check ``given``, which click has parsed; returns what the settings hold. Raises
        ``SettingError``."""
        kind = self._written.__class__
        if self.parse is not None:
            value = self.parse(self.flag, given)
        else:
            value = kind(given) if issubclass(kind, enum.Enum) else given
        wrong = self.check(value) if self.check is not None else ""
        if wrong:
            shown = f"{value:g}" if isinstance(value, float) else given
            raise SettingError(self.flag, shown if shown != "" else "''", wrong, self.advice)
        return value

    @property
    def allowed(self) -> tuple[str, ...]:
        """All allowed values; empty: it is not a choice."""
        default = self._written
        return self.choices or (tuple(one.value for one in default.__class__) if isinstance(default, enum.Enum) else ())

    def click_option(self) -> Callable[[Any], Any]:
        """The decorator that adds this option to a click command."""
        more: dict[str, Any] = {}
        default = self.default
        if self.flag_only:
            more["is_flag"] = True
        elif self.callback is not None:
            more |= {"default": None, "expose_value": False, "is_eager": True, "callback": self.callback}
        elif not self.repeated:
            more["default"] = default
        if self.old_variables:
            more["envvar"] = [self.own_variable, *self.old_variables]
        if not self.flag_only:
            more["type"] = click.Choice(self.allowed) if self.allowed else self.type or _type_of(default)
        names = [self.flag, *self.others, *([self.parameter] if self.parameter else [])]
        return click.option(
            *names,
            help=self._plain_help(),
            metavar=self.metavar,
            multiple=self.repeated,
            hidden=self.hidden,
            allow_from_autoenv=self.variable,
            **more,
        )

    def _plain_help(self) -> str:
        """``help`` for a terminal: without Markdown, followed by the default."""
        text = plain_text(self.help)
        if self.same_as:
            return text
        shown = default_cell(self).strip("`")
        return text if shown in ("none", "off") or "Default:" in text or not text else f"{text} Default: {shown}."


def _type_of(default: Any) -> click.ParamType[Any]:
    kinds: dict[type, click.ParamType[Any]] = {bool: click.BOOL, int: click.INT, float: click.FLOAT}
    return kinds.get(default.__class__, click.STRING)


def default_text(option: Option, value: Any) -> str:
    """A default as written on the command line."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, str):
        return value
    if option.metavar == "BYTES" and value and not value % (1 << 30):
        return f"{value >> 30}G"
    return f"{value:g}" if isinstance(value, float) else str(value)


def default_cell(option: Option) -> str:
    """The default as the tables in the documentation show it."""
    if option.flag_only:
        return "off"
    value = option.default
    if option.repeated or value == "":
        return "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def plain_text(markdown: str) -> str:
    """Markdown without backticks, and with the names of pages in place of links."""
    return re.sub(r"\[([^\]]+)\]\(([^)#]*)[^)]*\)", _link, markdown).replace("`", "")


def _link(found: re.Match[str]) -> str:
    text, page = found[1], found[2] or "launcher.md"
    return f"docs/{page}" if text in (page, "below") else f"{text} (docs/{page})"


@dataclass(frozen=True, slots=True)
class Section:
    """A group of options in ``--help`` and in the documentation."""

    title: str
    options: tuple[Option, ...]
    intro: str = ""
    """Markdown before the table in the documentation."""
    documented: bool = True
    """Whether docs/launcher.md has a table for it; otherwise docs/torchrun.md or docs/paddle.md describes its
    options."""
