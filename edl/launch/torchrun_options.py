"""Translates torchrun's options and ``PET_*`` variables to edl's own options.

``torchrun_table`` lists what each of them becomes, and why. The variables are offered first, for all options; then each
option that only torchrun has is translated, explained or refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from edl.agent.workers.paddle_environment import ScriptPlaces
from edl.errors import SettingError, UsageError
from edl.launch import torchrun_store
from edl.launch.accelerators import visible_devices
from edl.launch.dropin_table import Fate
from edl.launch.numa_binding import cores_of_slots
from edl.launch.options import BY_NAME, BY_SPELLING, is_default, record, value
from edl.launch.options.workers import TORCH_LAUNCH
from edl.launch.resolved_options import OptionSource, ResolvedOptions
from edl.launch.settings import WorkerSettings
from edl.launch.torchrun_table import FLAGS, TORCHRUN_ROWS, VARIABLES, row_of
from edl.ports import WorkerCommand

OWN_ROLES = ("reader", "trainer", "pserver")
"""Values of ``--role`` that mean something to edl; others are only passed to the workers."""
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def apply(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Apply torchrun's options and variables. Raises ``UsageError`` for an option that edl refuses."""
    _take_variables(resolved, env)
    for answer in (_event_handler, _how_often, _what_runs, _prefix, _local_rank, torchrun_store.apply):
        answer(resolved)
    if resolved.values["nproc_per_node"] == "xpu":
        resolved.values["nproc_per_node"] = "gpu"
    resolved.values["role"] = resolved.values["role"] or "default"
    _explain_variables(resolved, env)


def _take_variables(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    for row in TORCHRUN_ROWS:
        for variable in row.variables:
            text = env.get(variable, "")
            if text:
                resolved.offer(
                    row.name, _flag(variable, text) if row.name in FLAGS else text, OptionSource.PET, variable
                )
    if env.get(_SHUTDOWN) and not resolved.given("shutdown_timeout"):
        resolved.offer("shutdown_timeout", env[_SHUTDOWN], OptionSource.PET, _SHUTDOWN)


def _flag(variable: str, text: str) -> bool:
    if text.strip() not in ("0", "1"):
        raise SettingError(variable, text, "must be 0 or 1")
    return text.strip() == "1"


def _event_handler(resolved: ResolvedOptions) -> None:
    name, row = resolved.values["event_log_handler"], row_of("event_log_handler")
    if name in ("", "null"):
        return
    if name not in ("console", "dynamic_rendezvous"):
        raise SettingError("--event-log-handler", name, "not a handler that torch includes", row.advice)
    _explain(resolved, "event_log_handler")


def _how_often(resolved: ResolvedOptions) -> None:
    value("monitor_interval", resolved.values)
    for name in ("monitor_interval", "start_method"):
        if resolved.given(name) and not is_default(name, resolved.values):
            _explain(resolved, name)


def _what_runs(resolved: ResolvedOptions) -> None:
    """``--run-path`` means a Python file, and overrides ``--no-python`` and ``--module``."""
    if resolved.values["run_path"]:
        resolved.values["no_python"] = resolved.values["module"] = False


def _prefix(resolved: ResolvedOptions) -> None:
    option = BY_NAME["log_line_prefix_template"]
    if resolved.values[option.name]:
        ours = BY_SPELLING[option.same_as].name
        resolved.offer(ours, resolved.values[option.name], resolved.source(option.name), resolved.said(option.name))


def _local_rank(resolved: ResolvedOptions) -> None:
    """Pass ``--local-rank=N`` as the script's first argument, as ``torch.distributed.launch`` does."""
    if resolved.values["dialect"] == TORCH_LAUNCH and not resolved.values["use_env"]:
        resolved.arguments = ("--local-rank=${local_rank}", *resolved.arguments)


def _explain(resolved: ResolvedOptions, name: str) -> None:
    option = resolved.origin(name) or row_of(name).option
    resolved.remark(f"{option}={resolved.values[name]} has no effect: {row_of(name).why}")


def _explain_variables(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Add a remark for each variable without effect in edl that is set."""
    for variable in VARIABLES:
        text = env.get(variable.name, "")
        if variable.fate is Fate.EXPLAINED and not variable.quiet and text not in ("", "0"):
            instead = f". See {variable.becomes}" if variable.becomes else ""
            resolved.remark(f"{variable.name}={text} has no effect: {variable.why}{instead}")


def workers_from(
    options: Mapping[str, Any],
    command: WorkerCommand,
    slots: int,
    env: Mapping[str, str],
    *,
    variables: Mapping[str, str | None],
    scripts: ScriptPlaces,
) -> WorkerSettings:
    """The settings of this node's workers. ``slots``: number of slots, spare ones included. Raises ``UsageError``."""
    devices = visible_devices()
    for variable, entries in devices.items() if options["virtual_local_rank"] else ():
        if len(entries) < slots:
            why = f"each of {slots} slots needs its own device, but only {len(entries)} are available ({variable})"
            raise UsageError(f"--virtual-local-rank: {why}. Lower --nproc-per-node, or drop --virtual-local-rank")
    return record(
        *(WorkerSettings, options),
        command=command,
        role="" if options["role"] == "default" else options["role"],
        python=python_from(env),
        cores=cores_of_slots(options["numa_binding"], devices, slots),
        variables=variables,
        scripts=scripts,
    )


def python_from(env: Mapping[str, str]) -> str:
    """The interpreter of the workers (``PYTHON_EXEC``); empty: the launcher's own. Raises ``SettingError``."""
    text = env.get("PYTHON_EXEC", "")
    found = shutil.which(text) if text else ""
    if found is None:
        raise SettingError(
            "PYTHON_EXEC", text, "no such program on the PATH, or not executable", "Name a Python, or unset it"
        )
    return found
