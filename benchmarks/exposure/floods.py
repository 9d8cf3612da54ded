"""Attacks that try to bring down a node or the job: large messages, many connections, a full store, a disk that
hangs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.common import processes
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import REPOSITORY, JobPlan
from benchmarks.common.steps import World
from benchmarks.exposure import probes, stranger
from benchmarks.exposure.doors import step
from benchmarks.exposure.ports import Told, running
from benchmarks.exposure.sockets import listening

MESSAGE = b"\x0a\x00" * 30_000_000
"""60 MB that decode into 30 million empty names (``Drain.nodes``)."""
IDLERS = 400
FILES = 256
QUOTA_BYTES = 16 << 20
STUB = (
    "import sys; from edl.adapters.etcd_server import EtcdMember; "
    f"EtcdMember.__init__.__kwdefaults__['quota_bytes'] = {QUOTA_BYTES}; "
    "sys.argv[0] = 'edl-run'; from edl.launch.__main__ import main; main()"
)
"""``edl-run`` with a store that is soon full: the real one takes 2 GB."""
FREEZE_S = 8.0
FROZEN = "fsfreeze of an ext4 for its logs"
TIMEOUT_S = 180.0


def attack(python: str) -> None:
    """Print the result of each attack."""
    for title, act in (
        ("60 MB without a token, to launchers of an open job of two nodes", _messages),
        (f"{IDLERS} idle connections to a launcher with ulimit -n {FILES}, and a worker is killed", _idle),
        (f"the quota of the embedded etcd ({QUOTA_BYTES >> 20} MB here) is reached, open job of two nodes", _quota),
        (f"the log folder of one of two nodes hangs for {FREEZE_S:g} s", _logs),
    ):
        print(f"\n{title}:", flush=True)
        try:
            act(python)
        except NotReached as error:
            step("the job", f"DID NOT GET THERE: {error}")


# --- what has become of a job ----------------------------------------------------------------------------------------


def _edl(job: Job, *words: str) -> str:
    where = [f"--rdzv-id={job.plan.job_id}"] + ([f"--rdzv-endpoint={job.plan.endpoint}"] if job.plan.endpoint else [])
    done = subprocess.run(
        [sys.executable, "-m", "edl.cli", *words, *where],
        env=processes.clean_environment({"PYTHONPATH": str(REPOSITORY)}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout or done.stderr


def _trains(job: Job, before: World) -> str:
    """Whether the same world continues, and what the job's history has recorded."""
    moment_s = time.monotonic()

    def later() -> World | None:
        world = job.steps.newest()
        return world if world is not None and world.every_rank(1) and world.last_s > moment_s + 1 else None

    now = job.wait(later, "more steps", TIMEOUT_S)
    kinds = [json.loads(line)["kind"] for line in _edl(job, "events", "--json").splitlines() if line.startswith("{")]
    lost = [kind for kind in kinds if "lost" in kind or "depos" in kind or "silent" in kind]
    same = "the same world trains on" if now.formed == before.formed else f"ANOTHER world of {now.size} trains"
    return f"{same}; losses in the history: {', '.join(lost) or 'none'}"


def _after_kill(job: Job, before: World, node: int = 0) -> str:
    """Kill a worker; returns how long it takes until a whole world trains again, and the restarts charged."""
    began = job.kill_worker(before.pids(node)[-1])
    world = job.wait(lambda: job.steps.formed_after(began, before.size), f"a world of {before.size}", TIMEOUT_S)
    status = json.loads(_edl(job, "status", "--json"))
    return f"a world of {world.size} after {world.first_s - began:.1f} s, restarts used: {status['restarts_used']}"


# --- S3: large messages ----------------------------------------------------------------------------------------------


