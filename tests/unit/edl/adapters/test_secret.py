"""A job's secret: what is derived from it, which files are refused, and what its certificates are good for."""

from __future__ import annotations

import asyncio
import os
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

import grpc.aio
import pytest

from edl.adapters.etcd import EtcdStore
from edl.adapters.identity import FIRST_DAY, Identity, identity_of, secret_at
from edl.adapters.secret_file import secret_from
from edl.adapters.transport import MasterClient, MasterServer
from edl.errors import SettingError, StoreError, StoreRefused, StoreUnavailable
from edl.types import JobId
from edl.wire.secret import Secret, described, stored_token, token_of

MINE, OTHER, JOB = Secret(b"m" * 32), Secret(b"o" * 32), JobId("job")


def kept(path: Path, text: str = "s" * 32, mode: int = 0o600) -> str:
    path.write_text(text + "\n")
    path.chmod(mode)
    return str(path)


def test_each_use_and_each_job_has_a_key_of_its_own() -> None:
    keys = {MINE.token(JOB), MINE.token(JobId("job2")), OTHER.token(JOB), MINE.derive("x").hex(), MINE.fingerprint}
    keys |= {MINE.of_readers(JOB), MINE.of_readers(JobId("job2")), OTHER.of_readers(JOB)}
    assert len(keys) == 8 and MINE.token(JOB) == Secret(b"m" * 32).token(JOB)
    assert MINE.derive("x", 48)[:32] == MINE.derive("x", 32) and "m" * 8 not in repr(MINE)


def test_the_store_holds_a_fingerprint_and_no_token() -> None:
    stored = stored_token(MINE)
    assert MINE.token(JOB).encode() not in stored and MINE.fingerprint in described(stored)
    assert token_of(stored, MINE, JOB) == MINE.token(JOB)
    assert token_of(stored, OTHER, JOB) is None and token_of(stored, None, JOB) is None
    without = stored_token(None)
    assert token_of(without, None, JOB) == without.decode() and token_of(without, MINE, JOB) is None


def test_a_secret_out_of_a_file_or_out_of_the_environment(tmp_path: Path) -> None:
    file = kept(tmp_path / "f")
    assert secret_from(file, "", "job") == (Secret(b"s" * 32), file)
    assert secret_from("", "s" * 32, "job") == (Secret(b"s" * 32), "")
    assert secret_from("", "", "job") == (None, "")
    with pytest.raises(SettingError, match="EDL_SECRET is set as well"):
        secret_from(file, "s" * 32, "job")


@pytest.mark.parametrize(("mode", "text", "complaint"), [
    (0o640, "s" * 32, r"others may open it \(mode 0640\).*chmod 600"),
    (0o604, "s" * 32, r"others may open it \(mode 0604\).*chmod 600"),
    (0o600, "short", "holds 5 bytes, at least 16"),
])  # fmt: skip
def test_files_that_are_refused(tmp_path: Path, mode: int, text: str, complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        secret_from(kept(tmp_path / "f", text, mode), "", "job")


def test_a_file_of_somebody_else_and_one_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="No such file"):
        secret_from(str(tmp_path / "none"), "", "job")
    file, mine = kept(tmp_path / "f"), os.getuid()
    os.chown(file, mine + 1, -1) if mine == 0 else monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(SettingError, match="belongs to another user"):
        secret_from(file, "", "job")


def test_the_first_launcher_makes_the_shared_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, file = secret_from("shared", "", "job")
    assert first is not None and secret_from("shared", "", "job") == (first, file)
    assert Path(file) == tmp_path / ".edl" / "job.secret" and Path(file).stat().st_mode & 0o777 == 0o600
    assert secret_from("shared", "", "other")[0] != first
    assert secret_from("shared", "", "job", create=False) == (first, file)
    for job, why in (("third", "there is no .*third.secret"), ("", "Name the job with --rdzv-id")):
        with pytest.raises(SettingError, match=why):  # a command would use one that nobody else has
            secret_from("shared", "", job, create=False)
    assert sorted(os.listdir(".edl")) == ["job.secret", "other.secret"]


