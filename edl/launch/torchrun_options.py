"""torchrun's options and ``PET_*`` variables, in terms of our own options.

What each of them becomes, and why, is in ``torchrun_table``. First the variables are offered for all options, then the
options that are only torchrun's are answered one by one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any

import click
from click.shell_completion import get_completion_class

from edl.agent.workers import torch_environment
from edl.arithmetic.affinity import MODES
from edl.errors import SettingError, UsageError
from edl.launch import torchrun_store
from edl.launch.accelerators import visible_devices
from edl.launch.binding import cores_of_slots
from edl.launch.dropin_table import Fate
from edl.launch.resolved_options import ResolvedOptions, Source
from edl.launch.torchrun_table import FLAGS, TORCHRUN_ROWS, VARIABLES, row_of

TORCH_LAUNCH = "torch.distributed.launch"
"""The dialect of torchrun's elder sister."""
OWN_ROLES = ("reader", "trainer", "pserver")
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def _accepted(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """One that changes nothing, and so has no variable of ours."""
    return click.option(*names, allow_from_autoenv=False, **settings)


def _print_completion(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    if not shell:
        return
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has these three
    click.echo(kind(context.command, {}, "edl-run", "_EDL_RUN_COMPLETE").source())
    context.exit()


TORCHRUN_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--role",
        default="default",
        metavar="NAME",
        help="reader, pserver: run no script, only have such processes for the job; trainer, in a job with pservers: "
        "have none of them. Any other name is for the workers, as ROLE_NAME. Default: default.",
    ),
    click.option("--master-addr", default="", metavar="HOST", help="With more than one node: host of the store."),
    click.option(
        *("--master-port",),
        type=int,
        default=0,
        metavar="PORT",
        help="With more than one node: its port. Default: 29500.",
    ),
    click.option("--run-path", is_flag=True, help="The script is a file of Python, whatever --no-python says."),
    click.option("--virtual-local-rank", is_flag=True, help="Workers see one accelerator each, and find LOCAL_RANK=0."),
    click.option(
        "--numa-binding",
        type=click.Choice(["none", *MODES]),
        default="none",
        help="Bind workers to the processor cores next to their GPUs. Default: none.",
    ),
    click.option(
        "--signals-to-handle",
        default=torch_environment.SIGNALS,
        metavar="NAME[,…]",
        help="Signals that stop this node and are passed to its workers: TERM, INT, HUP, QUIT and these.",
    ),
    _accepted("--monitor-interval", type=float, default=0.1, metavar="SECONDS", help="Accepted from torchrun."),
    _accepted(
        "--start-method",
        type=click.Choice(["spawn", "fork", "forkserver"]),
        default="spawn",
        help="Accepted from torchrun; see --standby.",
    ),
    _accepted("--event-log-handler", default="null", metavar="NAME", help="Accepted from torchrun; see edl events."),
    _accepted(
        "--use-env",
        is_flag=True,
        help="With --dialect=torch.distributed.launch: scripts get no --local-rank=N. Else it always holds.",
    ),
    _accepted("--log-line-prefix-template", default="", metavar="TEMPLATE", help="torchrun's name of --log-prefix."),
    _accepted(
        "--print-completion",
        type=click.Choice(["bash", "zsh", "fish"]),
        default=None,
        expose_value=False,
        is_eager=True,
        callback=_print_completion,
        help="Print what makes this shell complete edl-run's options, and exit.",
    ),
]


