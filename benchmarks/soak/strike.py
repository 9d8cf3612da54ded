"""Injects faults into real jobs, and undoes them."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.common import processes
from benchmarks.common.processes import Found
from benchmarks.soak.job import Job
from benchmarks.soak.plan import Strike

Undo = Callable[[], None]
Done = tuple[str, Undo | None]
"""What was done, and how it is undone. An empty text: there was nothing to strike."""
NOTHING: Done = ("", None)
BALLAST_MB = 2000
BALLAST = "import sys, time; held = bytearray(b'x') * (int(sys.argv[1]) * 1_000_000); time.sleep(600)"
BUSY = "import time; end_s = time.monotonic() + 600\nwhile time.monotonic() < end_s: pass"
MOST_BUSY = 8
"""Most computing processes on each core, but for one."""
DESCRIPTORS_LEFT = 8
DAY_S = 86_400
FREEZE_S, THAW_S = 0.4, 0.1
BALLAST_FILE = "ballast"


class Striker:
    """Carries out the orders of the course."""

    def __init__(self) -> None:
        self._undo: dict[int, Undo] = {}

    def begin(self, job: Job, strike: Strike) -> str:
        """Inject a fault; returns what was done, or an empty text."""
        done, undo = _FAULTS[strike.fault](job, strike)
        if undo is not None:
            self._undo[strike.number] = undo
        return done

    def end(self, strike: Strike) -> None:
        """Undo a fault."""
        undo = self._undo.pop(strike.number, None)
        if undo is not None:
            undo()


def _worker(job: Job, strike: Strike) -> Found | None:
    """The worker that a node's newest log belongs to, if it runs."""
    living = {one.pid: one for one in job.found(strike.node)}
    pids = {int(path.stem.split(".")[-1]) for pattern in ("*.steps", "*.times") for path in job.said.glob(pattern)}
    return next((living[pid] for pid in sorted(pids & living.keys(), reverse=True)), None)


def _launcher(job: Job, strike: Strike) -> Found | None:
    process = job.nodes[strike.node].process
    return next((one for one in processes.find(job.run) if process is not None and one.pid == process.pid), None)


def _member(job: Job, strike: Strike) -> Found | None:
    return job.member(strike.node)


def _pserver(job: Job, strike: Strike) -> Found | None:
    return job.pserver(strike.node)


Find = Callable[[Job, Strike], Found | None]


def _kill(find: Find, what: str) -> Callable[[Job, Strike], Done]:
    def strike_it(job: Job, strike: Strike) -> Done:
        found = find(job, strike)
        if found is None or not processes.send(found, signal.SIGKILL):
            return NOTHING
        return f"killed {what} of {strike.node} (pid {found.pid})", None

    return strike_it


def _stop(find: Find, what: str) -> Callable[[Job, Strike], Done]:
    def strike_it(job: Job, strike: Strike) -> Done:
        found = find(job, strike)
        if found is None or not processes.send(found, signal.SIGSTOP):
            return NOTHING

        def go_on() -> None:
            processes.send(found, signal.SIGCONT)

        return f"stopped {what} of {strike.node} (pid {found.pid})", go_on

    return strike_it


def _kill_launcher(job: Job, strike: Strike) -> Done:
    node = job.nodes[strike.node]
    if node.process is None or not node.running:
        return NOTHING
    node.killed = True
    pid = node.process.pid
    node.process.kill()
    node.process.wait()
    return f"killed the launcher of {strike.node} (pid {pid})", lambda: job.start(strike.node)


# --- disks -----------------------------------------------------------------------------------------------------------


def _fill(job: Job, strike: Strike) -> Done:
    path = job.place.disk.folder / BALLAST_FILE
    with path.open("wb") as file:
        found = os.statvfs(job.place.disk.folder)
        with contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, found.f_bavail * found.f_frsize))
    left = os.statvfs(job.place.disk.folder)
    return f"filled the disk, {left.f_bavail * left.f_frsize} bytes are free", lambda: path.unlink(missing_ok=True)


