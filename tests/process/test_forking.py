"""Launchers that are forked for tests are what ``python -m`` makes of them, and none of their processes gets lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import forking
from tests.process.free_ports import free_endpoints
from tests.process.harness import ROOT, Job, alive, until

PROGRAM = """
import json, os, signal, sys, threading
if sys.argv[1] == "tell":
    seen = {name: os.environ.get(name) for name in ("HELLO", "TEST_JOB_MARK", "PYTHONPATH")}
    handlers = [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGCHLD)]
    print(json.dumps([seen, sys.argv[1:], sys.path[:2], os.getcwd(), __name__, sys.modules["__main__"].__name__]))
    print(handlers, signal.pthread_sigmask(0, []), os.getsid(0) == os.getpid(), threading.active_count())
    print(sorted(os.listdir("/proc/self/fd"), key=int)[:-1], sys.stdin.read(), os.path.basename(sys.argv[0]))
    sys.exit("a reason")
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGSEGV)
if sys.argv[1] == "raise":
    raise ValueError("wrong")
if sys.argv[1] == "leave" and os.fork() == 0:
    os.setsid()
    signal.pause()
"""

WORKER = """
import json, os, signal, sys
handlers = {int(number): str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()}
stays = {name: os.environ.get(name) for name in ("HOME", "PATH", "PYTHONPATH", "RANK", "EDL_SLOT")}
streams = [[type(one.buffer).__name__, one.write_through, one.errors, one.encoding] for one in (sys.stdout, sys.stderr)]
told = dict(
    argv=sys.argv, path=sys.path, name=__name__, names=sorted(globals()), environment=stays, original=sys.orig_argv,
    blocked=sorted(signal.pthread_sigmask(0, [])), descriptors=sorted(os.listdir("/proc/self/fd")), cwd=os.getcwd(),
    streams=streams, input=os.readlink("/proc/self/fd/0"), handlers=handlers,
    leads=[os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getsid(os.getppid()) == os.getppid()],
    parent=open(f"/proc/{os.getppid()}/cmdline").read().split(chr(0))[1:3],
)
print("TOLD", json.dumps(told, sort_keys=True), "edl.launch.compose" in sys.modules)
sys.exit("a reason")
"""


@pytest.fixture(scope="module")
def forker() -> Iterator[forking.Forker]:
    one = forking.Forker(("json", "threading"), forking.plain_environment())
    yield one
    one.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def environment() -> dict[str, str]:
    words = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HELLO": "world", forking.MARK: "7" * 32}
    return {**forking.plain_environment(), **words}


@pytest.mark.parametrize(("what", "status"), [("tell", 1), ("die", -signal.SIGSEGV), ("raise", 1), ("nothing", 0)])
def test_a_forked_program_is_like_one_that_was_started(
    forker: forking.Forker, folder: Path, environment: dict[str, str], what: str, status: int
) -> None:
    command = [sys.executable, "-m", "program", what, "more"]
    started = subprocess.run(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True)
    with (folder / "out").open("w+b") as out, (folder / "err").open("w+b") as err, open(os.devnull) as nothing:
        streams = [nothing.fileno(), out.fileno(), err.fileno()]
        process = forker.run("program", command[3:], environment, folder, streams)
        assert process.wait(60) == process.poll() == process.returncode == started.returncode == status
    said = (folder / "out").read_text(), (folder / "err").read_text().splitlines()[-1:]
    # Of a session of its own this one is, and the other is not.
    assert said == (started.stdout.decode().replace("False 1\n", "True 1\n"), started.stderr.decode().splitlines()[-1:])


def test_launchers_and_questions_are_forked_unless_somebody_wants_it_real(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "edl.launch", "--nnodes=3:2", "train.py"]
    real = {
        "a prefix": (["env", *command], environment),
        "an option of the interpreter": ([sys.executable, "-u", *command[1:]], environment),
        "another seed": (command, {**environment, "PYTHONHASHSEED": "0"}),
        "other modules": (command, {**environment, "PYTHONPATH": f"{folder}:{ROOT}"}),
    }
    said = []
    for words, env in [(command, environment), *real.values()]:
        with (folder / "log").open("w+b") as log:
            process = forking.start(words, env, folder, log, log)
            assert process.wait(60) == 2
        said.append(((folder / "log").read_text(), isinstance(process, forking.Forked)))
    assert said == [(said[0][0], number == 0) for number in range(len(said))]
    assert "the maximum 2 is below the minimum 3" in said[0][0]
    monkeypatch.setenv("TEST_REAL_STARTS", "1")
    answer = forking.run([sys.executable, "-m", "edl.cli", "--version"], environment, folder, 60)
    monkeypatch.delenv("TEST_REAL_STARTS")
    forked = forking.run([sys.executable, "-m", "edl.cli", "--version"], environment, folder, 60)
    assert (forked.returncode, forked.stdout, forked.stderr) == (answer.returncode, answer.stdout, answer.stderr)
    with pytest.raises(AssertionError, match=r"has not ended in 0\.0 s\. It wrote"):
        forking.run([sys.executable, "-m", "edl.cli", "status"], environment, folder, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("more", "spared"), [({}, True), ({"MKL_NUM_THREADS": "1"}, False)], ids=["spare", "none"])
def test_a_worker_cannot_tell_who_has_started_its_fork_server(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, more: dict[str, str], spared: bool
) -> None:
    """A spare process of its launcher, or the interpreter."""
    (folder / "train.py").write_text(WORKER)
    command = [sys.executable, "-m", "edl.launch", "--standalone", "--max-restarts=0", "train.py", "--x"]
    found = []
    for real in ("", "1"):
        monkeypatch.setenv("TEST_REAL_STARTS", real)
        done = forking.run(command, {**environment, **more}, folder, 60)
        (told,) = [line for line in done.stdout.splitlines() if "TOLD" in line]
        assert "a reason" in done.stderr
        found.append((done.returncode, *told.rpartition(" ")[::2]))
    assert found == [(found[1][0], found[1][1], str(spared)), (found[1][0], found[1][1], "False")]


def test_what_a_forked_launcher_has_forked_is_found_when_it_is_gone(
    forker: forking.Forker, folder: Path, environment: dict[str, str]
) -> None:
    """Whoever it is, and whatever session it has: by the mark that it shows although nothing was executed."""
    with Job(folder, []) as job:
        with (folder / "log").open("wb") as log, open(os.devnull) as nothing:
            marked = {**environment, forking.MARK: job.mark}
            process = forker.run("program", ["leave"], marked, folder, [nothing.fileno(), *[log.fileno()] * 2])
        assert process.wait(60) == 0
        (left,) = job.processes()
        with pytest.raises(AssertionError, match=rf"left over: \['{left.pid} \(parent"):
            job.check_nothing_left(limit_s=0.1)
        left.kill()
        job.check_nothing_left()
    assert not [one for one in Path("/proc").glob(f"{forker.pid}/environ") if job.mark.encode() in one.read_bytes()]


def test_sockets_and_shared_memory_have_the_time_of_the_processes(folder: Path) -> None:
    """A process that ends gives up its environment first. Who stays is told of."""
    (endpoint,) = free_endpoints(1)
    host, _, port = endpoint.rpartition(":")
    with Job(folder, [endpoint], backend="etcd-embedded") as job:
        stays = pytest.raises(AssertionError, match=rf"left over: \['somebody still listens at {endpoint}'\]")
        with socket.create_server((host, int(port))), stays:
            job.check_nothing_left(limit_s=0.1)
        server = socket.create_server((host, int(port)))
        ending = threading.Timer(0.3, server.close)
        ending.start()
        begun = time.monotonic()
        job.check_nothing_left()
        assert time.monotonic() - begun > 0.2
        ending.join()


def test_forkers_end_with_those_who_have_made_them(folder: Path) -> None:
    """However that happens."""
    text = "import sys; from tests.process import forking; print(forking.Forker(('json',)).pid, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", text], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        pid = int(child.stdout.readline())
        assert alive(pid)
        child.kill()
        child.wait()
    until(lambda: not alive(pid), "the end of the forker")
