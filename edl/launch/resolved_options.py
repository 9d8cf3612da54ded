"""Options after all sources have been read: command line, ``EDL_*``, other launchers' variables, the cluster's.

The same thing can be said in several places. Who counts is a matter of strength (``Source``), never of the order in
which the places are read, so each place is read in a file of its own (``torchrun_options``, ``paddle_options``,
``cluster_env``) that only makes offers. What was overridden, renamed or means nothing here is said in remarks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click
from click.core import ParameterSource

from edl.config import adopt, environment
from edl.errors import SettingError


class Source(enum.IntEnum):
    """Who has said a value, the weakest first."""

    DEFAULT = 0
    CLUSTER = 1
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


def inside_worker(env: Mapping[str, str]) -> bool:
    """Whether a worker of ours has started this launcher: what other launchers' variables say there, we have said."""
    return "EDL_ROUND" in env or "EDL_AGENT" in env


EXPORTED = ("EDL_NODE_ID", "EDL_GLOBAL_BATCH", "EDL_LOCAL_BATCH", "EDL_LOGICAL_RANKS")
"""What workers are told under the names that options of ours have as variables."""


def forget_exports() -> None:
    """Before the command line is read: a launcher in a worker is another node than its own, of another job."""
    if inside_worker(environment()):
        adopt(dict.fromkeys(EXPORTED))


@dataclass(slots=True)
class ResolvedOptions:
    """Each option's value with its source. ``script`` and ``arguments``: what the workers run."""

    values: dict[str, Any]
    script: str = ""
    arguments: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)
    """Said once at the start, a line each."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Variables that hold for this launcher and its workers, over those it was started with; None: taken away."""
    for_workers: dict[str, str | None] = field(default_factory=dict)
    """The same for the workers alone."""
    _sources: dict[str, Source] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _options: Mapping[str, click.Parameter] = field(default_factory=dict)

    @classmethod
    def by(cls, context: click.Context, script: str = "", arguments: tuple[str, ...] = ()) -> ResolvedOptions:
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
            self.remark(f"{origin}={value} overrides {self.said(name)}={self.values[name]}")
        self.values[name] = read
        self._sources[name] = source
        self._origins[name] = origin
        return True

    def origin(self, name: str) -> str:
        """Where the value that holds was said, in the words of who said it; empty: as the option itself."""
        return f"EDL_{name.upper()}" if self.source(name) is Source.EDL else self._origins.get(name, "")

    def said(self, name: str) -> str:
        """The same, and the option where it was said as that."""
        return self.origin(name) or "--" + name.replace("_", "-")

    def named(self, error: SettingError) -> SettingError:
        """The same error about what was really said: ``PADDLE_RANK`` where ``--node-rank`` is wrong."""
        origin = self.origin(error.setting.removeprefix("--").replace("-", "_"))
        return error.renamed(origin) if origin and error.setting.startswith("--") else error

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