def _frozen(folder: Path, freeze: bool) -> bool:
    command = ["fsfreeze", "--freeze" if freeze else "--unfreeze", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _freeze(job: Job, strike: Strike) -> Done:
    folder = job.place.disk.folder
    if not _frozen(folder, True):
        return NOTHING

    def thaw() -> None:
        _frozen(folder, False)

    return "froze the disk", thaw


def _slow(job: Job, strike: Strike) -> Done:
    """Frozen most of the time."""
    folder, over = job.place.disk.folder, threading.Event()

    def stutter() -> None:
        while not over.wait(THAW_S):
            if _frozen(folder, True):
                over.wait(FREEZE_S)
                _frozen(folder, False)

    thread = threading.Thread(target=stutter)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return f"the disk takes writes for {THAW_S:g} s, then none for {FREEZE_S:g} s", end


# --- the network -----------------------------------------------------------------------------------------------------


def _cut(job: Job, strike: Strike) -> Done:
    network, node = job.place.network, strike.node
    if network is None:
        return NOTHING
    network.pull(node)
    return f"cut {node} off", lambda: network.plug(node)


def _one_way(deaf: bool) -> Callable[[Job, Strike], Done]:
    def strike_it(job: Job, strike: Strike) -> Done:
        network, node = job.place.network, strike.node
        if network is None:
            return NOTHING
        (network.deafen if deaf else network.mute)(node)
        return f"{node} hears nothing" if deaf else f"{node} is not heard", lambda: network.restore(node)

    return strike_it


def _shaped(words: Callable[[float], list[str]]) -> Callable[[Job, Strike], Done]:
    def strike_it(job: Job, strike: Strike) -> Done:
        network, node = job.place.network, strike.node
        if network is None:
            return NOTHING
        chosen = words(strike.strength)
        network.shape(node, *chosen)
        return f"the link of {node}: {' '.join(chosen)}", lambda: network.restore(node)

    return strike_it


# --- the machine -----------------------------------------------------------------------------------------------------


def _memory(job: Job, strike: Strike) -> Done:
    """A process that takes part of the free memory."""
    free_mb = psutil.virtual_memory().available / 1e6
    size_mb = int(min(BALLAST_MB, free_mb / 2))
    process = subprocess.Popen([sys.executable, "-c", BALLAST, str(size_mb)])

    def end() -> None:
        process.kill()
        process.wait()

    return f"a process took {size_mb} of {free_mb:.0f} MB of free memory", end


def _cores(job: Job, strike: Strike) -> Done:
    """Processes that compute without end, several on each core."""
    count = (os.cpu_count() or 1) * (1 + int(MOST_BUSY * strike.strength))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]

    def end() -> None:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()

    return f"{count} processes compute on {os.cpu_count()} cores", end


def _descriptors(job: Job, strike: Strike) -> Done:
    """Leaves a launcher few descriptors more than it has open now."""
    node = job.nodes[strike.node]
    if node.process is None or not node.running:
        return NOTHING
    pid = node.process.pid
    with contextlib.suppress(psutil.Error, OSError):
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # The kernel compares numbers of descriptors: those of closed ones in between are free, too.
        highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
        left = 1 + int(DESCRIPTORS_LEFT * strike.strength)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + left, before[1]))

        def restore() -> None:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

        return f"{left} descriptors are left to the launcher of {strike.node}", restore
    return NOTHING


def _clock(job: Job, strike: Strike) -> Done:
    clock, draw = job.clock, random.Random(strike.number)
    if clock is None:
        return NOTHING
    offset_s = draw.choice((-1, 1)) * max(1, int(DAY_S * strike.strength**4))
    clock.move(offset_s)

    def restore() -> None:
        clock.move(0)

    return f"moved the clock of {strike.node} by {offset_s:+d} s", restore


_FAULTS: dict[str, Callable[[Job, Strike], Done]] = {
    "kill-worker": _kill(_worker, "the worker"),
    "stop-worker": _stop(_worker, "the worker"),
    "kill-launcher": _kill_launcher,
    "stop-launcher": _stop(_launcher, "the launcher"),
    "kill-master": _kill_launcher,
    "stop-master": _stop(_launcher, "the Master's launcher"),
    "kill-member": _kill(_member, "the member"),
    "stop-member": _stop(_member, "the member"),
    "kill-pserver": _kill(_pserver, "the pserver"),
    "stop-pserver": _stop(_pserver, "the pserver"),
    "fill-disk": _fill,
    "slow-disk": _slow,
    "freeze-disk": _freeze,
    "cut": _cut,
    "deaf": _one_way(deaf=True),
    "mute": _one_way(deaf=False),
    "narrow": _shaped(
        lambda strength: ["tbf", "rate", f"{int(200 + 1800 * strength)}kbit", "burst", "16k", "latency", "200ms"]
    ),
    "loss": _shaped(lambda strength: ["netem", "loss", f"{1 + 9 * strength:.1f}%"]),
    "delay": _shaped(lambda strength: ["netem", "delay", f"{int(20 + 180 * strength)}ms", "20ms"]),
    "memory": _memory,
    "cores": _cores,
    "descriptors": _descriptors,
    "clock": _clock,
}
