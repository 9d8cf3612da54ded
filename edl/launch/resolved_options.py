"""The values of all options after every source has been read: command line, ``EDL_*``, variables of other launchers and
of the cluster.

The same setting can come from several sources. ``OptionSource`` decides which takes precedence, not the order in which
they are read. So each source has its own module (``torchrun_options``, ``paddle_options``, ``cluster_env``), which only
offers values. Remarks report what was overridden, renamed or ignored.
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


class OptionSource(enum.IntEnum):
    """Where a value comes from, in order of precedence, the lowest first."""

    DEFAULT = 0
    CLUSTER = 1
    """Variables that a cluster manager sets for its processes: Kubeflow, Volcano, Slurm, MPI."""
    PET = 2
    """``PET_*``, torchrun's variables."""
    EDL = 3
    """``EDL_*``."""
    COMMAND_LINE = 4
    PADDLE = 5
    """``PADDLE_*``: in Paddle's launcher they override the command line, and operators rely on that."""


_SOURCES = {
    ParameterSource.COMMANDLINE: OptionSource.COMMAND_LINE,
    ParameterSource.ENVIRONMENT: OptionSource.EDL,
}


def inside_worker(env: Mapping[str, str]) -> bool:
    """Whether this launcher runs inside a worker of edl. Then edl itself has set the variables of other launchers, so
    they are ignored."""
    return "EDL_ROUND" in env or "EDL_AGENT" in env


EXPORTED = ("EDL_NODE_ID", "EDL_GLOBAL_BATCH", "EDL_LOCAL_BATCH", "EDL_LOGICAL_RANKS", "EDL_REPLICA_SIZE")
"""Variables that edl sets in workers and that have the names of option variables."""

OF_WORKER = (
    "EDL_ACCUMULATION", "EDL_AGENT", "EDL_AHEAD_LOCAL_RANK", "EDL_DATA_SETS", "EDL_JOB_ID", "EDL_LR_FACTOR",
    "EDL_MICRO_BATCH", "EDL_NODES", "EDL_PS", "EDL_ROUND", "EDL_SETTINGS", "EDL_SLOT", "EDL_VERIFY", "EDL_WORKER_PID",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT", "PADDLE_WORKER_ENDPOINT", "PADDLE_GLOBAL_RANK", "PADDLE_GLOBAL_SIZE",
    "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "PADDLE_RANK_IN_NODE", "PADDLE_NNODES", "PADDLE_MASTER",
    "PADDLE_MASTER_ENDPOINT", "PADDLE_ROLE", "TRAINING_ROLE", "PADDLE_PORT", "PADDLE_WITH_GLOO",
    "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_GLOO_RENDEZVOUS", "PADDLE_GLOO_HTTP_ENDPOINT",
)  # fmt: skip
"""Variables that say which worker of which job a process is. A launcher inside a worker keeps them from its own
workers: these would take themselves for helpers of that worker, or for it."""


def forget_exports() -> None:
    """Inside a worker, remove the variables in ``EXPORTED``: this launcher is a node of another job. Must be called
    before the command line is read."""
    if inside_worker(environment()):
        adopt(dict.fromkeys(EXPORTED))


@dataclass(slots=True)
class ResolvedOptions:
    """The value of each option and its source. ``script`` and ``arguments``: the workers' command."""

    values: dict[str, Any]
    script: str = ""
    arguments: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)
    """Lines for the user, printed once at the start."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Changes to the environment of this launcher and its workers; None removes a variable."""
    for_workers: dict[str, str | None] = field(default_factory=dict)
    """Changes to the environment of the workers only."""
    _sources: dict[str, OptionSource] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _options: Mapping[str, click.Parameter] = field(default_factory=dict)

    @classmethod
    def by(cls, context: click.Context, script: str = "", arguments: tuple[str, ...] = ()) -> ResolvedOptions:
        """The options that click has parsed from the command line and from ``EDL_*``."""
        options = {param.name: param for param in context.command.params if param.name}
        sources = {
            name: _SOURCES.get(context.get_parameter_source(name) or ParameterSource.DEFAULT, OptionSource.DEFAULT)
            for name in context.params
        }
        values = {name: value for name, value in context.params.items() if name not in ("script", "arguments")}
        return cls(values, script, arguments, _sources=sources, _options=options)

    def source(self, name: str) -> OptionSource:
        """The source of the current value. ``name``: as in ``values``, with underscores."""
        return self._sources.get(name, OptionSource.DEFAULT)

    def given(self, name: str) -> bool:
        """Whether any source has set the option."""
        return self.source(name) > OptionSource.DEFAULT

    def offer(self, name: str, value: Any, source: OptionSource, origin: str) -> bool:
        """Set a value unless a source of higher precedence has set one; returns whether it was set.

        ``value``: a string is parsed by the option's click type. ``origin``: name of the source for messages, such as
        ``PADDLE_NNODES``. Raises ``SettingError`` with the origin if the value is invalid.
        """
        if name not in self.values:
            raise KeyError(f"no such option: {name}")
        if source < self.source(name):
            return False
        read = self._read(name, value, origin)
        if source > OptionSource.COMMAND_LINE and self.given(name) and read != self.values[name]:
            self.remark(f"{origin}={value} overrides {self.said(name)}={self.values[name]}")
        self.values[name] = read
        self._sources[name] = source
        self._origins[name] = origin
        return True

    def origin(self, name: str) -> str:
        """The name of the source of the current value, for messages; empty: the option itself was given, or nothing."""
        return f"EDL_{name.upper()}" if self.source(name) is OptionSource.EDL else self._origins.get(name, "")

    def said(self, name: str) -> str:
        """``origin``, or the option's flag if that is empty."""
        return self.origin(name) or "--" + name.replace("_", "-")

    def named(self, error: SettingError) -> SettingError:
        """The same error under the name that the user has set: ``PADDLE_RANK`` instead of ``--node-rank``."""
        origin = self.origin(error.setting.removeprefix("--").replace("-", "_"))
        return error.renamed(origin) if origin and error.setting.startswith("--") else error

    def remark(self, line: str) -> None:
        """Add a line to print at the start, unless it is there already."""
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
