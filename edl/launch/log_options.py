"""The launcher's options for the workers' output."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.adapters.leftovers import own, sweep
from edl.agent.workers.log_paths import PADDLE_FOLDER
from edl.config import LogLayout, LogPlan
from edl.errors import SettingError
from edl.launch.options import fields, is_default
from edl.ports import CommandKind, WorkerCommand

PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""torchrun's variable for the prefix; ``--log-prefix`` takes precedence."""
_TORCHRUNS = ("redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters")
"""torchrun's options about output that Paddle's launcher does not have."""
KEPT_LAUNCHES = 100
"""Number of ended launches whose temporary log folders are kept."""
LONGEST_NAME = 240
"""Longest name of a launcher's folder in characters; file systems take 255 bytes, and numbers are appended."""
_ESCAPED = "\0"
"""Stands for an escaped comma while a text is split."""


def log_plan(
    options: Mapping[str, Any],
    job: str,
    node: str,
    slots: int,
    command: WorkerCommand,
    env: Mapping[str, str],
    *,
    servers: int = 0,
) -> LogPlan:
    """The log plan for the launcher of this job and node. Creates a temporary folder if no folder is given. Raises
    ``SettingError``.

    ``slots``: number of workers of this node; 0 if unknown. ``servers``: how many of the slots, the first ones, are
    pservers that run the script.
    """
    chosen = fields(LogPlan, options)
    redirect_all, redirects = stream_map("--redirects", options["redirects"], slots)
    tee_all, tee = stream_map("--tee", options["tee"], slots)
    shown = frozenset(_ranks("--local-ranks-filter", options["local_ranks_filter"], slots))
    if options["logs_specs"] not in ("", "default"):
        raise SettingError(
            "--logs-specs",
            options["logs_specs"],
            "torchrun's log plug-ins need torch in the launcher, and edl's launcher does not import it",
            "Use --log-dir, --redirects, --tee, --local-ranks-filter and --log-prefix",
        )
    layout = _layout(options, command)
    said = options["log_layout"] == layout.value
    base = _base(options["log_dir"], layout, job)
    return LogPlan(
        **chosen,
        folder=str(base / folder_name(job, node)) if base is not None else "",
        temporary=not options["log_dir"] and layout is not LogLayout.PADDLE,
        redirects=redirects,
        tee=tee,
        redirect_all=redirect_all,
        tee_all=tee_all,
        shown=shown,
        stdout_filters=texts(options["duplicate_stdout_filters"]),
        stderr_filters=texts(options["duplicate_stderr_filters"]),
        prefix=options["log_prefix"] or env.get(PREFIX_VARIABLE, ""),
        layout=layout,
        quiet=said and layout is LogLayout.PADDLE,
        links=str(base) if base is not None and layout is LogLayout.PADDLE else "",
        workers=max(1, slots),
        servers=servers,
    )


def folder_name(job: str, node: str) -> str:
    """The name of a launcher's folder: job and node, or the beginning of that and a digest if both are long."""
    name = f"{job}_{node}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - len(digest) - 1]}-{digest}"


def server_folder(options: Mapping[str, Any]) -> str:
    """The log folder for pservers of a launcher without workers; empty: they write to the console."""
    base = _base(options["log_dir"], LogLayout.PADDLE, "") if options["log_layout"] == LogLayout.PADDLE.value else None
    return str(base) if base is not None else ""


def stream_map(option: str, text: str, slots: int = 0) -> tuple[int, dict[int, int]]:
    """Parse ``3`` or ``0:3,12:1`` to a default and a map by local rank. Raises ``SettingError``, also for a local rank
    of ``slots`` or more; 0: any rank is accepted."""
    if re.fullmatch(r"[0-3]", text):
        return int(text), {}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise SettingError(option, text, "must be 0, 1, 2 or 3, or LOCAL_RANK:VALUE pairs such as 0:3,1:1")
    pairs = [pair.split(":") for pair in text.split(",")]
    _check_ranks(option, text, [int(rank) for rank, _ in pairs], slots)
    return 0, {int(rank): int(value) for rank, value in pairs}


def texts(text: str) -> tuple[str, ...]:
    """Split comma-separated filter texts, in which ``,,`` is a literal comma. Empty ones are dropped, because they
    would match every line."""
    items = text.replace(",,", _ESCAPED).split(",")
    return tuple(item.replace(_ESCAPED, ",") for item in items if item)


def remarks(plan: LogPlan) -> list[str]:
    """Remarks about the log options for the user, one line each."""
    said = []
    if plan.keeps_output:
        said.append(f"the workers' output is kept in {plan.folder}")
    teed = plan.tee_all | (max(plan.tee.values()) if plan.tee else 0)
    for option, filters in (("stdout", plan.stdout_filters), ("stderr", plan.stderr_filters)):
        if filters and not teed and plan.layout is LogLayout.TORCHRUN:
            said.append(f"--duplicate-{option}-filters has no effect, because no stream has --tee")
    return said


def _layout(options: Mapping[str, Any], command: WorkerCommand) -> LogLayout:
    """The log layout. ``auto`` is Paddle's layout if the script imports Paddle, ``--log-dir`` is given, and none of
    torchrun's options about output is; otherwise torchrun's."""
    if options["log_layout"] != "auto":
        return LogLayout(options["log_layout"])
    if not options["log_dir"] or not all(is_default(name, options) for name in _TORCHRUNS):
        return LogLayout.TORCHRUN
    return LogLayout.PADDLE if _framework(command) == "paddle" else LogLayout.TORCHRUN


def _framework(command: WorkerCommand) -> str:
    """``torch`` or ``paddle``, if static analysis finds that the script imports only this one; otherwise empty."""
    if command.kind is CommandKind.PROGRAM:
        return ""
    from edl.worker.warm import ImportFailed, find_plan  # imported late: most launchers do not need it

    try:
        found = find_plan(command.kind.value, command.target, ())
    except ImportFailed:
        return ""
    frameworks = {"torch", "paddle"} & {*found.required, *found.optional}
    return frameworks.pop() if len(frameworks) == 1 else ""


def _base(log_dir: str, layout: LogLayout, job: str) -> Path | None:
    """Absolute path of the folder for all launches' logs; None: no log files (``--log-dir=/dev/null``)."""
    if log_dir == os.devnull:
        return None
    if not log_dir and layout is LogLayout.PADDLE:
        log_dir = PADDLE_FOLDER
    return Path(log_dir or _temporary(job)).absolute()


def _temporary(job: str) -> Path:
    """Create a temporary log folder, and delete those of all but the last ``KEPT_LAUNCHES`` ended launches."""
    sweep(Path(tempfile.gettempdir()), "edl-*", keep=KEPT_LAUNCHES)
    folder = Path(tempfile.mkdtemp(prefix=f"edl-{job}-"))
    own(folder)
    return folder


def _ranks(option: str, text: str, slots: int) -> list[int]:
    if not text:
        return []
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise SettingError(option, text, "must be local ranks, separated by commas, such as 0,1")
    ranks = [int(rank) for rank in text.split(",")]
    _check_ranks(option, text, ranks, slots)
    return ranks


def _check_ranks(option: str, text: str, ranks: list[int], slots: int) -> None:
    missing = [rank for rank in ranks if rank >= slots] if slots else []
    if missing:
        listed = "only local rank 0" if slots == 1 else f"local ranks 0 to {slots - 1}"
        raise SettingError(
            option,
            text,
            f"this node has no local rank {missing[0]}: it has {listed}",
            "Name one of these, or raise --nproc-per-node",
        )
