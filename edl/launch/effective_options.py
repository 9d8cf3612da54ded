"""The options of this launcher with their values and sources, for ``edl config``."""

from __future__ import annotations

from typing import Any

from edl.launch.options import SECTIONS
from edl.launch.options.option import Option, default_text
from edl.launch.resolved_options import ResolvedOptions
from edl.wire.address import without_credentials
from edl.wire.node_requests import OptionValue

HIDDEN = "…"
"""Shown in place of a value that may contain a password."""
_CONFIDENTIAL = ("rdzv_conf", "notify")
"""Options whose values may contain passwords, or addresses that are as good as one."""


def effective(resolved: ResolvedOptions) -> tuple[OptionValue, ...]:
    """All documented options, in the order of docs/launcher.md."""
    options = (option for section in SECTIONS if section.documented for option in section.options)
    return tuple(_value(option, resolved) for option in options if option.name in resolved.values)


def _value(option: Option, resolved: ResolvedOptions) -> OptionValue:
    value, default = resolved.values[option.name], option.default
    source = resolved.source(option.name).name.lower().replace("_", "-")
    return OptionValue(option.flag, _text(option, value), source, resolved.origin(option.name), _text(option, default))


def _text(option: Option, value: Any) -> str:
    """A value as written on the command line; empty for none."""
    if value in (None, "", (), False):
        return ""
    if option.name in _CONFIDENTIAL:
        return HIDDEN
    if isinstance(value, tuple):
        return without_credentials(" ".join(str(one) for one in value))
    return "yes" if value is True else without_credentials(default_text(option, value))