def _messages(python: str) -> None:
    with running(Told(python, embedded=True), 2) as job:
        before = job.wait_running(2)
        launchers = [process.pid for process in job.nodes.values()]
        memory = {pid: psutil.Process(pid).memory_info().rss for pid in launchers}
        for one in [one for one in listening(job.run) if one.whose == "launcher" and one.family == "tcp"]:
            if not str(stranger.ask(probes.status, one.target)).startswith("UNAUTH"):
                continue
            said = [stranger.ask(_sends, one.target) for _ in range(3)]
            step(f"S3: three times 60 MB to node {one.node} ({one.where}), without a token", ", ".join(map(str, said)))
        for pid, rss in memory.items():
            peak = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1e3
            now = psutil.Process(pid).memory_info().rss / 1e6
            step(f"memory of launcher {pid}", f"{rss / 1e6:.0f} MB before, {peak:.0f} MB at most, {now:.0f} MB now")
        step("the job", _trains(job, before))


def _sends(target: str) -> str:
    return probes.call(target, f"{probes.SERVICE}Drain", MESSAGE, limit_s=30)[0]


# --- S4: idle connections --------------------------------------------------------------------------------------------


def _idle(python: str) -> None:
    limited = ("bash", "-c", f'ulimit -n {FILES} && exec "$@"', "bash")
    with running(Told(python, embedded=True, prefix=limited), 1, workers=2) as job:
        before = job.wait_running(2)
        launcher = job.nodes[0].pid
        alone = psutil.Process(launcher).num_fds()
        sockets = [one for one in listening(job.run) if one.whose == "launcher" and one.family == "tcp"]
        with contextlib.ExitStack() as stack:
            for one in sockets:
                stack.enter_context(stranger.at_work(_idles, one.address))
            deadline_s, most = time.monotonic() + 10, 0
            while time.monotonic() < deadline_s:
                most = max(most, psutil.Process(launcher).num_fds())
                time.sleep(0.1)
            where = ", ".join(one.where for one in sockets)
            step(f"S4: {IDLERS} idle connections to each of {where}", f"open files: {alone} before, {most} at most")
            step("S4: a worker is killed", _after_kill(job, before))
        log = (job.plan.folder / "launcher0.log").read_text()
        step("the launcher", "runs" if job.nodes[0].poll() is None else f"HAS ENDED: {log[-300:]}")


