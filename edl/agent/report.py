"""What happened to a job that failed: text for people, JSON for tools."""

from __future__ import annotations

from collections.abc import Sequence

from edl.wire.messages import Failure
from edl.wire.plain import to_plain

RULE = "=" * 60
TAIL_LINES_SHOWN = 20


def text_report(job: str, reason: str, failures: Sequence[Failure]) -> str:
    """The failures of a failed job, root cause first, as a block for the log."""
    return "\n".join([RULE, f"edl: job {job} failed: {reason}", RULE, failure_text(failures), RULE])


def failure_text(failures: Sequence[Failure]) -> str:
    """Failures, root cause first."""
    lines: list[str] = []
    for index, failure in enumerate(failures):
        heading = "Root Cause (first observed failure):" if index == 0 else f"[{index}] then:"
        lines += [heading, *_block(failure, full=index == 0)]
    if not failures:
        lines.append("No worker reported a failure.")
    return "\n".join(lines)


def _block(failure: Failure, *, full: bool) -> list[str]:
    lines = [
        f"  rank      : {failure.rank} (local rank {failure.local_rank})",
        f"  node      : {failure.node}",
        f"  round     : {failure.round}",
        f"  exit code : {failure.exit_code}",
        f"  what      : {failure.what}" + (" (it had lost a peer: a consequence)" if failure.peer_loss else ""),
    ]
    if failure.exception:
        lines.append(f"  error     : {failure.exception}")
    if full and failure.traceback:
        lines += ["  traceback :", *(f"    {line}" for line in failure.traceback.splitlines())]
    elif full and failure.tail:
        shown = failure.tail.splitlines()[-TAIL_LINES_SHOWN:]
        lines += ["  last lines of stderr:", *(f"    {line}" for line in shown)]
    return lines


def json_report(job: str, exit_code: int, reason: str, failures: Sequence[Failure]) -> dict[str, object]:
    """The same for tools: written as ``error.json`` by every launcher."""
    return {"job": job, "exit_code": exit_code, "reason": reason, "failures": to_plain(tuple(failures))}
