"""Access to an etcd: login by user and password, and TLS."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from edl.adapters.etcd import EtcdStore, EtcdTls
from edl.adapters.etcd_lease import EtcdLeases
from edl.adapters.etcd_rpc import rpc_pb2, rpc_pb2_grpc
from edl.adapters.etcd_server import EtcdMember, find_binary
from edl.errors import StoreRefused, StoreUnavailable
from edl.ports import Put
from tests.process.etcd_fixture import keys_seen, kill, patient_store, persistently, run
from tests.process.free_ports import free_endpoints
from tests.process.harness import lone_member


async def enable_login(member: EtcdMember, password: str) -> None:
    store = patient_store(member.endpoint)
    await store.write([Put("/j/a", b"1")])
    auth = rpc_pb2_grpc.AuthStub((await store._connections.pick(None)).channel)
    await auth.UserAdd(rpc_pb2.AuthUserAddRequest(name="root", password=password))
    await auth.RoleAdd(rpc_pb2.AuthRoleAddRequest(name="root"))
    await auth.UserGrantRole(rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
    await auth.AuthEnable(rpc_pb2.AuthEnableRequest())
    await store.close()


def test_login_by_user_and_password(tmp_path: Path) -> None:
    async def body() -> None:
        member = await lone_member(tmp_path)
        store = patient_store(member.endpoint, user="root", password="right")
        await store.read("/j/")  # a user is no harm where none is needed
        await enable_login(member, "right")
        after = (await store.read("/j/")).revision
        watch = asyncio.ensure_future(keys_seen(store, "/j/", after, "2"))
        await store.write([Put("/j/1", b"")])
        lease = await store.grant_lease(5)
        assert await store.renew_lease(lease) == 5.0
        beside = EtcdLeases([member.endpoint], 2.0, user="root", password="right")
        assert await asyncio.to_thread(beside.renew, lease)
        await store.revoke_lease(lease)
        assert not await asyncio.to_thread(beside.renew, lease)
        beside.close()
        wrong = EtcdLeases([member.endpoint], 2.0, user="root", password="wrong")
        assert not await asyncio.to_thread(wrong.renew, await store.grant_lease(5))
        wrong.close()
        kill(member)  # which forgets the tokens it gave out
        await member.wait_exit()
        member.start()
        await persistently(lambda: store.write([Put("/j/2", b"")]))
        assert await watch == ["1", "2"]
        await store.close()
        await member.stop(0)

    run(body())


@pytest.mark.parametrize(("user", "password"), [("root", "wrong"), ("nobody", "right"), (None, None)])
def test_wrong_credentials_are_refused_at_once(tmp_path: Path, user: str | None, password: str | None) -> None:
    async def body() -> None:
        member = await lone_member(tmp_path)
        await enable_login(member, "right")
        store = patient_store(member.endpoint, user=user, password=password)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.read("/j/"),
            lambda: store.write([Put("/j/a", b"")]),
            lambda: keys_seen(store, "/j/", 1, "never"),
        ]
        for call in calls:
            with pytest.raises(StoreRefused, match="Check the user name and password"):
                await asyncio.wait_for(call(), 30)
        await store.close()
        await member.stop(0)

    run(body())


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return str(certificate), str(key)


def test_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "right")
    other, _ = make_certificate(tmp_path, "other")
    endpoint, peer, nobody = free_endpoints(3)
    urls = [f"--listen-client-urls=https://{endpoint}", f"--advertise-client-urls=https://{endpoint}"]
    urls += [f"--listen-peer-urls=http://{peer}", f"--initial-advertise-peer-urls=http://{peer}"]
    flags = [f"--initial-cluster=default=http://{peer}", f"--cert-file={certificate}", f"--key-file={key}"]
    flags += [f"--data-dir={tmp_path / 'data'}", "--log-level=error", "--unsafe-no-fsync"]
    etcd = subprocess.Popen([find_binary(), *urls, *flags], stderr=subprocess.DEVNULL)

    async def body() -> None:
        store = patient_store(endpoint, tls=EtcdTls(certificate))
        await persistently(lambda: store.write([Put("/j/a", b"")]))
        lease = await store.grant_lease(5)
        # The first address is nobody's: the second one has half of the time.
        for addresses, trusted in (([nobody, endpoint], certificate), ([endpoint], other)):
            beside = EtcdLeases(addresses, 4.0, EtcdTls(trusted))
            assert await asyncio.to_thread(beside.renew, lease) is (trusted == certificate)
            beside.close()
        await store.close()
        store = EtcdStore([endpoint], tls=EtcdTls(other), request_timeout_s=0.5)
        with pytest.raises(StoreRefused, match="no TLS connection"):
            await store.read("/j/")
        await store.close()
        store = EtcdStore([endpoint], tls=EtcdTls(str(tmp_path / "missing.pem")))
        with pytest.raises(StoreRefused, match=r"cannot read the CA file .*missing\.pem"):
            await store.read("/j/")
        store = EtcdStore([endpoint], request_timeout_s=0.5)
        with pytest.raises(StoreUnavailable):
            await store.read("/j/")
        await store.close()

    try:
        run(body())
    finally:
        etcd.kill()
        etcd.wait()


def test_tls_against_an_etcd_without_is_named(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path, "right")

    async def body() -> None:
        member = await lone_member(tmp_path)
        store = EtcdStore([member.endpoint], request_timeout_s=1.0, tls=EtcdTls(certificate))
        try:
            with pytest.raises(StoreUnavailable, match="The server there does not speak TLS"):
                await store.read("a")
        finally:
            await store.close()
            await member.stop()

    run(body())
