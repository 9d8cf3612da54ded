"""Whether NVIDIA GPUs compute at the moment, from ``nvidia-smi``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

BUSY_PERCENT = 1
"""From this utilisation a device counts as busy."""
LIMIT_S = 5.0
_QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


def run(command: Sequence[str]) -> str:
    """A program's output. Raises ``OSError`` or ``subprocess.SubprocessError``; does not wait for the end of a program
    that is too slow: one that waits for a broken driver cannot be killed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        shown, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return shown


def devices_busy(uuids: Sequence[str], ask: Callable[[Sequence[str]], str] = run) -> bool:
    """Whether one of these devices, or of all if there are none, computes. False without ``nvidia-smi``. Blocks for up
    to ``LIMIT_S``."""
    nvidia = [uuid for uuid in uuids if uuid.startswith(("GPU-", "MIG-"))]
    try:
        shown = ask((*_QUERY, *(("-i", ",".join(nvidia)) if nvidia else ())))
    except (OSError, subprocess.SubprocessError):
        return False
    return any(word.isdecimal() and int(word) >= BUSY_PERCENT for word in shown.split())