def apply(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Make of them what they mean here. Raises ``UsageError`` for what cannot be honoured."""
    _take_variables(resolved, env)
    for answer in (_event_handler, _how_often, _what_runs, _prefix, _local_rank, torchrun_store.apply):
        answer(resolved)
    if resolved.values["nproc_per_node"] == "xpu":
        resolved.values["nproc_per_node"] = "gpu"
    resolved.values["role"] = resolved.values["role"] or "default"
    _look_at_other_variables(resolved, env)


def _take_variables(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    for row in TORCHRUN_ROWS:
        for variable in row.variables:
            text = env.get(variable, "")
            if text:
                resolved.offer(row.name, _flag(variable, text) if row.name in FLAGS else text, Source.PET, variable)
    if env.get(_SHUTDOWN) and not resolved.given("shutdown_timeout"):
        resolved.offer("shutdown_timeout", env[_SHUTDOWN], Source.PET, _SHUTDOWN)


def _flag(variable: str, text: str) -> bool:
    if text.strip() not in ("0", "1"):
        raise SettingError(variable, text, "must be 0 or 1")
    return text.strip() == "1"


def _event_handler(resolved: ResolvedOptions) -> None:
    name, row = resolved.values["event_log_handler"], row_of("event_log_handler")
    if name in ("", "null"):
        return
    if name not in ("console", "dynamic_rendezvous"):
        raise SettingError("--event-log-handler", name, "torch has no such handler of its own", row.advice)
    _explain(resolved, "event_log_handler")


def _how_often(resolved: ResolvedOptions) -> None:
    interval = resolved.values["monitor_interval"]
    if not interval > 0:
        raise SettingError("--monitor-interval", f"{interval:g}", "must be more than 0", "Or drop it")
    for name, default in (("monitor_interval", 0.1), ("start_method", "spawn")):
        if resolved.given(name) and resolved.values[name] != default:
            _explain(resolved, name)


def _what_runs(resolved: ResolvedOptions) -> None:
    """``--run-path`` names a file of Python, whatever else was said."""
    if resolved.values["run_path"]:
        resolved.values["no_python"] = resolved.values["module"] = False


def _prefix(resolved: ResolvedOptions) -> None:
    name = "log_line_prefix_template"
    if resolved.values[name]:
        resolved.offer("log_prefix", resolved.values[name], resolved.source(name), resolved.said(name))


def _local_rank(resolved: ResolvedOptions) -> None:
    """``torch.distributed.launch`` tells each worker its rank as the first argument."""
    if resolved.values["dialect"] == TORCH_LAUNCH and not resolved.values["use_env"]:
        resolved.arguments = ("--local-rank=${local_rank}", *resolved.arguments)


def _explain(resolved: ResolvedOptions, name: str) -> None:
    option = resolved.origin(name) or row_of(name).option
    resolved.remark(f"{option}={resolved.values[name]} changes nothing: {row_of(name).why}")


def _look_at_other_variables(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    for variable in VARIABLES:
        text = env.get(variable.name, "")
        if variable.fate is Fate.EXPLAINED and not variable.quiet and text not in ("", "0"):
            instead = f". See {variable.becomes}" if variable.becomes else ""
            resolved.remark(f"{variable.name}={text} changes nothing: {variable.why}{instead}")


def workers_from(options: Mapping[str, Any], slots: int, env: Mapping[str, str]) -> dict[str, Any]:
    """Fields of ``LaunchSettings`` that say how workers run. ``slots``: spare ones included. Raises ``UsageError``."""
    devices = visible_devices()
    virtual = options["virtual_local_rank"]
    for variable, entries in devices.items() if virtual else ():
        if len(entries) < slots:
            why = f"{slots} slots need as many devices, and {variable} has {len(entries)} here"
            raise UsageError(f"--virtual-local-rank: {why}. Lower --nproc-per-node, or drop it")
    return {
        "role": "" if options["role"] == "default" else options["role"],
        "python": python_from(env),
        "virtual_local_rank": virtual,
        "cores": cores_of_slots(options["numa_binding"], devices, slots),
    }


def python_from(env: Mapping[str, str]) -> str:
    """The interpreter of the workers (``PYTHON_EXEC``); empty: the launcher's own. Raises ``SettingError``."""
    text = env.get("PYTHON_EXEC", "")
    found = shutil.which(text) if text else ""
    if found is None:
        raise SettingError(
            "PYTHON_EXEC", text, "no such program on the PATH, or not executable", "Name a Python, or unset it"
        )
    return found
