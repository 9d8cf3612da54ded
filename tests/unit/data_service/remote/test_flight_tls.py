"""Remote readers of a job with a secret: mutual TLS, and no data for clients without credentials."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from pyarrow import ipc

from data_service.formats import FormatReader, open_reader
from data_service.manifest import ShardRef
from data_service.remote.client import Pool, RemoteReader
from data_service.remote.flight import ReaderServer, Ticket
from data_service.remote.tls import client_arguments
from edl.adapters.identity import NAME, identity_of
from edl.types import JobId
from edl.wire.secret import Secret

HOST, BEARER, RECORDS, LONG_S = "127.0.0.1", "of this reader alone", 500, 30.0
SECRET = Secret(b"m" * 32)
OURS = SECRET.of_readers(JobId("job"))
THEIRS = {
    "of another job with the same secret": SECRET.of_readers(JobId("job2")),
    "of another secret": Secret(b"o" * 32).of_readers(JobId("job")),
}


@contextmanager
def serving(authority: str) -> Iterator[ReaderServer]:
    server = ReaderServer(HOST, 0, BEARER, authority=authority)
    try:
        yield server
    finally:
        assert server.drain(LONG_S)


@contextmanager
def reading(port: int, authority: str, local: FormatReader | None = None) -> Iterator[tuple[RemoteReader, list[str]]]:
    said: list[str] = []
    pool = Pool()
    pool.update([["r0", HOST, port, BEARER]], authority)
    policy = "only" if local is None else "prefer"
    try:
        yield RemoteReader(pool, "set", "ipc", local=local, policy=policy, say=said.append, timeout_s=LONG_S), said
    finally:
        pool.close()


@pytest.fixture
def shard(tmp_path: Path) -> ShardRef:
    path, table = tmp_path / "data.ipc", pa.table({"word": [f"record {n}" for n in range(RECORDS)]})
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return ShardRef(0, str(path), 0, RECORDS, RECORDS)


def test_who_holds_the_readers_authority_is_served(shard: ShardRef) -> None:
    with serving(OURS) as server, reading(server.port, OURS) as (trainer, said):
        assert trainer.read(shard).equals(open_reader("ipc").read(shard))
        assert (trainer.counts.remote_shards, said) == (1, [])


@pytest.mark.parametrize("authority", ["", *THEIRS.values()], ids=["plain", *THEIRS])
def test_a_trainer_of_others_reads_nothing_though_it_knows_the_readers_own_secret(
    shard: ShardRef, authority: str
) -> None:
    with serving(OURS) as server, reading(server.port, authority, open_reader("ipc")) as (trainer, said):
        assert trainer.read(shard).num_rows == RECORDS
        assert (trainer.counts.remote_shards, trainer.counts.local_shards) == (0, 1)
        assert "FlightUnavailableError" in said[0]


@pytest.mark.parametrize("authority", ["", *THEIRS.values()], ids=["plain", *THEIRS])
def test_a_trainer_asks_no_reader_that_cannot_prove_that_it_belongs_to_the_job(shard: ShardRef, authority: str) -> None:
    with serving(authority) as server, reading(server.port, OURS, open_reader("ipc")) as (trainer, said):
        assert trainer.read(shard).num_rows == RECORDS
        assert (trainer.counts.remote_shards, trainer.counts.local_shards) == (0, 1)
        assert "FlightUnavailableError" in said[0]


def anonymous(port: int) -> fl.FlightClient:
    """A client that trusts the reader but has no certificate."""
    ours = client_arguments(HOST, port, OURS)
    return fl.FlightClient(**{name: ours[name] for name in ("location", "tls_root_certs", "override_hostname")})


def credulous(port: int) -> fl.FlightClient:
    """A client that verifies no certificate and has none."""
    return fl.FlightClient(f"grpc+tls://{HOST}:{port}", disable_server_verification=True)


def self_made(port: int) -> fl.FlightClient:
    """A client whose certificate has the right name but a foreign signature."""
    own = identity_of(Secret(b"x" * 32))
    ours = {**client_arguments(HOST, port, OURS), "cert_chain": own.client, "private_key": own.key}
    assert ours["override_hostname"] == NAME
    return fl.FlightClient(**ours)


@pytest.mark.parametrize("made", [anonymous, credulous, self_made])
def test_no_call_without_a_certificate_of_the_authority(
    shard: ShardRef, made: Callable[[int], fl.FlightClient]
) -> None:
    headers = [(b"authorization", f"Bearer {BEARER}".encode())]
    ticket = fl.Ticket(Ticket("set", "ipc", 0, shard.file, 0, RECORDS, RECORDS).encode())
    with serving(OURS) as server, made(server.port) as client, pytest.raises(fl.FlightUnavailableError):
        client.do_get(ticket, fl.FlightCallOptions(timeout=LONG_S, headers=headers))


@contextmanager
def tapped(port: int) -> Iterator[tuple[int, bytearray]]:
    """A port that passes one connection on, and what goes over it."""
    heard = bytearray()

    def passed(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                heard.extend(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def both() -> None:
        with listening.accept()[0] as here, socket.create_connection((HOST, port)) as there:
            back = threading.Thread(target=passed, args=(there, here))
            back.start()
            passed(here, there)
            back.join()

    with socket.create_server((HOST, 0)) as listening:
        thread = threading.Thread(target=both, daemon=True)
        thread.start()
        yield listening.getsockname()[1], heard
        thread.join(LONG_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(("authority", "overheard"), [("", True), (OURS, False)], ids=["no secret", "a secret"])
def test_an_eavesdropper_learns_neither_records_nor_the_readers_secret(
    shard: ShardRef, authority: str, overheard: bool
) -> None:
    with serving(authority) as server, tapped(server.port) as (port, heard), reading(port, authority) as (trainer, _):
        assert trainer.read(shard).num_rows == RECORDS
    for what in (BEARER, shard.file, f"record {RECORDS - 1}"):
        assert (what.encode() in heard) == overheard, what


def test_a_worker_that_makes_certificates_imports_no_grpc() -> None:
    """It takes longer than a recovery."""
    program = (
        "import sys; from data_service.remote.tls import client_arguments; "
        f"client_arguments('h', 1, '{OURS}'); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "cryptography.x509" in modules and "grpc" not in modules