def test_only_holders_of_the_secret_get_through_the_handshake() -> None:
    """Each process signs for itself; clocks mean nothing; what the port's secret is can be told from outside."""
    here, there, stranger = identity_of(MINE, ["h"]), identity_of(MINE), identity_of(OTHER)
    assert here.ca != there.ca or here.key != there.key

    async def body() -> None:
        server = MasterServer(lambda: "token", identity=here)
        port = await server.start("127.0.0.1")
        try:
            for identity in (there, stranger, None):
                client = MasterClient("127.0.0.1", port, "token", 5.0, identity)
                with pytest.raises(grpc.aio.AioRpcError) as found:
                    await client.status()
                assert ("not the Master" in str(found.value.details())) == (identity is there)
                await client.close()
            assert await secret_at("127.0.0.1", port) == MINE.fingerprint != OTHER.fingerprint
        finally:
            await server.stop()

    asyncio.run(body())


def test_plain_servers_have_no_secret() -> None:
    async def body() -> None:
        server = MasterServer(lambda: "token")
        port = await server.start("127.0.0.1")
        assert await secret_at("127.0.0.1", port) is None
        await server.stop()
        assert await secret_at("127.0.0.1", port) is None

    asyncio.run(body())


def test_certificates_hold_for_longer_than_any_job() -> None:
    from cryptography import x509

    identity = identity_of(MINE, ["h", "192.0.2.1", "fd00::1"])
    for data in (identity.ca, identity.server, identity.client):
        certificate = x509.load_pem_x509_certificate(data)
        assert certificate.not_valid_before_utc.year == 2000 and certificate.not_valid_after_utc.year == 2099
    assert isinstance(identity.context(), ssl.SSLContext)


@pytest.mark.parametrize(("uid", "gid", "mode", "taken"), [
    (0, 2000, 0o440, True),
    (0, 2000, 0o640, True),
    (0, 2001, 0o440, False),
    (0, 0, 0o440, False),
    (0, 2000, 0o460, False),
    (0, 2000, 0o444, False),
    (1000, 2000, 0o440, False),
])  # fmt: skip
def test_a_kubernetes_secret_for_the_group_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, gid: int, mode: int, taken: bool
) -> None:
    file = kept(tmp_path / "f")
    found = os.stat_result((0o100000 | mode, 1, 1, 1, uid, gid, 33, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda descriptor: found)
    for name, value in {"getuid": 1000, "geteuid": 1000, "getegid": 1000, "getgroups": [0, 1000, 2000]}.items():
        monkeypatch.setattr(os, name, lambda value=value: value)
    if taken:
        assert secret_from(file, "", "job")[0] == Secret(b"s" * 32)
    else:
        with pytest.raises(SettingError, match="others may open it"):
            secret_from(file, "", "job")


def test_a_certificate_that_ends_during_the_job_is_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start it is an error that ends the launcher; a job that runs trains on, and says why the store is away."""
    valid = identity_of(MINE)
    with monkeypatch.context() as then:
        then.setattr("edl.adapters.identity.LAST_DAY", FIRST_DAY + timedelta(days=1))
        ended = identity_of(MINE)

    async def serving(identity: Identity, port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        bound = server.add_secure_port(f"127.0.0.1:{port}", identity.of_server())
        await server.start()
        return server, bound

    async def body() -> None:
        server, port = await serving(valid, 0)
        running = EtcdStore([f"127.0.0.1:{port}"], request_timeout_s=0.5, tls=valid)
        with pytest.raises(
            StoreError, match=r"(?i)not found|unimplemented"
        ):  # it is no etcd, but the connection stands
            await running.read("/x")
        await server.stop(0)
        server, _ = await serving(ended, port)
        starting = EtcdStore([f"127.0.0.1:{port}"], request_timeout_s=0.5, tls=valid)
        with pytest.raises(StoreRefused, match=r"no TLS connection.*expired"):
            await starting.read("/x")

        said = ""
        while "The certificates were accepted before: has one expired" not in said:  # first the old connection breaks
            with pytest.raises(StoreUnavailable) as found:
                await running.read("/x")
            said = str(found.value)
        for store in (running, starting):
            await store.close()
        await server.stop(0)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_clock_that_is_off_by_an_hour_or_a_year_changes_nothing() -> None:
    from cryptography import x509

    for certificate in (
        x509.load_pem_x509_certificate(data) for data in (identity_of(MINE).ca, identity_of(MINE).server)
    ):
        for off in (timedelta(hours=1), timedelta(days=366)):
            now = datetime.now(timezone.utc)
            assert certificate.not_valid_before_utc < now - off and now + off < certificate.not_valid_after_utc


def test_a_key_needs_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full one, members that answer would seem to be silent."""
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    identity = identity_of(Secret(b"x" * 32))
    assert identity.context().get_ca_certs()
