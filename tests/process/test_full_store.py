"""A store without room: jobs train on, say why nothing changes, and go on when there is room again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from edl.adapters import etcd_room
from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_room import keep_room, make_room
from edl.adapters.etcd_server import EtcdMember
from edl.errors import StoreError, StoreFull, StoreUnavailable
from edl.ports import Put
from tests.process.etcd_fixture import patient_store
from tests.process.harness import DEADLINE_S, Job, OutsideEtcd, lone_member, until

QUOTA_BYTES = 16 << 20
BALLAST = b"x" * (1 << 20)


async def fill(store: EtcdStore, prefix: str = "/ballast/", most: int = 100) -> int:
    """Write until the store takes no more; the number of writes."""
    for number in range(most):
        try:
            await store.write([Put(f"{prefix}{number % 2}", BALLAST)])
        except StoreFull:
            return number
    raise AssertionError("it never filled up")


def test_a_member_makes_room_for_itself(tmp_path: Path) -> None:
    """Its own history has filled it: all of it is old."""

    async def body() -> None:
        member = await lone_member(tmp_path, QUOTA_BYTES)
        store = patient_store(member.endpoint)
        try:
            assert await make_room(member) == ""
            written = await fill(store)
            assert written > 4, "the live keys are 2 MiB, so history is what fills it"
            with pytest.raises(StoreFull, match="no room left in etcd at 127"):
                await store.write([Put("a", b"small")])
            said = await make_room(member)
            assert said.startswith("the embedded etcd was full: compacted and defragmented from "), said
            await store.write([Put("a", b"small")])
            assert [entry.value for entry in (await store.read("a")).entries] == [b"small"]
            assert await make_room(member) == ""
        finally:
            await store.close()
            await member.stop()

    asyncio.run(body())


@pytest.mark.slow
def test_it_does_so_before_it_is_full(tmp_path: Path) -> None:
    """One that is looked after takes ten times its quota, a piece after the other."""

    async def body() -> None:
        member = await lone_member(tmp_path, QUOTA_BYTES)
        store, said = patient_store(member.endpoint), list[str]()
        keeping = asyncio.ensure_future(keep_room(member, said.append, 0.05))
        try:
            for number in range(10 * QUOTA_BYTES // (1 << 16)):
                while True:
                    try:
                        await store.write([Put("/history", os.urandom(1 << 16)), Put("/count", str(number).encode())])
                        break
                    except StoreFull:
                        await asyncio.sleep(0.05)
            assert len(said) >= 5
        finally:
            keeping.cancel()
            await store.close()
            await member.stop()

    asyncio.run(body())


def test_it_takes_little_of_a_disk_that_has_little_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far below its quota, and not again before it has doubled."""
    free = [etcd_room.LOW_BYTES]
    monkeypatch.setattr(etcd_room, "free_bytes", lambda folder: free[0])

    async def body() -> None:
        member = await lone_member(tmp_path)
        store = patient_store(member.endpoint)
        try:
            for number in range(32):
                await store.write([Put(f"/ballast/{number % 20}", BALLAST)])
            for _ in range(etcd_room.RETAINED):
                await store.write([Put("/count", b"")])
            assert await make_room(member) == "", "the disk has room"
            free[0] -= 1
            said = await make_room(member)
            assert said.startswith("the embedded etcd took up space on a disk that is almost full: compacted"), said
            assert await make_room(member) == "", "it would gain nothing: 20 MiB are in use"
            assert len((await store.read("/ballast/")).entries) == 20
        finally:
            await store.close()
            await member.stop()

    asyncio.run(body())


def test_history_goes_also_where_no_leader_lives_for_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_room, "HISTORY", 10)

    async def body() -> None:
        member = await lone_member(tmp_path)
        store = patient_store(member.endpoint)
        try:
            for number in range(30):
                await store.write([Put("/count", str(number).encode())])
            assert await make_room(member) == ""
            with pytest.raises(StoreError, match="have been compacted"):
                await anext(store.watch("/count", 5))
            last = await anext(store.watch("/count", member.compacted + 1))
            assert last.entry.value == str(member.compacted).encode(), "the newest revisions are kept"
        finally:
            await store.close()
            await member.stop()

    asyncio.run(body())


@pytest.mark.slow
def test_a_job_trains_on_beside_a_full_store_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with OutsideEtcd(tmp_path / "etcd", QUOTA_BYTES) as etcd, Job(tmp_path, [etcd.endpoint]) as job:
        nodes = job.start("a"), job.start("b")
        before = job.wait_world(2)
        asyncio.run(_fill(etcd))
        os.kill(before.pids[1], signal.SIGKILL)

        def warned() -> bool:
            return any("no room left in etcd" in text for text in job.status()["warnings"])

        until(warned, "edl status to say what the Master waits for", DEADLINE_S)
        text = job.cli("status").stdout
        assert "world changes have waited" in text and "training continues" in text
        assert job.seen() == before
        asyncio.run(_make_room(etcd.member))
        after = job.wait_world(2, after=before.round)
        assert (after.nodes, job.status()["restarts_used"]) == (before.nodes, 1)
        assert not any("no room" in text for text in job.status()["warnings"])
        assert sum(node.text.count("this node is the Master") for node in nodes) == 1, "nobody else could have written"


async def _fill(etcd: OutsideEtcd) -> None:
    store = patient_store(etcd.endpoint)
    try:
        await fill(store)
    finally:
        await store.close()


async def _make_room(member: EtcdMember) -> None:
    assert "was full" in await make_room(member)


def test_a_store_that_is_too_slow_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    """Frozen, it stands for one that takes longer than each call may."""

    async def body() -> None:
        member = await lone_member(tmp_path)
        store, patient = EtcdStore([member.endpoint], request_timeout_s=0.3), patient_store(member.endpoint)
        try:
            await store.write([Put("a", b"1")])
            await patient.read("a")
            os.kill(member.pid or 0, signal.SIGSTOP)
            with pytest.raises(StoreUnavailable, match=r"etcd is frozen, or its disk .*request_timeout=SECONDS"):
                while True:  # a thread of it may be in the middle of an answer
                    await store.read("a")
            waiting = asyncio.ensure_future(patient.read("a"))
            await asyncio.sleep(0)
            os.kill(member.pid or 0, signal.SIGCONT)
            assert [entry.value for entry in (await waiting).entries] == [b"1"]
        finally:
            os.kill(member.pid or 0, signal.SIGCONT)
            await store.close()
            await patient.close()
            await member.stop()

    asyncio.run(body())
