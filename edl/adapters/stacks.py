"""Stacks of Python processes that edl did not start itself, through ``py-spy`` if it is installed."""

from __future__ import annotations

import shutil
import subprocess

import psutil

_MOST_PROCESSES = 8
_LIMIT_S = 5.0


def stacks_of_program(pid: int) -> str:
    """The Python stacks of a program and its descendants as text, or the reason why there are none. Blocks."""
    pyspy = shutil.which("py-spy")
    if pyspy is None:
        return f"no stacks of process {pid}: it is not started as Python (--no-python), and py-spy is not installed"
    found, problem = [], "no Python runs in it"
    for process in _tree(pid)[:_MOST_PROCESSES]:
        try:
            # Without "--nonblocking" py-spy briefly stops the process, which the agent would take for a SIGSTOP from
            # elsewhere.
            done = subprocess.run(
                [pyspy, "dump", "--nonblocking", "--pid", str(process)],
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no stacks of process {pid}: py-spy: {error}"
        if done.returncode == 0:
            found.append(done.stdout.rstrip())
        else:
            problem = done.stderr.strip().partition("\n")[0] or problem
    return "\n".join(found) if found else f"no stacks of process {pid}: py-spy: {problem}"


def _tree(pid: int) -> list[int]:
    try:
        program = psutil.Process(pid)
        return [pid, *(child.pid for child in program.children(recursive=True))]
    except (psutil.Error, OSError):
        return []
