"""Embedded etcd members as processes: they fail, come back, lose their disks, and meet other programs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from edl.adapters import etcd_cluster
from edl.adapters.claims import claim
from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_cluster import IDENTIFY_S, start_local_member, start_private_member
from edl.adapters.etcd_plan import plan_members
from edl.adapters.etcd_server import EtcdMember, find_binary
from edl.adapters.runtime_folder import runtime_folder, socket_folder
from edl.errors import PortInUse, SettingError, StoreError, StoreUnavailable
from edl.master.guarded import GuardedStore
from edl.ports import Guard, Put
from edl.testing.clock import FakeClock
from edl.types import FencingToken
from tests.process.etcd_fixture import ROOT, keys_seen, kill, patient_store, persistently, run, start, three_members
from tests.process.free_ports import free_endpoints
from tests.process.harness import lone_member
from tests.support.relay import start_relay


def test_the_cluster_goes_on_without_one_member_and_takes_it_back(tmp_path: Path) -> None:
    async def body() -> None:
        async with three_members(tmp_path) as (endpoints, members):
            store = EtcdStore(endpoints, request_timeout_s=1.0)
            after = (await persistently(lambda: store.read("/j/"))).revision
            watch = asyncio.ensure_future(keys_seen(store, "/j/", after, "last"))
            numbers = itertools.count()

            async def put_next() -> str:
                key = str(next(numbers))
                # Repeated with a condition, so that it happens once even when an answer is lost.
                await persistently(lambda: store.write([Put(f"/j/{key}", b"")]))
                return key

            wanted = [await put_next()]
            lease = await persistently(lambda: store.grant_lease(10))
            for victim in members:  # the leader is one of them
                kill(victim)
                await victim.wait_exit()
                wanted.append(await put_next())
                assert await persistently(lambda: store.renew_lease(lease)) == 10.0
                back = await start(endpoints, tmp_path)
                assert back.endpoint == victim.endpoint
                members[members.index(victim)] = back
                await back.wait_ready(60)
                wanted.append(await put_next())
            await persistently(lambda: store.write([Put("/j/last", b"")]))
            seen = await watch
            # A write whose answer was lost may have happened twice; each change is told once, in order.
            assert list(dict.fromkeys(seen)) == [*wanted, "last"]
            there = await persistently(lambda: store.read("/j/"))
            assert {entry.key for entry in there.entries} == {f"/j/{key}" for key in [*wanted, "last"]}
            await store.close()

    run(body())


def test_a_store_is_reached_that_is_slower_than_the_share_of_a_member(tmp_path: Path) -> None:
    """Three addresses have 0.17 s each of the limit of an embedded store; answers take 0.4 s."""

    async def body() -> None:
        member = await lone_member(tmp_path)
        relays = [await start_relay(int(member.endpoint.rpartition(":")[2]), late_s=0.2) for _ in range(3)]
        store = EtcdStore([f"127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in relays], request_timeout_s=0.5)
        try:
            lease = await persistently(lambda: store.grant_lease(100))
            after = (await persistently(lambda: store.read("/j/"))).revision
            watch = asyncio.ensure_future(keys_seen(store, "/j/", after, "last"))
            assert await persistently(lambda: store.renew_lease(lease)) == 100.0
            await persistently(lambda: store.write([Put("/j/last", b"", lease)], repeatable=True))
            assert await watch == ["last"]
        finally:
            await store.close()
            await member.stop(0)
            for one in relays:
                one.close()

    run(body())


def test_a_member_that_hangs_is_left_by_calls_and_watches(tmp_path: Path) -> None:
    async def body() -> None:
        async with three_members(tmp_path) as (endpoints, members):
            watcher = EtcdStore(endpoints, request_timeout_s=1.0)
            writer = EtcdStore(endpoints[1:], request_timeout_s=1.0)
            after = (await persistently(lambda: watcher.read("/j/"))).revision
            watch = asyncio.ensure_future(keys_seen(watcher, "/j/", after, "2"))
            await persistently(lambda: writer.write([Put("/j/1", b"")]))
            kill(members[0], signal.SIGSTOP)
            try:
                await persistently(lambda: writer.write([Put("/j/2", b"")]))
                while not watch.done():  # any call notices; a node makes one for its lease all the time
                    await persistently(lambda: watcher.read("/j/"))
                    await asyncio.wait([watch], timeout=0.05)
                assert list(dict.fromkeys(watch.result())) == ["1", "2"]
            finally:
                kill(members[0], signal.SIGCONT)
            await watcher.close()
            await writer.close()

    run(body())


@pytest.mark.slow
def test_a_write_that_a_frozen_member_carries_out_late_overwrites_nothing(tmp_path: Path) -> None:
    """The request waits in the socket of the member, which knows nothing of the client's time limit. With the election
    key as its only condition, it overwrote the newer value in 2 of 8 tries."""

    async def body() -> None:
        async with three_members(tmp_path) as (endpoints, members):
            store = EtcdStore(endpoints, request_timeout_s=0.5)
            token = FencingToken(await persistently(lambda: store.write([Put("/j/master", b"")])) or 0)
            master = GuardedStore(store, Guard("/j/master", token), "/j/last", FakeClock(), lambda text: None)
            for number in range(10):
                await master.write([Put("/j/value", b"%d old" % number)])
                asked = store._connections._endpoints[store._connections._current].address
                frozen = members[endpoints.index(asked)]
                kill(frozen, signal.SIGSTOP)
                try:
                    await master.write([Put("/j/value", b"%d new" % number)])
                    await master.write([Put("/j/value", b"%d newest" % number)])
                finally:
                    kill(frozen, signal.SIGCONT)
                own = EtcdStore([asked], request_timeout_s=1.0)
                await persistently(functools.partial(own.read, "/j/"))  # by then the member has done what it was asked
                await own.close()
                [entry] = (await persistently(lambda: store.read("/j/value"))).entries
                assert entry.value == b"%d newest" % number
            await store.close()

    run(body())


def test_without_a_majority_calls_fail_and_afterwards_all_is_there(tmp_path: Path) -> None:
    async def body() -> None:
        async with three_members(tmp_path) as (endpoints, members):
            store = EtcdStore(endpoints, request_timeout_s=0.5)
            after = await persistently(lambda: store.write([Put("/j/1", b"")]))
            watch = asyncio.ensure_future(keys_seen(store, "/j/", after, "2"))
            for member in members[:2]:
                kill(member)
                await member.wait_exit()
            with pytest.raises(StoreUnavailable):
                while True:  # the last member may not have noticed yet
                    await store.read("/j/")
            with pytest.raises(StoreUnavailable, match="More than half of the 3 members"):
                await members[2].wait_ready(0.3)
            members[0] = await start(endpoints, tmp_path)
            await members[0].wait_ready(60)
            await persistently(lambda: store.write([Put("/j/2", b"")]))
            assert list(dict.fromkeys(await watch)) == ["2"]
            assert len((await persistently(lambda: store.read("/j/"))).entries) == 2
            await store.close()

    run(body())


def test_a_member_that_lost_its_disk_is_replaced(tmp_path: Path) -> None:
    async def body() -> None:
        async with three_members(tmp_path) as (endpoints, members):
            store = EtcdStore(endpoints, request_timeout_s=1.0)
            await persistently(lambda: store.write([Put("/j/kept", b"")]))
            for index in range(2):  # twice: also a member that was added later can be replaced
                kill(members[0])
                await members[0].wait_exit()
                members[0].discard()
                members[0] = await start(endpoints, tmp_path)
                assert members[0].endpoint == endpoints[0]
                await members[0].wait_ready(60)
                await persistently(functools.partial(store.write, [Put(f"/j/{index}", b"")]))
            alone = patient_store(endpoints[0])
            assert [entry.key for entry in (await alone.read("/j/")).entries] == ["/j/0", "/j/1", "/j/kept"]
            await alone.close()
            await store.close()

    run(body())


def test_a_member_that_lost_its_disk_waits_for_a_majority(tmp_path: Path) -> None:
    async def body() -> None:
        async with three_members(tmp_path) as (endpoints, members):
            for member in members[:2]:
                kill(member)
                await member.wait_exit()
            members[0].discard()
            with pytest.raises(StoreUnavailable, match="has no data") as refused:
                await start_local_member(endpoints, tmp_path, timeout_s=0.5)
            assert str(members[2].data_dir) in str(refused.value)

    run(body())


def test_data_of_an_earlier_run_are_not_used_in_a_later_one(tmp_path: Path) -> None:
    """The first node has left a job that went on, so its data are still there when a new run begins."""

    async def the_second(endpoints: Sequence[str]) -> str:
        store = patient_store(*endpoints)
        try:
            return (await store.read("/j/run")).entries[0].value.decode()
        finally:
            await store.close()

    async def body() -> None:
        async with three_members(tmp_path) as (endpoints, members):
            store = EtcdStore(endpoints, request_timeout_s=1.0)
            await persistently(lambda: store.write([Put("/j/run", b"1")]))
            await store.close()
            for member in members:
                member.note_run("1")
                kill(member)
                await member.wait_exit()
            for index in (1, 2):
                members[index].discard()
            log: list[str] = []
            for index in (1, 2):
                members[index] = EtcdMember(members[index].plan, tmp_path)
                members[index].start()
            store = EtcdStore(endpoints, request_timeout_s=1.0)
            await persistently(lambda: store.write([Put("/j/run", b"2")]))
            first = await start_local_member(endpoints, tmp_path, run_at=the_second, log=log.append)
            assert first is not None and first.endpoint == endpoints[0]
            members[0] = first
            await first.wait_ready(60)
            assert "earlier run" in log[0]
            alone = patient_store(first.endpoint)
            assert [entry.value for entry in (await alone.read("/j/run")).entries] == [b"2"]
            await alone.close()
            await store.close()

    run(body())


def test_the_world_of_a_very_large_job_fits_into_a_write(tmp_path: Path) -> None:
    async def body() -> None:
        member = await lone_member(tmp_path)
        store = patient_store(member.endpoint)
        try:
            await store.write([Put("/j/world", b"x" * (6 << 20))])
            assert len((await store.read("/j/")).entries[0].value) == 6 << 20
        finally:
            await store.close()
            await member.stop(0)

    run(body())


def test_data_of_members_that_are_not_in_the_endpoints_is_refused(tmp_path: Path) -> None:
    """A shorter list than before, with the data of the longer one: etcd alone would wait for a majority for ever."""

    async def body() -> None:
        async with three_members(tmp_path) as (endpoints, members):
            for member in members:
                kill(member)
                await member.wait_exit()
            with pytest.raises(SettingError, match="store with 3 members, of which 2 are not in this list") as refused:
                await start_local_member(endpoints[:1], tmp_path)
            assert str(members[0].data_dir) in str(refused.value)
            pair = [await start(endpoints[:2], tmp_path) for _ in range(2)]
            await asyncio.gather(*(member.wait_ready(60) for member in pair))
            await asyncio.gather(*(member.stop(0) for member in pair))

    run(body())


def test_launchers_that_start_together_share_the_members_out(tmp_path: Path) -> None:
    async def body() -> None:
        endpoints = free_endpoints(3)
        started = await asyncio.gather(*(start_local_member(endpoints, tmp_path) for _ in range(5)))
        members = [member for member in started if member is not None]
        try:
            assert sorted(member.endpoint for member in members) == sorted(endpoints)
            assert started.count(None) == 2
            await asyncio.gather(*(member.wait_ready(60) for member in members))
        finally:
            await asyncio.gather(*(member.stop(0) for member in members))

    run(body())


def test_no_name_that_others_can_take_keeps_a_member_from_starting(tmp_path: Path) -> None:
    async def body() -> None:
        endpoints = free_endpoints(1)
        port = plan_members(endpoints)[0].client_port
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.bind(f"\0edl-etcd-{port}")
            member = await start(endpoints, tmp_path)
            await member.stop(0)

    run(body())


def test_a_member_elsewhere_is_only_connected_to(tmp_path: Path) -> None:
    async def body() -> None:
        assert await start_local_member(["192.0.2.1:2379", "no-such-host.invalid:2379"], tmp_path) is None
        assert os.listdir(tmp_path) == []

    run(body())


@pytest.mark.parametrize("offset", [0, 1], ids=["client port", "peer port"])
def test_a_port_of_another_program_is_named(tmp_path: Path, offset: int) -> None:
    async def body() -> None:
        plan = plan_members(free_endpoints(1))[0]
        taken = plan.client_port + offset
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", taken)
        with pytest.raises(PortInUse, match=f"port {taken} on 127.0.0.1 .* other than etcd"):
            await start_local_member([plan.endpoint], tmp_path)
        server.close()
        await server.wait_closed()

    run(body())


def test_a_program_that_does_not_answer_is_not_called_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be an etcd on a busy host."""
    monkeypatch.setattr(etcd_cluster, "SILENT_S", 3.0)

    async def body() -> None:
        plan = plan_members(free_endpoints(1))[0]
        late = r"has not answered for 3 s\. If it is etcd on a busy host, start"
        with socket.create_server(("127.0.0.1", plan.peer_port)), pytest.raises(PortInUse, match=late):
            await start_local_member([plan.endpoint], tmp_path)

    run(body())