def _idles(address: tuple[str, int]) -> None:
    """Hold that many connections, and reopen those that are closed."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    held: list[socket.socket] = []
    while True:
        held = [one for one in held if _stands(one)]
        with contextlib.suppress(OSError):
            while len(held) < IDLERS:
                held.append(socket.create_connection(address, 1.0))
        time.sleep(0.1)


def _stands(one: socket.socket) -> bool:
    try:
        stands = one.recv(1, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        stands = False
    if not stands:
        one.close()
    return stands


# --- S5: a full store ------------------------------------------------------------------------------------------------


class _SmallStore(Told):
    def command(self, plan: JobPlan, node: int) -> list[str]:
        words = Told.command(self, plan, node)
        at = words.index("edl.launch")
        return [*words[: at - 1], "-c", STUB, *words[at + 1 :]]


def _quota(python: str) -> None:
    with running(_SmallStore(python, embedded=True), 2) as job:
        before, store = job.wait_running(2), _store(job)
        step("S5: four keys are written 40 times: history fills it", f"{stranger.ask(_fills, store, limit_s=120)}")
        step("the job", _trains(job, before))
        step("S5: a worker is killed", _after_kill(job, before))
        step("the launchers say", _room_said(job))
    with running(_SmallStore(python, embedded=True), 2) as job:
        before, store = job.wait_running(2), _store(job)
        with stranger.at_work(_keeps_full, store):
            job.wait(lambda: _room_said(job) or None, "a store that is full", TIMEOUT_S)
            step("S5: endless new keys: none is old, and freed space is used up at once", _room_said(job))
            step("the job", _trains(job, before))
            began = job.kill_worker(before.pids(0)[-1])
            warned = job.wait(lambda: _warnings(job) or None, "a word of the Master's", TIMEOUT_S)
            step("S5: a worker is killed; edl status says", warned)
        step("the stranger stops, and its keys are deleted", f"{stranger.ask(probes.delete, store, '/ballast/')}")
        world = job.wait(lambda: job.steps.formed_after(began, 2), "a world of 2", TIMEOUT_S)
        step("the job", f"a world of {world.size} trains, {world.first_s - began:.0f} s after the kill")


def _store(job: Job) -> str:
    return next(one.target for one in listening(job.run) if one.hint == "client")


def _fills(target: str) -> str:
    said = [probes.put(target, f"/ballast/{number % 4}", os.urandom(1 << 20)) for number in range(40)]
    refused = [word for word in said if word != "OK"]
    return f"{len(said) - len(refused)} MB written, {len(refused)} refused{f' ({refused[0]})' if refused else ''}"


def _keeps_full(target: str) -> None:
    for number in itertools.count():
        if probes.put(target, f"/ballast/{number}", os.urandom(1 << 18)) != "OK":
            time.sleep(0.05)


def _warnings(job: Job) -> str:
    """Warnings about the store in ``edl status``."""
    try:
        return "; ".join(text for text in json.loads(_edl(job, "status", "--json"))["warnings"] if "room" in text)
    except ValueError:
        return ""


def _room_said(job: Job) -> str:
    logs = [(job.plan.folder / f"launcher{node}.log").read_text() for node in job.nodes]
    lines = [line for log in logs for line in log.splitlines() if "was full" in line or "no room" in line]
    return lines[-1] if lines else ""


# --- S7: a disk that hangs -------------------------------------------------------------------------------------------


def _logs(python: str) -> None:
    launcher = Told(python, embedded=True, options=("--redirects=3",))
    with _with_a_disk(launcher) as (job, freeze, how):
        before = job.wait_running(2)
        freeze(True)
        try:
            step(f"S7: {how}; a worker there is killed", _after_kill(job, before, 1))
            now = job.steps.newest() or before
            time.sleep(FREEZE_S)
            step(f"{FREEZE_S:g} s later", _trains(job, now))
            if how == FROZEN:
                touching = subprocess.Popen(["touch", str(Path(job.plan.log_dir(1)) / "ours")])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    touching.wait(2)
                step("a file of ours on that disk", "no answer in 2 s" if touching.poll() is None else "WRITTEN")
        finally:
            freeze(False)
        step("the job, once the disk answers", _trains(job, now))


@contextlib.contextmanager
def _with_a_disk(launcher: Told) -> Iterator[tuple[Job, Callable[[bool], None], str]]:
    """A job of two nodes, and a way to stop the disk with the logs of the second."""
    with launch(launcher, "rejoin_torch.py", (1, 4)) as job, contextlib.ExitStack() as stack:
        folder = Path(job.plan.log_dir(1))
        folder.mkdir()
        try:
            stack.enter_context(_mounted(folder))
            freeze, how = functools.partial(_fsfreeze, folder), FROZEN
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"  (no file system can be mounted here: {error}. Files that never finish opening are used instead)")
            freeze, how = functools.partial(_block, folder), "log files that never finish opening"
        for node in range(2):
            job.start(node)
        yield job, freeze, how
        job.close()  # before the file system is removed


@contextlib.contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        raise PermissionError("only root mounts")
    image = folder.with_suffix(".ext4")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fsfreeze(folder: Path, on: bool) -> None:
    subprocess.run(["fsfreeze", "--freeze" if on else "--unfreeze", str(folder)], check=True)


def _block(folder: Path, on: bool) -> None:
    """Replace the files of the worker's next attempt with pipes that have no reader; does nothing unless ``on``."""
    (run,) = folder.glob("*")
    for name in ("stdout.log", "stderr.log") if on else ():
        place = run / "attempt_1" / "0" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(place)
