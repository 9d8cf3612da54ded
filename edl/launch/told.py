"""What a launcher has been told, and by whom: options of the command line, and all that stands in for them.

The same thing can be said in several places. Who counts is a matter of strength (``Source``), never of the order in
which the places are read, so each place is read in a file of its own (``torchrun_options``, ``paddle_options``,
``worlds``) that only makes offers. What was overridden, renamed or means nothing here is said in remarks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click
from click.core import ParameterSource

from edl.errors import SettingError


class Source(enum.IntEnum):
    """Who has said a value, the weakest first."""

    DEFAULT = 0
    WORLD = 1
    """Variables that a cluster sets for every program: Kubeflow, Slurm, MPI."""
    PET = 2
    """``PET_*``, torchrun's defaults."""
    EDL = 3
    """``EDL_*``."""
    COMMAND_LINE = 4
    PADDLE = 5
    """``PADDLE_*``: Paddle's launcher lets them win over its command line, and its operators rely on it."""


_SOURCES = {
    ParameterSource.COMMANDLINE: Source.COMMAND_LINE,
    ParameterSource.ENVIRONMENT: Source.EDL,
}


@dataclass(slots=True)
class Told:
    """Each option's value with its source. ``script`` and ``arguments``: what the workers run."""

    values: dict[str, Any]
    script: str = ""
    arguments: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)
    """Said once at the start, a line each."""
    _sources: dict[str, Source] = field(default_factory=dict)
    _options: Mapping[str, click.Parameter] = field(default_factory=dict)

    @classmethod
    def by(cls, context: click.Context, script: str = "", arguments: tuple[str, ...] = ()) -> Told:
        """What click has read from the command line and from ``EDL_*``."""
        options = {param.name: param for param in context.command.params if param.name}
        sources = {
            name: _SOURCES.get(context.get_parameter_source(name) or ParameterSource.DEFAULT, Source.DEFAULT)
            for name in context.params
        }
        values = {name: value for name, value in context.params.items() if name not in ("script", "arguments")}
        return cls(values, script, arguments, _sources=sources, _options=options)

    def source(self, name: str) -> Source:
        """Who has said the value that holds now. ``name``: as in ``values``, with underscores."""
        return self._sources.get(name, Source.DEFAULT)

    def given(self, name: str) -> bool:
        """Whether anybody has said it at all."""
        return self.source(name) > Source.DEFAULT

    def offer(self, name: str, value: Any, source: Source, origin: str) -> bool:
        """Let ``value`` hold unless somebody stronger has said another one; returns whether it holds.

        ``value``: text is read as the option's own would be. ``origin``: where it was said, such as ``PADDLE_NNODES``.
        Raises ``SettingError`` that names the origin when it cannot be read.
        """
        if name not in self.values:
            raise KeyError(f"no such option: {name}")
        if source < self.source(name):
            return False
        read = self._read(name, value, origin)
        if source > Source.COMMAND_LINE and self.given(name) and read != self.values[name]:
            option = "--" + name.replace("_", "-")
            self.remark(f"{origin}={value} overrides {option}={self.values[name]}")
        self.values[name] = read
        self._sources[name] = source
        return True

    def remark(self, line: str) -> None:
        """Have this said at the start, once."""
        if line not in self.remarks:
            self.remarks.append(line)

    def _read(self, name: str, value: Any, origin: str) -> Any:
        option = self._options.get(name)
        if option is None or not isinstance(value, str):
            return value
        try:
            return option.type.convert(value, option, None)
        except click.BadParameter as error:
            raise SettingError(origin, value, error.message.rstrip(".")) from error
