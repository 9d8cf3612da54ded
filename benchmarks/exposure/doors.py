"""Attacks that try to get access: the token, code in a reader, a place in another user's job, its end."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.flight as fl

from benchmarks.common import processes
from benchmarks.common.job import SCRIPTS, Job
from benchmarks.common.launchers import REPOSITORY
from benchmarks.exposure import probes, stranger
from benchmarks.exposure.ports import Told, running
from benchmarks.exposure.sockets import Listening, listening
from data_service.remote.flight import Ticket
from edl.types import JobId
from edl.wire.keys import JobKeys

SCRIPT = "rejoin_torch.py"
LINE = "a line that only its owner may read\n"
OTHER_SCRIPT = "print('I am something else')\n"


def step(what: str, outcome: str) -> None:
    """Print one line for an attempt and one for its result."""
    print(f"  {what}\n      -> {outcome.strip()}", flush=True)


def attack(python: str) -> None:
    """Print the result of each step, in a job of each kind."""
    readers = ("--readers=1",)
    for title, launcher, nodes in (
        ("a default job on one machine", Told(python, embedded=True, options=readers), 1),
        (
            "three nodes, no secret (open, as their start-up, `edl status` and docs say)",
            Told(python, embedded=True, options=readers),
            3,
        ),
        ("three nodes with a secret", Told(python, embedded=True, secret=True, options=readers), 3),
    ):
        print(f"\n{title}:")
        with running(launcher, nodes, SCRIPT) as job, _folder() as folder:
            sockets = listening(job.run)
            stores = [one for one in sockets if one.hint == "client"]
            _token(job, stores)
            _tickets(job, stores[0], [one for one in sockets if one.whose == "reader"], folder)
            _joining(job, stores[0], folder)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that every user can access."""
    with tempfile.TemporaryDirectory(prefix="edl-exposure-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def _token(job: Job, stores: Sequence[Listening]) -> None:
    for one in stores:
        read = stranger.ask(probes.connects, one.family, one.address)
        if read == "yes":
            read = stranger.ask(probes.read, one.target, f"/edl/{job.plan.job_id}/")
        step(f"S1: read the job's keys from the store at {one.where}", f"{read}")


# --- a ticket that names code ----------------------------------------------------------------------------------------


def _tickets(job: Job, store: Listening, readers: Sequence[Listening], folder: Path) -> None:
    said, answer = stranger.ask(_reader_key, store.target, job.plan.job_id)
    step("S1: a reader's password from the store", f"{said}: {answer[:4] + '…' if answer else 'none'}")
    port = int(readers[0].where.rpartition(":")[2])
    (mine := folder / "mine.txt").write_text(LINE)
    mine.chmod(0o600)
    mark = folder / "ran"
    code = f"open({str(mark)!r}, 'w')"
    for what, ticket in (
        ('a ticket with read="cProfile:run"', _ticket("user", code, {"read": "cProfile:run"})),
        ('a ticket with decode="cProfile:run"', _ticket("text", str(mine), {}, "cProfile:run")),
        ("a ticket for a file by way of another file system", _ticket("text", f"simplecache::file://{mine}", {})),
        ("a ticket for a file that only the job's user may read", _ticket("text", str(mine), {})),
    ):
        ran = f"{stranger.ask(_sent, port, answer or 'a guess', ticket.decode(), limit_s=40)}"
        step(f"S1: {what}", ran + (" AND THE CODE RAN" if mark.exists() else ""))


def _ticket(format: str, file: str, options: Mapping[str, object], decode: str = "") -> bytes:
    end = len(LINE) if format == "text" else 1
    return Ticket("x", format, 0, file, 0, end, -1, options=options, decode=decode).encode()


def _reader_key(target: str, job: str) -> tuple[str, str]:
    said, answer = probes.kv_range(target, JobKeys(JobId(job)).helper("data", "readers/"))
    found = re.search(rb'"secret": ?"([0-9a-f]+)"', answer)
    return said, found[1].decode() if found else ""


def _sent(port: int, password: str, ticket: str) -> str:
    """The answer of a reader."""
    call = fl.FlightCallOptions(timeout=20, headers=[(b"authorization", f"Bearer {password}".encode())])
    said = []
    for where, more in (
        (f"grpc://127.0.0.1:{port}", {}),
        (f"grpc+tls://127.0.0.1:{port}", {"disable_server_verification": True}),
    ):
        try:
            with fl.FlightClient(where, **more) as client:
                return f"SERVED {client.do_get(fl.Ticket(ticket.encode()), call).read_all().num_rows} records"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            words = str(error).partition(". gRPC client debug context")[0].partition(". Detail:")[0]
            words = words.rpartition("last error: ")[2]
            said.append(f"{type(error).__name__}: {words[:220]}")
    return said[0] if "Unavailable" not in said[0] else "; ".join(dict.fromkeys(said))


# --- a place in the job, and its end ---------------------------------------------------------------------------------


def _joining(job: Job, store: Listening, folder: Path) -> None:
    endpoint = job.plan.endpoint or f"unix:{store.where}"
    where = [f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job.plan.job_id}"]
    launch = ["-m", "edl.launch", "--nnodes=1:4", "--node-id=stranger", "--lease-ttl=3", "--max-restarts=10", *where]
    launch += ["--rdzv-conf=connect_timeout=5", f"--log-dir={folder / 'logs'}", "--rdzv-backend=etcd-embedded"]
    same, other = folder / SCRIPT, folder / "other.py"
    same.write_text((SCRIPTS / SCRIPT).read_text())
    other.write_text(OTHER_SCRIPT)
    before = job.wait_running(len(job.nodes), steps=5)
    arguments = [f"--workdir={folder}", "--steps=100"]
    step("S2: another user joins with the same script", _said(stranger.run([*launch, str(same), *arguments], folder)))
    step("S2: the job's user joins with another script", _said(_as_owner([*launch, str(other)], job)))
    wrong = {"EDL_SECRET": "of somebody else, 32 letters or more"}
    step("S2: another user joins with a secret of its own", _said(stranger.run([*launch, str(same)], folder, wrong)))
    job.steps.poll()
    now = job.steps.newest()
    step("the world that trains", "the same" if now is not None and now.formed == before.formed else "ANOTHER ONE")
    stop = ["-m", "edl.cli", "stop", "--yes", "--no-wait"]
    step("S2: another user says edl stop, and no more", _said(stranger.run(stop, folder)))
    step("S2: another user says edl stop with endpoint and name", _said(stranger.run([*stop, *where], folder)))
    with suppress(subprocess.TimeoutExpired):
        for process in job.nodes.values():
            process.wait(10)
    ended = [process.poll() for process in job.nodes.values()]
    step("the job", "trains on" if set(ended) == {None} else f"HAS ENDED: {ended}")


def _as_owner(words: Sequence[str], job: Job) -> subprocess.CompletedProcess[str]:
    ours = {"PYTHONPATH": str(REPOSITORY), **job.launcher.environment(job.plan, 0)}
    return subprocess.run(
        [sys.executable, *words],
        env=processes.clean_environment(ours),
        cwd=job.plan.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """The exit status and the last line of output."""
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return f"status {done.returncode}: {lines[-1][:400] if lines else 'nothing was said'}"
