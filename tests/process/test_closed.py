"""Access to a job: on one machine its user only, on several machines those who hold its secret."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import psutil
import pytest

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_plan import split_endpoint
from edl.adapters.identity import Identity, identity_of, secret_at
from edl.errors import StoreError
from edl.exit_codes import ExitCode
from edl.types import JobId
from edl.wire.secret import Secret
from tests.process.free_ports import free_endpoints
from tests.process.harness import Job, until

SECRETS = ("EDL_RDZV_CONF", "EDL_SECRET")

SCRIPT = """\
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1].partition("=")[2])
(folder / "seen.new").write_text(json.dumps(dict(os.environ)))
(folder / "seen.new").rename(folder / "seen.json")
while not (folder / "last-step").exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_job_on_one_machine_has_a_store_that_only_its_user_reaches(tmp_path: Path) -> None:
    """etcd listens on no port, `edl status` finds it all the same, and workers do not get the store's password."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {"EDL_RDZV_CONF": "user=me,password=mine"}
    with Job(tmp_path, [], "etcd-embedded", script=(str(script),), nnodes="1", environment=environment) as job:
        job.start("a")
        seen = until((job.steps_folder / "seen.json").exists, "the worker's environment")
        assert seen and not set(SECRETS) & set(json.loads((job.steps_folder / "seen.json").read_text()))
        (etcd,) = [process for process in job.processes() if process.name() == "etcd"]
        assert [one.laddr for one in etcd.net_connections("tcp") if one.status == psutil.CONN_LISTEN] == []
        assert Path(etcd.cwd()).stat().st_mode & 0o777 == 0o700
        assert [node["node"] for node in job.status()["nodes"]] == ["a"]
        assert "closed: its store is on a private socket" in job.cli("status").stdout
        job.stop_at(1)
        assert job.exit_codes() == {"a": 0}


def secret_file(path: Path, letter: str) -> str:
    path.write_text(letter * 32)
    path.chmod(0o600)
    return f"--secret-file={path}"


def test_a_job_with_a_secret_gives_nothing_to_others(tmp_path: Path) -> None:
    """Two nodes over TLS; the store's two ports answer nobody else; who has another secret or none is told so."""
    (tmp_path / "script.py").write_text(SCRIPT)
    right, wrong = secret_file(tmp_path / "right", "r"), secret_file(tmp_path / "wrong", "w")
    endpoints = free_endpoints(1)
    host, port = split_endpoint(endpoints[0])
    job = Job(tmp_path, endpoints, "etcd-embedded", script=(str(tmp_path / "script.py"),), nnodes="2")
    with job:
        job.start("a", "b", options=(right,))
        until((job.steps_folder / "seen.json").exists, "a world of two")
        for taken in (port, port + 1):
            assert asyncio.run(secret_at(host, taken)) == Secret(b"r" * 32).fingerprint
            with socket.create_connection((host, taken), timeout=30) as connection:
                connection.sendall(b"GET /version HTTP/1.0\r\nHost: localhost\r\n\r\n")
                assert b"etcdserver" not in connection.recv(4096)
            with pytest.raises(StoreError):
                asyncio.run(read_all([f"{host}:{taken}"], None, 2.0))
            with pytest.raises(StoreError):
                asyncio.run(read_all([f"{host}:{taken}"], identity_of(Secret(b"w" * 32)), 2.0))
        token = Secret(b"r" * 32).token(JobId(job.name))
        assert token.encode() not in asyncio.run(read_all(endpoints, identity_of(Secret(b"r" * 32))))
        said: dict[str, str] = {}
        for name, options in (("c", (wrong,)), ("d", ())):
            job.start(name, options=options)
            assert job.nodes.pop(name).exit_code() == ExitCode.USAGE
            said[name] = (tmp_path / f"{job.name}-{name}-{2 + len(said)}.log").read_text()
        theirs = f"the job at {endpoints[0]} has a secret with the fingerprint {Secret(b'r' * 32).fingerprint}"
        assert f"{theirs}, and the one given here has {Secret(b'w' * 32).fingerprint}" in said["c"]
        assert f"{theirs}, and none is given here" in said["d"]
        for command in ("status", "stop"):
            assert "has a secret" in job.cli(command).stderr
        told = json.loads(job.cli("status", "--json", right).stdout)
        assert len(told["nodes"]) == 2
        assert told["access"].endswith(
            f"holders of its secret (fingerprint {Secret(b'r' * 32).fingerprint}) can access it"
        )
        job.stop_at(1)
        assert job.exit_codes() == {"a": 0, "b": 0}


async def read_all(endpoints: list[str], identity: Identity | None, limit_s: float = 60.0) -> bytes:
    store = EtcdStore(endpoints, request_timeout_s=limit_s, tls=identity)
    try:
        return b" ".join(entry.value for entry in (await store.read("/edl/")).entries)
    finally:
        await store.close()
