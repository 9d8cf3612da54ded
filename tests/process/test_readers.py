"""Readers as processes: a launcher keeps them running and known, and trainers survive whatever happens to them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyarrow import ipc

from data_service.formats import open_reader
from data_service.manifest import ShardRef
from data_service.remote.client import TIMEOUT_S, Pool, RemoteReader
from edl.exit_codes import ExitCode
from edl.ports import KeyValue
from edl.types import JobId
from edl.wire.keys import JobKeys
from tests.process.etcd_fixture import patient_store
from tests.process.free_ports import free_endpoints
from tests.process.harness import ROOT, WORKERS, Job, Node, OutsideEtcd, alive, stopped, until
from tests.process.test_data import check, end_soon

SECRET = "of these readers"
RECORDS = 2_000_000
LEASE_S = 2
RECORDS_OF_A_FILE = 800


class Keys:
    """The readers of a job, as the store has them."""

    def __init__(self, endpoint: str, job: str) -> None:
        self.endpoint = endpoint
        self.prefix = JobKeys(JobId(job)).helper("data", "readers/")

    def now(self) -> dict[str, dict[str, Any]]:
        entries = self._entries()
        assert all(entry.lease for entry in entries)
        return {entry.key[len(self.prefix) :]: json.loads(entry.value) for entry in entries}

    def leases(self) -> set[int]:
        return {entry.lease for entry in self._entries()}

    def _entries(self) -> Sequence[KeyValue]:
        async def read() -> Sequence[KeyValue]:
            store = patient_store(self.endpoint)
            try:
                return (await store.read(self.prefix)).entries
            finally:
                await store.close()

        return asyncio.run(read())

    def wait(self, count: int, *, without: Sequence[str] = (), limit_s: float = 60) -> dict[str, dict[str, Any]]:
        def look() -> dict[str, dict[str, Any]] | None:
            there = self.now()
            return there if len(there) == count and not set(without) & set(there) else None

        found = until(look, f"{count} readers without {without}", limit_s)
        assert found is not None
        return found


def reader_pids(launcher: Node) -> list[int]:
    children = psutil.Process(launcher.process.pid).children()
    return sorted(child.pid for child in children if "data_service" in child.cmdline())


def pid_at(launcher: Node, port: int) -> int:
    """The reader process that listens at a port."""
    for pid in reader_pids(launcher):
        if any(one.laddr.port == port for one in psutil.Process(pid).net_connections() if one.status == "LISTEN"):
            return pid
    raise AssertionError(f"nobody of {launcher.name} listens at {port}")


def start_readers(job: Job, name: str, count: int, *options: str) -> Node:
    command = [
        *(sys.executable, "-m", "edl.launch", "--role=reader", f"--readers={count}", f"--node-id={name}"),
        *(f"--rdzv-endpoint={job.endpoints[0]}", f"--rdzv-id={job.name}", "--rdzv-backend=etcd"),
        *("--shutdown-timeout=10", *options),
    ]
    return job.start(name, command=command)


def job_of(folder: Path, etcd: OutsideEtcd, lease_s: float = LEASE_S, **more: Any) -> Job:
    return Job(folder, [etcd.endpoint], options=(f"--lease-ttl={lease_s:g}",), **more)


# --- the launcher's role ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_readers_are_known_while_they_live(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """They may come before the job. One that dies is forgotten at once and replaced; they leave in good order. No lease
    ends meanwhile."""
    with job_of(tmp_path, etcd, lease_s=1000) as job:
        keys = Keys(etcd.endpoint, job.name)
        readers = start_readers(job, "readers", 3)
        readers.says(f"waiting for job {job.name}")
        assert keys.now() == {}
        job.start("a")
        job.wait_world(1)
        before = keys.wait(3)
        assert sorted(before) == ["readers-1", "readers-2", "readers-3"]
        assert len({one["secret"] for one in before.values()}) == 3

        os.kill(pid_at(readers, before["readers-2"]["port"]), signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: "readers-2" not in keys.now(), "the key of a dead reader goes")
        after = keys.wait(3, without=["readers-2"])
        print(f"a new reader after {time.monotonic() - killed:.2f} s")
        assert sorted(after) == ["readers-1", "readers-3", "readers-4"]
        assert after["readers-4"]["secret"] != before["readers-2"]["secret"]

        seen = job.seen()
        pids = reader_pids(readers)
        readers.send(signal.SIGTERM)
        until(lambda: not keys.now(), "no readers")
        assert readers.exit_code() == ExitCode.OK
        assert not any(alive(pid) for pid in pids)
        assert job.wait_steps(3).round == (seen.round if seen else 0)  # training has not noticed
        job.end_soon()
        assert job.nodes["a"].exit_code() == ExitCode.OK


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_readers_along(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        keys = Keys(etcd.endpoint, job.name)
        job.start("a")
        readers, others = start_readers(job, "r", 2), start_readers(job, "s", 1)
        keys.wait(3)
        pids = reader_pids(readers)
        assert len(pids) == 2
        readers.kill()
        until(lambda: not any(alive(pid) for pid in pids), "the readers of a dead launcher")
        assert sorted(keys.wait(1)) == ["s-1"]

        job.wait_world(1)
        job.end_soon()
        assert job.nodes["a"].exit_code() == ExitCode.OK
        assert others.exit_code() == ExitCode.OK  # the job has ended, and that well
        assert f"job {job.name} has ended" in others.text
        assert keys.now() == {}


def test_a_key_that_is_lost_comes_back(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """Whoever clears the job's keys, or an expired lease, does not make readers unknown for long."""
    with job_of(tmp_path, etcd) as job:
        keys = Keys(etcd.endpoint, job.name)
        job.start("a")
        readers = start_readers(job, "r", 2)
        before = keys.wait(2)

        (lost,) = keys.leases()

        async def lose() -> None:
            store = patient_store(etcd.endpoint)
            await store.revoke_lease(lost)
            await store.close()

        asyncio.run(lose())
        until(lambda: keys.leases() - {lost}, "keys with another lease")
        assert keys.wait(2) == before
        readers.send(signal.SIGTERM)
        assert readers.exit_code() == ExitCode.OK


