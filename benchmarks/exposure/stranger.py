"""Runs functions and commands as another user of this host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import processes
from benchmarks.common.launchers import REPOSITORY

NOBODY = 65534
BECOME = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")

RUN_S = 120


def described() -> str:
    """A description of the stranger."""
    if os.geteuid() == 0:
        return f"user {NOBODY} (nobody), without groups"
    return f"the SAME user {os.geteuid()}: only root can act as another user. Run as root to see what others can access"


def _become() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def ask(function: Callable[..., Any], *arguments: Any, limit_s: int = 60) -> Any:
    """Run ``function`` as the stranger and return its result; text when it raised or took too long. It runs in a forked
    process, so modules that are already imported need not be readable for the stranger."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(limit_s)
        if os.geteuid() == 0:
            _become()
        try:
            answer = function(*arguments)
        except Exception as error:  # noqa: BLE001 - the top of this process
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else f"no answer in {limit_s} s"


def run(
    words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` as the stranger, with the common temporary directory."""
    command = [sys.executable, *words]
    if os.geteuid() == 0:
        hidden = _hidden(Path(sys.executable).resolve())
        command = [*_uncovering(hidden), *BECOME, *command] if hidden else [*BECOME, *command]
    ours = {"PYTHONPATH": str(REPOSITORY), "HOME": str(folder), "OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.run(
        command,
        env=processes.clean_environment(ours),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def _hidden(path: Path) -> Path | None:
    """The folder in the path that others may not enter."""
    closed = [folder for folder in path.parents if not folder.stat().st_mode & 0o001]
    return closed[-1] if closed else None


def _uncovering(folder: Path) -> list[str]:
    """A command prefix that replaces a folder hiding this Python with an open one, for one command alone; it contains
    only what is needed."""
    needed = Path(sys.executable).resolve().relative_to(folder).parts[0]
    script = (
        'set -e; new=$(mktemp -d); mount -t tmpfs -o mode=755 none "$new"; mkdir "$new/$2"; '
        'mount --bind "$1/$2" "$new/$2"; mount --rbind "$new" "$1"; umount -l "$new"; rmdir "$new"; shift 2; exec "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(folder), needed]


@contextlib.contextmanager
def at_work(function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Run a function as the stranger in the background, until it is stopped."""
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            _become()
        with contextlib.suppress(BaseException):
            function(*arguments)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
