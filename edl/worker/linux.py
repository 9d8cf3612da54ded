"""Linux calls that Python's ``os`` lacks, and process housekeeping around fork."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence

from edl.adapters.family import families, stat_fields
from edl.exit_codes import ExitCode

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/davinci", "/dev/xpu", "/dev/accel", "/dev/habanalabs")
FORK_SERVER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
"""Signals whose handling the fork server changes for itself and resets for its children."""

_CHILDREN = "/proc/self/task/{}/children"
"""Exists if the kernel is built with CONFIG_PROC_CHILDREN."""
_REPARENTING_S = 0.0002
"""Seconds between two looks for the new parent, which takes as long as the end of a process."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when ``parent`` ends; end at once if it has already ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def dying_with_parent() -> Iterator[None]:
    """Have the kernel send SIGKILL to this process if its parent ends meanwhile."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        yield
    finally:
        _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def fork(adopter: int = 0) -> int:
    """``os.fork`` whose child leads a new session, dies with its parent, and has default signal handlers.

    ``adopter``: an ancestor that will be the child's parent, because this process ends right away. Signals are blocked
    across the fork, so that none reaches the child while it still has the parent's handlers.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns when the process has threads. Those of BLAS libraries are known to survive a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            before = set()
            _settle(parent, adopter)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork_for(adopter: int) -> int:
    """Like ``fork``, but the child is one of ``adopter``, an ancestor that has called ``adopt_orphans``: the process
    between the two ends at once. Raises ``OSError``."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        middle = fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if middle == 0:
        pid = -1
        try:
            pid = fork(adopter)
            if pid:
                os.write(writing, str(pid).encode())
        finally:
            if pid:
                os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(middle, 0)
    if not text:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return int(text)


def _settle(parent: int, adopter: int) -> None:
    """Set up the child. It must never return half done to its caller, where it would continue as a second parent."""
    try:
        os.setsid()
        while adopter and os.getppid() == parent:
            time.sleep(_REPARENTING_S)
        die_with_parent(adopter or parent)
        signal.set_wakeup_fd(-1)
        for number in FORK_SERVER_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except BaseException:  # noqa: BLE001 - in the child every error is fatal
        traceback.print_exc()
        os._exit(ExitCode.INTERNAL)


def children() -> list[int]:
    """Living and dead children of this single-threaded process."""
    try:
        with open(_CHILDREN.format(os.getpid())) as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # the kernel does not list them
        return families().get(os.getpid(), [])


def open_descriptors() -> set[int]:
    """Numbers of the open descriptors of this process."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    # The listing itself used a descriptor, which is closed by now.
    return {number for number in found if _is_open(number)}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def close_all_but(keep: Collection[int]) -> None:
    """Close every descriptor above 2 that is not in ``keep``."""
    # One by one as listed: without close_range, a range could mean a million calls under a high limit.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def bind_to(cores: Collection[int]) -> None:
    """Bind all threads of this process to these CPU cores; no effect if there are none. On failure the process runs
    unbound, with a message."""
    for thread in map(int, os.listdir("/proc/self/task")) if cores else ():
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            continue  # it has ended meanwhile
        except OSError as error:
            os.write(2, f"edl: not bound to processor cores {sorted(cores)}: {error.strerror}\n".encode())
            return


def open_accelerator() -> str:
    """Path of an accelerator device that this process has open, or empty. Such a process must not be forked."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if path.startswith(_ACCELERATORS):
            return path
    return ""


def set_title(words: Sequence[str]) -> None:
    """Make ``ps`` and ``/proc/<pid>/cmdline`` show these words, truncated to the original command line's length."""
    try:
        fields = stat_fields("/proc/self/stat")
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])
    if not 0 < start < end:
        return
    room = end - start
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
