"""Reports on a failed job: text for people, JSON for tools.

The text has the layout and the keys of torchrun's report, which tools search for, and some more. The error file for the
process that started the launcher has torchrun's format too (torch.distributed.elastic.multiprocessing.errors of torch
2.13).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence

from edl.wire.json_messages import to_plain
from edl.wire.records import Failure

RULE = "=" * 60
SECTION = "-" * 60
ROOT_CAUSE = "Root Cause (first observed failure):"
NO_OTHERS = "  <NO_OTHER_FAILURES>"
NOT_AVAILABLE = "<N/A>"
TAIL_LINES_SHOWN = 20


def text_report(
    job: str,
    reason: str,
    failures: Sequence[Failure],
    folder: str = "",
    log_of: Callable[[Failure], str] = lambda failure: NOT_AVAILABLE,
) -> str:
    """The final report of a failed job as a block for the console. The root cause comes last, and is the only one with
    a traceback.

    ``failures``: at least one, root cause first. ``folder``: the launcher's log folder; empty for none. ``log_of``: the
    file with a failed worker's last output, or why there is none.
    """
    lines = [RULE, f"edl: job {job} FAILED: {reason}"]
    if folder:
        lines.append(f"files of this node (this report as error.json, and logs where they are kept): {folder}")
    others = [line for index, one in enumerate(failures[1:], start=1) for line in _block(index, one, log_of(one))]
    root = _block(0, failures[0], log_of(failures[0]), full=True)
    return "\n".join([*lines, SECTION, "Failures:", *(others or [NO_OTHERS]), SECTION, ROOT_CAUSE, *root, RULE])


def failure_text(failures: Sequence[Failure], *, every: bool = False) -> str:
    """A report on failures that the job has survived. ``failures``: at least one, root cause first. ``every``: show the
    traceback of each failure that is no consequence, not only of the root cause."""
    lines = [ROOT_CAUSE, *_block(0, failures[0], full=True)]
    for index, failure in enumerate(failures[1:], start=1):
        lines += _block(index, failure, full=every and not failure.peer_loss)
    return "\n".join(lines)


def _block(index: int, failure: Failure, log: str = "", *, full: bool = False) -> list[str]:
    slot = f", slot: {failure.slot}" if failure.slot not in (-1, failure.local_rank) else ""
    consequence = " (it had lost a peer: a consequence)" if failure.peer_loss else ""
    lines = [
        f"[{index}]:",
        f"  time      : {_moment(failure.time_s)}",
        f"  host      : {failure.host or NOT_AVAILABLE} (node: {failure.node})",
        f"  rank      : {failure.rank} (local_rank: {failure.local_rank}{slot})",
        f"  exitcode  : {_status(failure)} (pid: {failure.pid or NOT_AVAILABLE}){_signal(failure.exit_code)}",
        f"  error_file: {failure.error_file or NOT_AVAILABLE}",
        *([f"  log_file  : {log}"] if log else []),
        f"  round     : {failure.round}",
        f"  what      : {failure.what}{consequence}",
    ]
    if failure.exception:
        lines.append(f"  error     : {failure.exception}")
    if not full:
        return lines
    first, *rest = failure.traceback.splitlines() or [NOT_AVAILABLE]
    lines += [f"  traceback : {first}", *(f"    {line}" for line in rest)]
    if failure.tail and not failure.traceback:
        shown = failure.tail.splitlines()[-TAIL_LINES_SHOWN:]
        lines += ["  last lines of stderr:", *(f"    {line}" for line in shown)]
    return lines


def _status(failure: Failure) -> str:
    """The exit status, if the worker has ended."""
    return str(failure.exit_code) if failure.exit_code else NOT_AVAILABLE


def _moment(time_s: float) -> str:
    return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(time_s)) if time_s else NOT_AVAILABLE


def _signal(code: int) -> str:
    try:
        return f" ({signal.Signals(-code).name})" if code < 0 else ""
    except ValueError:
        return ""


def json_report(
    job: str, exit_code: int, reason: str, failures: Sequence[Failure], folder: str = ""
) -> dict[str, object]:
    """The same report for tools; every launcher writes it as ``error.json``."""
    return {
        "job": job,
        "exit_code": exit_code,
        "reason": reason,
        "log_dir": folder,
        "failures": to_plain(tuple(failures)),
    }


def own_error_file(reason: str, exit_code: int, moment_s: float, trace: str = "") -> str:
    """The same file for a launcher that ends without success although no worker has failed, for instance because too
    few nodes are left. ``trace``: a traceback, if there is one."""
    details = {"py_callstack": trace, "timestamp": str(int(moment_s))}
    return json.dumps({"message": {"message": reason, "extraInfo": details, "errorCode": exit_code}})


def error_file(cause: Failure, written: str = "") -> str:
    """The root cause in the format of torch's ``error.json``, for the file that the launcher's caller has named.

    ``written``: the worker's own error file, which is passed on with the exit status added, as torchrun does; empty if
    there is none or the worker ran on another node.
    """
    try:
        found = json.loads(written)
        message = found["message"]
    except (ValueError, KeyError, TypeError):
        text = cause.exception or f"rank {cause.rank} on {cause.node} {cause.what}"
        details = {"py_callstack": cause.traceback or cause.tail, "timestamp": str(int(cause.time_s))}
        found = {"message": {"message": text, "extraInfo": details}}
        message = found["message"]
    if isinstance(message, dict):
        message["errorCode"] = cause.exit_code
    return json.dumps(found)