def test_an_etcd_that_answers_late_is_recognised(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.5 * IDENTIFY_S)
        body = b'{"etcdserver": "3.5.1"}'
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async def body() -> None:
        plan = plan_members(free_endpoints(1))[0]
        async with await asyncio.start_server(answer, "127.0.0.1", plan.peer_port):
            assert await start_local_member([plan.endpoint], tmp_path) is None, "others only connect"

    run(body())


def test_a_member_that_another_launcher_is_slow_to_start_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_cluster, "CLAIM_S", 0.1)

    async def body() -> None:
        first, second = plan_members(free_endpoints(2))
        lock = runtime_folder() / f"etcd-{first.client_port}-{etcd_cluster._network()}.lock"
        async with claim(lock, 1.0):
            member = await start_local_member([first.endpoint, second.endpoint], tmp_path)
        assert member is not None
        try:
            assert member.endpoint == second.endpoint
        finally:
            await member.stop(0)

    run(body())


def test_a_member_dies_with_its_launcher_but_not_of_ctrl_c(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys, time\n"
        "from tests.process.harness import lone_member\n"
        "member = asyncio.run(lone_member(pathlib.Path(sys.argv[1]), endpoint=sys.argv[2]))\n"
        "print(member.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    (endpoint,) = free_endpoints(1)
    launcher = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    with launcher:
        assert launcher.stdout is not None
        etcd = psutil.Process(int(launcher.stdout.readline()))
        assert os.getsid(etcd.pid) == etcd.pid != os.getsid(launcher.pid)
        assert etcd.name() == "etcd", "the wrapper has become etcd"
        launcher.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        etcd.wait(timeout=60)

    async def body() -> None:
        store = EtcdStore([endpoint], request_timeout_s=0.2)
        with pytest.raises(StoreUnavailable, match=f"no answer from etcd at {endpoint} .*--rdzv-endpoint"):
            await store.read("/")
        await store.close()

    run(body())


def listening(pid: int) -> list[str]:
    """Where a process listens: addresses of TCP, paths of unix sockets."""
    tcp = [str(one.laddr) for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    held = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    accepting = [words[7] for words in sockets if len(words) == 8 and words[3] == "00010000"]  # SO_ACCEPTCON
    of_it = {words[7] for words in sockets if len(words) == 8 and f"socket:[{words[6]}]" in held}
    return tcp + sorted(of_it.intersection(accepting))


def test_a_private_member_listens_on_sockets_alone_and_is_started_again_on_them(tmp_path: Path) -> None:
    async def body() -> None:
        folder = socket_folder()
        member = await start_private_member(tmp_path, folder)
        store = patient_store(member.endpoint)
        assert member.pid is not None and listening(member.pid) == ["client:0", "peer:0"]
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
        await store.write([Put("/j/a", b"1")])
        os.kill(member.pid, signal.SIGKILL)
        await member.wait_exit()
        member.start()  # the sockets of the killed one are still there
        await member.wait_ready(60)
        assert [entry.value for entry in (await store.read("/j/")).entries] == [b"1"]
        assert await start_local_member([member.endpoint], tmp_path) is None, "others only connect"
        await store.close()
        await member.stop()
        member.discard()
        shutil.rmtree(folder)
        assert os.listdir(tmp_path) == []

    run(body())


def asked(endpoint: str, path: str, body: str = "", **fields: str) -> str:
    """The head of the answer that a browser gets, or "" for none."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        method = "POST" if body else "GET"
        connection.sendall(f"{method} {path} HTTP/1.0\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return connection.recv(4096).decode().partition("\r\n\r\n")[0]


def test_a_member_has_nothing_for_pages_in_a_browser(tmp_path: Path) -> None:
    async def body() -> None:
        member = await lone_member(tmp_path)
        page = await asyncio.to_thread(
            asked, member.endpoint, "/version", Host="127.0.0.1", Origin="http://page.example"
        )
        assert " 200 " in page and "Access-Control" not in page
        assert " 421 " in await asyncio.to_thread(asked, member.endpoint, "/version", Host="rebound.example")
        posted = await asyncio.to_thread(
            asked, member.endpoint, "/v3/kv/range", '{"key": "AA==", "range_end": "AA=="}', Host="127.0.0.1"
        )
        assert " 404 " in posted
        await member.stop()

    run(body())


def test_a_lone_member_stops_at_once_keeps_its_data_and_can_be_discarded(tmp_path: Path) -> None:
    async def body() -> None:
        endpoint = free_endpoints(1)
        first = await start(endpoint, tmp_path)
        store = patient_store(*endpoint)
        await store.write([Put("/j/a", b"1")])
        await store.close()
        await first.stop()
        assert not first.running and first.has_data()
        second = await start(endpoint, tmp_path)  # the same data
        store = patient_store(*endpoint)
        assert [entry.value for entry in (await store.read("/j/")).entries] == [b"1"]
        lease = await store.grant_lease(1)
        assert await store.renew_lease(lease) == 1.0, "the shortest lease is a second"
        await store.close()
        await second.stop()
        second.discard()
        assert os.listdir(tmp_path) == []

    run(body())


def test_a_store_that_lost_its_data_is_noticed_by_a_watch(tmp_path: Path) -> None:
    async def body() -> None:
        endpoint = free_endpoints(1)
        member = await start(endpoint, tmp_path)
        store = EtcdStore(endpoint, request_timeout_s=1.0)
        after = max([await persistently(lambda: store.write([Put("/j/a", b"")])) for _ in range(3)])
        watch = asyncio.ensure_future(keys_seen(store, "/j/", after, "never"))
        await member.stop(0)
        member.discard()
        member = await start(endpoint, tmp_path)
        with pytest.raises(StoreError, match="lost its data"):
            await watch
        await store.close()
        await member.stop(0)

    run(body())


def test_an_etcd_that_does_not_start_says_why(tmp_path: Path) -> None:
    async def body() -> None:
        member = EtcdMember(plan_members(["192.0.2.1:2379"])[0], tmp_path)  # not an address of this host
        member.start()
        with pytest.raises(StoreError, match=r"ended with status 1\. The end of its log[^$]*cannot assign"):
            await member.wait_ready(60)
        assert await member.wait_exit() == 1

    run(body())


# --- plan and binary, which need no process --------------------------------------------------------------------------


def test_the_plan_is_the_same_in_whatever_order_the_endpoints_come() -> None:
    plans = plan_members(["h2:2379", "h1:2379", "[fd00::1]:2379"])
    assert [plan.endpoint for plan in plans] == ["h2:2379", "h1:2379", "[fd00::1]:2379"]
    assert {plan.peer_port for plan in plans} == {2380}
    assert (
        len({plan.initial_cluster for plan in (*plans, *plan_members(["h1:2379", "[fd00::1]:2379", "h2:2379"]))}) == 1
    )
    assert "fd00--1-2379=http://[fd00::1]:2380" in plans[0].initial_cluster.split(",")


def test_peer_ports_keep_clear_of_client_ports() -> None:
    plans = plan_members(["h:1000", "h:1001", "h:1002", "h:1004"])
    assert [plan.peer_port for plan in plans] == [1005, 1006, 1007, 1009]


@pytest.mark.parametrize(
    ("endpoints", "complaint"),
    [
        ([], "at least one"),
        (["h"], "not an address"),
        (["h:"], "not an address"),
        (["fd00::1:2379"], "not an address"),
        (["h:0"], "from 1 to 65535"),
        (["h:65536"], "from 1 to 65535"),
        (["h:65535"], "needs port 65536"),
        (["h:1", "g:1", "h:1"], "h:1 is listed more than once"),
    ],
)
def test_endpoints_that_make_no_sense(endpoints: list[str], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        plan_members(endpoints)


def test_a_real_etcd_on_the_path_is_preferred_and_a_script_is_not(tmp_path: Path) -> None:
    script, real = tmp_path / "script", tmp_path / "real"
    for folder, content in ((script, b"#!/bin/sh\n"), (real, b"\x7fELF")):
        folder.mkdir()
        (folder / "etcd").write_bytes(content)
        (folder / "etcd").chmod(0o755)
    assert find_binary([str(script), str(real)]) == str(real / "etcd")
    assert find_binary([str(script)]).endswith("etcdbin/etcd")


def test_an_etcd_that_is_too_old_is_passed_over_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etcd").symlink_to(sys.executable)
    monkeypatch.setattr("edl.adapters.etcd_server.version_of", lambda binary: (3, 4, 23))
    assert find_binary([str(tmp_path)]).endswith("etcdbin/etcd")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"etcd is etcd 3\.4\.23, and a job's own store needs 3\.5 or newer"):
        find_binary([str(tmp_path)])


def test_a_folder_of_the_path_that_may_not_be_searched_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel tells it to all but root."""
    searched = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return searched(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert find_binary([str(tmp_path / "closed")]).endswith("etcdbin/etcd")
