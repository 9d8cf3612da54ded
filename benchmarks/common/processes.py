"""Starts processes, finds all their descendants, and signals exactly those.

Every process of a run inherits two environment variables: a random token of the run and the index of the simulated
node. All processes that a launcher starts have them, even if they detach or are adopted, so a node or a whole run can
be ended without ever touching an unrelated process. Children of a marked process that changed their environment are
found through their parent. Linux only (``/proc``, pidfd).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edl.config import environment

RUN_MARK = "EDL_BENCH_RUN"
NODE_MARK = "EDL_BENCH_NODE"
OUTSIDE = -1
"""The node of what runs beside the simulated nodes: a store, a head node, a driver."""
LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_FOREIGN = (
    *("PET_", "PADDLE_", "TORCHELASTIC_", "TORCH_", "EDL_", "FLAGS_", "OMP_", "MASTER_"),
    *("RAY_", "DLROVER_", "NODE_", "TORCHFT_", "FT_", "HOROVOD_"),
)
"""Prefixes of variables that would change a launcher's behavior; a run starts without them."""


class NotStarted(RuntimeError):
    """A service outside the nodes did not start."""


@dataclass(frozen=True, slots=True)
class Found:
    """One running process; ``started_ticks`` distinguishes it from a later one with the same pid."""

    pid: int
    parent: int
    started_ticks: int


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings of other launchers and proxies, plus ``extra``."""
    kept = {
        name: value
        for name, value in environment().items()
        if not name.startswith(_FOREIGN) and not name.lower().endswith("_proxy")
    }
    return kept | dict(extra)


def _die_with_parent() -> None:
    """Runs in the child before exec: requests SIGTERM when the benchmark itself is killed, so that no process outlives
    it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start(command: Sequence[str], env: Mapping[str, str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start ``command`` in its own session, with both output streams appended to ``log``."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _status(pid: int) -> Found | None:
    """The fields of ``/proc/<pid>/stat``; ``None`` when the process has ended or is a zombie. Field numbers as in
    proc_pid_stat(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Found(pid, int(fields[1]), int(fields[19]))


def _living() -> Iterator[Found]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and (found := _status(int(name))):
            yield found


def _carries(pid: int, marks: frozenset[bytes]) -> bool:
    try:
        return marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def find(run: str, node: int | None = None) -> list[Found]:
    """All running processes of a run, or of one simulated node of it; parents first where known."""
    marks = {f"{RUN_MARK}={run}".encode()}
    if node is not None:
        marks.add(f"{NODE_MARK}={node}".encode())
    living = {found.pid: found for found in _living()}
    chosen = {pid for pid in living if _carries(pid, frozenset(marks))}
    while more := {pid for pid, found in living.items() if found.parent in chosen} - chosen:
        chosen |= more
    return [living[pid] for pid in sorted(chosen)]


def marks(run: str, node: int) -> dict[str, str]:
    """The variables that mark a process of a run."""
    return {RUN_MARK: run, NODE_MARK: str(node)}


def command(pid: int) -> bytes:
    """The command line of a process, its words ended by zero bytes; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def send(target: Found, number: signal.Signals) -> bool:
    """Signal exactly the process that was found; ``False`` when it has ended, even if its pid has been reused."""
    try:
        handle = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return False
    try:
        now = _status(target.pid)
        if now is None or now.started_ticks != target.started_ticks:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
            return True
        return False
    finally:
        os.close(handle)


def send_all(run: str, number: signal.Signals, node: int | None = None) -> float:
    """Signal a whole run or node. Returns the monotonic time just before the first signal was sent.

    Scans again afterwards for processes that were being created meanwhile. A stopped process still appears in the scan,
    so SIGSTOP is repeated only once.
    """
    targets = find(run, node)
    begun_s = time.monotonic()
    for attempt in range(4):
        for target in targets:
            send(target, number)
        if attempt and number == signal.SIGSTOP:
            break
        targets = find(run, node)
        if not targets:
            break
    return begun_s


def end_run(run: str, within_s: float = 60.0) -> list[int]:
    """SIGKILL all processes of a run until none is left; returns the pids that did not end (normally none)."""
    deadline_s = time.monotonic() + within_s
    while targets := find(run):
        for target in targets:
            send(target, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return [target.pid for target in targets]
        time.sleep(0.02)
    return []


_pairs = itertools.islice(itertools.cycle(range(20_000, 32_000, 2)), os.getpid() * 10 % 6_000, None)
"""Programs that run side by side start with different ports, since a port is free for a moment when its member is
killed."""


def free_store_ports(count: int) -> list[int]:
    """Ports for members of a store, each with the next one for its peers. They are below the kernel's ephemeral ports,
    which might be taken by connections before the members are up."""
    free = (port for port in _pairs if all(_is_free(port + offset) for offset in (0, 1)))
    return list(itertools.islice(free, count))


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind((LOOPBACK, 0))
        return [int(one.getsockname()[1]) for one in taken]
