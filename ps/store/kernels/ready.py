"""Location and presence of the compiled kernels: compiling takes 15 s of CPU time, loading 1 s.

They are kept in a directory per version of their sources, numba and processor type, with a stamp file once complete:
numba itself only notices changes of the file that contains a function. Without the stamp a pserver starts with the
numpy kernels while a separate process compiles, and switches when that is done.
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
"""Files without compiled functions."""
CONSTANTS = ("hashing.py", "spec.py", "store/rules.py")
"""Files of the package ``ps`` whose constants are part of compiled code."""
KEPT_S = 30 * 86400.0
"""Directories of other versions are deleted when they are older than this, in seconds."""
LOOK_S = 1.0
_now_s = SystemClock().now_s


def ready() -> bool:
    """True if the compiled kernels can be loaded without compiling. Checks at most once per second."""
    return _looks.ready()


def folder() -> Path | None:
    """The directory for the compiled kernels, created if necessary; None if none is writable."""
    for place in _places():
        found = place / f"{PREFIX}{fingerprint()}"
        with contextlib.suppress(OSError):
            _make(place, found)
            return found
    return None


@functools.cache
def fingerprint() -> str:
    """Hash of everything that the compiled code depends on."""
    facts = [sys.version, platform.machine(), _processor()]
    for name in ("numba", "llvmlite", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts.append(importlib.metadata.version(name))
    sources = sorted({*HERE.glob("*.py")} - {HERE / name for name in ELSEWHERE})
    for path in (*sources, *(HERE.parents[1] / name for name in CONSTANTS)):
        facts.append(path.read_text("utf-8"))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def compile_elsewhere() -> None:
    """Compile in a child process, which ends with this one. Raises ``PsError``."""
    child = subprocess.Popen(
        [sys.executable, "-m", "ps", "warm", "--child"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stderr is not None and child.stdin is not None  # noqa: S101
    with child:
        said = child.stderr.read().decode("utf-8", "replace")  # its stdin stays open until it has ended
    if child.returncode:
        raise PsError(f"python -m ps warm failed with status {child.returncode}: {said.strip()[-500:]}")


def end_with_parent() -> None:
    """Exit this process when its stdin is closed."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="edl-ps-parent", daemon=True).start()


class _Looks:
    """Caches the check; once found, the kernels are assumed to stay."""

    def __init__(self) -> None:
        self._found, self._next_s = False, float("-inf")

    def ready(self) -> bool:
        if not self._found and _now_s() >= self._next_s:
            self._next_s = _now_s() + LOOK_S
            place = folder()
            self._found = place is None or (place / MARK).exists()  # without a directory there is nothing to wait for
        return self._found


_looks = _Looks()


def _places() -> Iterator[Path]:
    """Candidate directories in order of preference: the user's setting, next to the sources, the user's cache, a
    temporary one."""
    configured = environment().get("NUMBA_CACHE_DIR", "")
    if configured:
        yield Path(configured)
    yield HERE / "__pycache__"
    with contextlib.suppress(RuntimeError):  # no home directory
        yield Path(environment().get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "edl-ps"
    yield Path(tempfile.gettempdir()) / f"edl-ps-{os.getuid()}"


def _make(place: Path, found: Path) -> None:
    """Create a directory. Raises ``OSError`` if it is unusable, or if other users could put code into it, which numba
    would execute."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found.mkdir(mode=0o700, exist_ok=True)
    for path in (place, found) if place != HERE / "__pycache__" else (found,):
        about = path.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid not in (os.getuid(), 0) or about.st_mode & 0o022:
            raise PermissionError(f"{path} is writable by other users")
    if not os.access(found, os.W_OK | os.X_OK) and not (found / MARK).exists():
        raise PermissionError(f"{found} is not writable")


@contextlib.contextmanager
def alone(place: Path | None) -> Iterator[None]:
    """Context in which no other process compiles into the same directory."""
    if place is None or not os.access(place, os.W_OK):
        yield
        return
    with open(place / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tidy(place: Path) -> None:
    """Delete the directories of outdated versions."""
    for other in place.parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if (place / MARK).stat().st_mtime - (other / MARK).stat().st_mtime > KEPT_S:
                shutil.rmtree(other)


def _processor() -> str:
    """Description of the processor that code is compiled for."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()