def test_a_training_launcher_may_have_readers_beside_its_workers(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        keys = Keys(etcd.endpoint, job.name)
        node = job.start("a", options=("--readers=2",))
        job.wait_world(1)
        keys.wait(2)
        os.kill(pid_at(node, keys.now()["a-1"]["port"]), signal.SIGKILL)
        assert sorted(keys.wait(2, without=["a-1"])) == ["a-2", "a-3"]
        job.end_soon()
        assert node.exit_code() == ExitCode.OK
        assert keys.now() == {}


def test_readers_hear_of_the_end_although_the_store_ends_with_the_job(tmp_path: Path) -> None:
    with Job(tmp_path, free_endpoints(1), backend="etcd-embedded", options=(f"--lease-ttl={LEASE_S}",)) as job:
        keys = Keys(job.endpoints[0], job.name)
        node = job.start("a", options=("--readers=1",))
        job.wait_world(1)
        readers = start_readers(job, "r", 1)
        keys.wait(2)
        job.end_soon()
        assert node.exit_code() == ExitCode.OK
        assert readers.exit_code() == ExitCode.OK
        assert f"job {job.name} has ended" in readers.text


def test_readers_of_a_job_that_never_comes_give_up(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        readers = start_readers(job, "r", 1, "--recover-timeout=2")
        assert readers.exit_code() == ExitCode.USAGE
        assert f"no job {job.name} in this store after 2 s" in readers.text


def test_readers_that_cannot_start_are_an_error(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        job.start("a")
        job.wait_world(1)
        readers = start_readers(job, "r", 1, "--local-addr=203.0.113.7")
        assert readers.exit_code() == ExitCode.CANNOT_START_WORKER
        assert "203.0.113.7" in readers.text


@pytest.mark.slow
def test_a_frozen_reader_is_replaced(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        keys = Keys(etcd.endpoint, job.name)
        job.start("a")
        readers = start_readers(job, "r", 1)
        keys.wait(1)
        (pid,) = reader_pids(readers)
        os.kill(pid, signal.SIGSTOP)
        assert sorted(keys.wait(1, without=["r-1"])) == ["r-2"]
        assert not alive(pid)
        assert "did not answer" in readers.text


# --- trainers --------------------------------------------------------------------------------------------------------


class Process:
    """A reader process without a launcher."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "data_service", "reader", "--grace=300"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"secret": SECRET}) + "\n")
        self.process.stdin.flush()
        self.address = [name, "127.0.0.1", json.loads(self.process.stdout.readline())["port"], SECRET]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:
            pass


@contextmanager
def processes(count: int) -> Iterator[tuple[Pool, list[Process]]]:
    with ExitStack() as stack:
        started = [stack.enter_context(Process(f"r{n}")) for n in range(count)]
        pool = Pool()
        pool.update([one.address for one in started])
        stack.callback(pool.close)
        yield pool, started


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> ShardRef:
    path = tmp_path_factory.mktemp("data") / "numbers.ipc"
    # More than sockets hold between a reader and its trainer: a reader is not through before it has been asked on.
    padding = pa.FixedSizeBinaryArray.from_buffers(pa.binary(64), RECORDS, [None, pa.py_buffer(bytes(64 * RECORDS))])
    table = pa.table({"id": pa.array(range(RECORDS), pa.int64()), "padding": padding})
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=100_000)
    return ShardRef(0, str(path), 0, RECORDS, RECORDS)


def ids(batches: Iterator[Any]) -> Iterator[int]:
    for batch in batches:
        yield from batch.column("id").to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["only", "prefer"])
def test_a_reader_that_is_killed_in_the_middle_loses_and_doubles_nothing(shard: ShardRef, policy: str) -> None:
    with processes(2) as (pool, readers):
        local = open_reader("ipc") if policy == "prefer" else None
        trainer = RemoteReader(pool, "set", "ipc", local=local, policy=policy)
        stream = trainer.batches(shard, rows=10_000)
        got = list(next(stream).column("id").to_pylist())
        victims = readers if policy == "prefer" else [readers[_busy(pool)]]
        for victim in victims:
            victim.process.kill()
            victim.process.wait()
        began = time.monotonic()
        got += ids(stream)
        assert time.monotonic() - began < TIMEOUT_S, "a reader that is gone is not waited for"
        assert got == list(range(RECORDS))
        assert trainer.counts.takeovers >= 1
        assert trainer.counts.local_shards == (policy == "prefer")


def _busy(pool: Pool) -> int:
    (name,) = [name for name, link in pool._links.items() if link.streams]
    return int(name[1:])


@pytest.mark.slow
def test_a_reader_that_freezes_in_the_middle_is_given_up(shard: ShardRef) -> None:
    with processes(2) as (pool, readers):
        trainer = RemoteReader(pool, "set", "ipc", policy="only", timeout_s=4)
        stream = trainer.batches(shard, rows=10_000)
        got = list(next(stream).column("id").to_pylist())
        with stopped(readers[_busy(pool)].process.pid) as began:
            got += ids(stream)
            assert time.monotonic() - began > 3
        assert got == list(range(RECORDS))
        assert trainer.counts.takeovers >= 1, "more if the other one is slow to begin on a busy machine"


@pytest.mark.slow
def test_a_reader_that_has_left_the_list_is_waited_for_less(shard: ShardRef) -> None:
    with processes(2) as (pool, readers):
        trainer = RemoteReader(pool, "set", "ipc", policy="only", timeout_s=60)
        stream = trainer.batches(shard, rows=10_000)
        got = list(next(stream).column("id").to_pylist())
        busy = _busy(pool)
        with stopped(readers[busy].process.pid) as began:
            pool.update([readers[1 - busy].address])
            got += ids(stream)
            assert time.monotonic() - began < 60, "not for the whole timeout"
        assert got == list(range(RECORDS))


@pytest.mark.slow
def test_a_reader_frozen_from_the_start_is_given_up_and_its_trainer_can_end(shard: ShardRef) -> None:
    program = (
        "import json, sys\n"
        "from data_service.remote.client import Pool, RemoteReader\n"
        "from data_service.manifest import ShardRef\n"
        "pool = Pool(); pool.update(json.loads(sys.argv[1])); ref = ShardRef(*json.loads(sys.argv[2]))\n"
        "print(RemoteReader(pool, 'set', 'ipc', policy='only', timeout_s=4.0).read(ref).num_rows, flush=True)"
    )
    with processes(2) as (_, readers):
        addresses = json.dumps([one.address for one in readers])
        described = json.dumps([shard.index, shard.file, shard.begin, shard.end, shard.records])
        for frozen in readers:  # whichever it asks first
            with stopped(frozen.process.pid):
                command = [sys.executable, "-c", program, addresses, described]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(RECORDS), "")


@pytest.mark.slow
def test_a_slow_trainer_does_not_make_a_reader_grow(tmp_path: Path) -> None:
    """What is on its way is bounded, however much is asked for: 600 MB, of which nothing is taken for a while."""
    path, count = tmp_path / "large.ipc", 600
    schema = pa.schema([("blob", pa.large_binary())])
    batch = pa.record_batch([pa.array([os.urandom(1_000_000)], pa.large_binary())], schema=schema)
    with ipc.new_file(path, schema) as writer:
        for _ in range(count):
            writer.write_batch(batch)
    ref = ShardRef(0, str(path), 0, count, count)
    with processes(1) as (pool, (reader,)):
        trainer = RemoteReader(pool, "set", "ipc", policy="only")
        assert next(trainer.batches(ref, rows=1, upto=count - 2)).num_rows == 1  # everything is loaded
        before = _private_bytes(reader.process.pid)
        stream = trainer.batches(ref, rows=1)
        next(stream)
        most = 0
        for _ in range(20):
            threading.Event().wait(0.1)
            most = max(most, _private_bytes(reader.process.pid) - before)
        print(f"grown by {most / 1e6:.0f} MB")
        assert most < 64e6
        assert sum(batch.num_rows for batch in stream) == count - 1
        path.unlink()


def _private_bytes(pid: int) -> int:
    """Memory of its own; pages of a mapped file do not count."""
    return int(psutil.Process(pid).memory_full_info().uss)


def test_sigterm_lets_a_stream_end(shard: ShardRef) -> None:
    with processes(1) as (pool, (reader,)):
        trainer = RemoteReader(pool, "set", "ipc", policy="only")
        stream = trainer.batches(shard, rows=10_000)
        got = list(next(stream).column("id").to_pylist())
        reader.process.terminate()
        got += ids(stream)
        assert got == list(range(RECORDS))
        assert trainer.counts.takeovers == 0
        assert reader.process.wait(60) == 0


def test_a_reader_without_its_launcher_ends() -> None:
    with Process("r0") as reader:
        assert reader.process.stdin is not None
        reader.process.stdin.close()
        assert reader.process.wait(60) == 0


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        ids = list(range(number * RECORDS_OF_A_FILE, (number + 1) * RECORDS_OF_A_FILE))
        table = pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array([n % 7 for n in ids], pa.float32())})
        with ipc.new_file(folder / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table)
    return folder


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def training(folder: Path, etcd: OutsideEtcd, files: Path, framework: str, remote: str) -> Job:
    pytest.importorskip(framework)
    script = (str(WORKERS / f"data_{framework}.py"),)
    options = (
        f"--lease-ttl={LEASE_S}",
        "--max-restarts=100",
        "--slot-strikes=0",
        f"--data=train={files}/*;remote={remote}",
    )
    return Job(folder, [etcd.endpoint], script=script, options=options)


@pytest.mark.soak_but("paddle")
def test_each_record_counts_once_whatever_happens_to_readers(
    tmp_path: Path, etcd: OutsideEtcd, files: Path, framework: str
) -> None:
    with training(tmp_path, etcd, files, framework, "only") as job:
        keys = Keys(etcd.endpoint, job.name)
        job.start("a", "b")
        first, second = start_readers(job, "r", 2), start_readers(job, "s", 1)
        seen = job.wait_world(2)
        began = {name: one["port"] for name, one in keys.wait(3).items()}

        os.kill(pid_at(first, began["r-1"]), signal.SIGKILL)
        job.wait_steps(15)
        os.kill(seen.pids[1], signal.SIGKILL)  # a worker: everything since the last commit is read again
        seen = job.wait_world(2, after=seen.round)
        first.kill()
        job.wait_steps(15)
        assert all(name.startswith("s-") for name in keys.wait(1))

        third = start_readers(job, "t", 1)
        keys.wait(2)
        second.send(signal.SIGTERM)
        assert second.exit_code() == ExitCode.OK
        job.wait_steps(15)
        assert (job.seen() or seen).round == seen.round, "readers that come and go change no world"

        epochs = end_soon(job)
        assert [job.nodes[name].exit_code() for name in "ab"] == [0, 0]
        assert third.exit_code() == ExitCode.OK
        check(epochs, job.steps_folder, expected=set(range(3 * RECORDS_OF_A_FILE)))


@pytest.mark.torch
@pytest.mark.soak
def test_training_that_only_prefers_readers_goes_on_without_them(
    tmp_path: Path, etcd: OutsideEtcd, files: Path
) -> None:
    with training(tmp_path, etcd, files, "torch", "prefer") as job:
        job.start("a", options=("--readers=1",))
        seen = job.wait_world(1)
        Keys(etcd.endpoint, job.name).wait(1)
        job.wait_steps(10)
        (pid,) = reader_pids(job.nodes["a"])
        with stopped(pid):
            os.kill(pid, signal.SIGKILL)
        job.wait_steps(10)
        assert (job.seen() or seen).round == seen.round
        epochs = end_soon(job)
        assert job.nodes["a"].exit_code() == 0
        check(epochs, job.steps_folder, expected=set(range(3 * RECORDS_OF_A_FILE)))
