"""Where compiled kernels are kept, and whether they are there: compiling them takes 15 s of CPU, loading them one.

They lie in a folder of their own for each version of their sources, of numba and of the processor, which is marked once
all of it is there: numba itself only notices changes of the file that a function is in. Without that mark a pserver
begins with the kernels in numpy, while a process of its own compiles, and takes the others when they are there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from edl.adapters.clock import SystemClock
from edl.config import environment
from edl.errors import PsError

HERE = Path(__file__).parent
MARK, LOCK, PREFIX = "complete", "lock", "kernels-"
ELSEWHERE = ("__init__.py", "compiling.py", "plain.py", "ready.py")
"""Nothing in these is compiled."""
CONSTANTS = ("hashing.py", "spec.py", "store/rules.py")
"""Of the package ``ps``: they have numbers that compiled code holds."""
KEPT_S = 30 * 86400.0
"""Folders of other versions go when they were made so long ago."""
LOOK_S = 1.0
_now_s = SystemClock().now_s


def ready() -> bool:
    """Whether the compiled kernels can be loaded without compiling. Asked often, it looks once a second."""
    return _looks.ready()


def folder() -> Path | None:
    """Where numba keeps what it compiles from these sources; made if need be. None: nowhere can be written to."""
    for place in _places():
        found = place / f"{PREFIX}{fingerprint()}"
        with contextlib.suppress(OSError):
            _make(place, found)
            return found
    return None


@functools.cache
def fingerprint() -> str:
    """Of everything that compiled code depends on."""
    told = [sys.version, platform.machine(), _processor()]
    for name in ("numba", "llvmlite", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            told.append(importlib.metadata.version(name))
    sources = sorted({*HERE.glob("*.py")} - {HERE / name for name in ELSEWHERE})
    for path in (*sources, *(HERE.parents[1] / name for name in CONSTANTS)):
        told.append(path.read_text("utf-8"))
    return hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]


def compile_elsewhere() -> None:
    """The same in a process of its own, which ends with this one. Raises ``PsError``."""
    child = subprocess.Popen(
        [sys.executable, "-m", "ps", "warm", "--child"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stderr is not None and child.stdin is not None  # noqa: S101
    with child:
        said = child.stderr.read().decode("utf-8", "replace")  # its stdin stays open until it has ended
    if child.returncode:
        raise PsError(f"python -m ps warm ended with status {child.returncode}: {said.strip()[-500:]}")


def end_with_parent() -> None:
    """This process ends when its stdin does."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="edl-ps-parent", daemon=True).start()


class _Looks:
    """Once it is there it stays."""

    def __init__(self) -> None:
        self._found, self._next_s = False, float("-inf")

    def ready(self) -> bool:
        if not self._found and _now_s() >= self._next_s:
            self._next_s = _now_s() + LOOK_S
            place = folder()
            self._found = place is None or (place / MARK).exists()  # without a place, waiting is of no use
        return self._found


_looks = _Looks()


def _places() -> Iterator[Path]:
    """In the order of preference: what the user says, beside the sources, the user's cache, a folder for this user."""
    told = environment().get("NUMBA_CACHE_DIR", "")
    if told:
        yield Path(told)
    yield HERE / "__pycache__"
    with contextlib.suppress(RuntimeError):  # there is no home
        yield Path(environment().get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "edl-ps"
    yield Path(tempfile.gettempdir()) / f"edl-ps-{os.getuid()}"


def _make(place: Path, found: Path) -> None:
    """Raises ``OSError`` where it cannot be used, or where others could put code into it: numba would run that."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found.mkdir(mode=0o700, exist_ok=True)
    for path in (place, found) if place != HERE / "__pycache__" else (found,):
        about = path.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid not in (os.getuid(), 0) or about.st_mode & 0o022:
            raise PermissionError(f"{path}: others can write to it")
    if not os.access(found, os.W_OK | os.X_OK) and not (found / MARK).exists():
        raise PermissionError(f"{found} cannot be written to")


@contextlib.contextmanager
def alone(place: Path | None) -> Iterator[None]:
    """One process at a time for each place."""
    if place is None or not os.access(place, os.W_OK):
        yield
        return
    with open(place / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tidy(place: Path) -> None:
    """Folders of versions that are long past go."""
    for other in place.parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if (place / MARK).stat().st_mtime - (other / MARK).stat().st_mtime > KEPT_S:
                shutil.rmtree(other)


def _processor() -> str:
    """What code is compiled for."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()
