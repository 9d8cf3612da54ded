"""The options of a launcher as a table, and what has been changed since it was started. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from edl.arithmetic.hyper import describe
from edl.wire.node_requests import OptionValue
from edl.wire.status import JobStatus

OPTIONS = ("OPTION", "VALUE", "SOURCE")
_SOURCES = {
    "default": "default",
    "cluster": "cluster's variables",
    "pet": "torchrun's variables",
    "edl": "environment",
    "command-line": "command line",
    "paddle": "Paddle's variables",
}
NONE = "-"


def rows(options: Sequence[OptionValue], *, everything: bool) -> list[list[str]]:
    """The rows of the table ``OPTIONS``. ``everything``: those with a default as well."""
    return [[one.flag, one.value or NONE, source_text(one)] for one in options if everything or one.source != "default"]


def source_text(one: OptionValue) -> str:
    """Where a value comes from, with the variable's name, and the default if it is another."""
    source = _SOURCES.get(one.source, one.source) + (f" ({one.origin})" if one.origin else "")
    differs = one.source != "default" and one.value != one.default
    return f"{source}; default {one.default or NONE}" if differs else source


def changed_lines(status: JobStatus) -> list[str]:
    """What holds now, as far as requests have changed it since the launchers were started."""
    lines = []
    scale = status.scale
    if scale.generation:
        by = f", by {scale.by}" if scale.by else ""
        lines.append(f"Size: {scale.minimum}:{scale.maximum} nodes, {scale.desired} wanted{by}")
    if status.settings.number:
        lines.append(f"Settings {status.settings.number}: {describe(status.settings)}")
    return ["Changed while the job runs:", *(f"  {line}" for line in lines)] if lines else []
