"""Remote readers of a job with a secret: they serve the job, and refuse all others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pyarrow.flight as fl
import pytest

from edl.adapters.identity import identity_of, secret_at
from edl.exit_codes import ExitCode
from edl.types import JobId
from edl.wire.keys import JobKeys
from edl.wire.secret import Secret
from tests.process.etcd_fixture import patient_store
from tests.process.free_ports import free_endpoints
from tests.process.harness import WORKERS, Job, Node, until
from tests.process.test_data import check, end_soon, files
from tests.process.test_readers import pid_at

__all__ = ["files"]

SECRET = Secret(b"r" * 32)
RECORDS = 1500


def keys_of(job: Job) -> dict[str, dict[str, Any]]:
    """The readers' keys in the store, read with the job's secret."""

    async def read() -> dict[str, dict[str, Any]]:
        store = patient_store(*job.endpoints, tls=identity_of(SECRET))
        prefix = JobKeys(JobId(job.name)).helper("data", "readers/")
        try:
            return {entry.key[len(prefix) :]: json.loads(entry.value) for entry in (await store.read(prefix)).entries}
        finally:
            await store.close()

    return asyncio.run(read())


def refused(port: int, secret: str) -> bool:
    """True if a client that knows only the reader's secret is refused."""
    call = fl.FlightCallOptions(timeout=30, headers=[(b"authorization", f"Bearer {secret}".encode())])
    plain = fl.FlightClient(f"grpc://127.0.0.1:{port}")
    credulous = fl.FlightClient(f"grpc+tls://127.0.0.1:{port}", disable_server_verification=True)
    for client in (plain, credulous):
        with client, pytest.raises(fl.FlightUnavailableError):
            client.do_get(fl.Ticket(b"{}"), call)
    return True


def holds_no_secret(node: Node, workers: list[int]) -> bool:
    told = SECRET.value.decode()
    everywhere = [psutil.Process(pid) for pid in workers]
    everywhere += [one for one in psutil.Process(node.process.pid).children() if "data_service" in one.cmdline()]
    return all(told not in str(one.environ()) + str(one.cmdline()) for one in everywhere)


@pytest.mark.slow
@pytest.mark.torch
def test_readers_of_a_job_with_a_secret_serve_its_workers_alone(tmp_path: Path, files: Path) -> None:
    """Beside the workers and in a launcher of their own; when one dies the training goes on at the other."""
    (tmp_path / "secret").write_bytes(SECRET.value)
    (tmp_path / "secret").chmod(0o600)
    closing = f"--secret-file={tmp_path / 'secret'}"
    options = ("--slot-strikes=0", f"--data=train={files}/*;remote=only", closing)
    job = Job(
        tmp_path, free_endpoints(1), "etcd-embedded", script=(str(WORKERS / "data_torch.py"),), options=options
    )  # fmt: skip
    with job:
        job.start("a", options=("--readers=1",))
        seen = job.wait_world(1)
        alone = ("--role=reader", "--readers=1", "--node-id=r", f"--rdzv-id={job.name}", closing)
        command = job.command("r")[:3]
        readers = job.start("r", command=[*command, *alone, f"--rdzv-endpoint={job.endpoints[0]}"])
        there = until(lambda: keys if len(keys := keys_of(job)) == 2 else None, "two readers")
        assert there is not None
        for one in there.values():
            authority = Secret(SECRET.of_readers(JobId(job.name)).encode())
            assert asyncio.run(secret_at("127.0.0.1", one["port"])) == authority.fingerprint
            assert refused(one["port"], one["secret"])
        assert holds_no_secret(job.nodes["a"], [*seen.pids.values()])
        os.kill(pid_at(job.nodes["a"], there["a-1"]["port"]), signal.SIGKILL)
        job.wait_steps(30)
        epochs = end_soon(job)
        assert job.nodes["a"].exit_code() == ExitCode.OK
        assert readers.exit_code() == ExitCode.OK
        check(epochs, job.steps_folder, expected=set(range(RECORDS)))
