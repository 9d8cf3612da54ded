"""Every rule of the ``Store`` docstrings, on the memory store and on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

import pytest

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_rpc import rpc_pb2
from edl.adapters.etcd_server import EtcdMember
from edl.errors import LeaseLost, StoreError, StoreUnavailable
from edl.ports import Change, ChangeKind, Clock, CreatedAt, Delete, KeyValue, ModifiedAt, Put, Store
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from tests.process.harness import lone_member

LIMIT_S = 20.0
"""Nothing below takes this long unless it is broken."""


class Bench(Protocol):
    """One kind of store, and what a test may do to it."""

    def store(self, *, timeout_s: float = 10.0) -> Store: ...
    async def pass_time(self, seconds: float) -> None: ...
    async def go_away(self) -> None: ...
    async def come_back(self) -> None: ...
    async def compact(self, revision: int) -> None: ...


class MemoryBench:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.memory = MemoryStore(self.clock)

    def store(self, *, timeout_s: float = 10.0) -> Store:
        return self.memory

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.memory.tick()

    async def go_away(self) -> None:
        self.memory.available = False

    async def come_back(self) -> None:
        self.memory.available = True

    async def compact(self, revision: int) -> None:
        self.memory.compact_now(revision)


class EtcdBench:
    def __init__(self, member: EtcdMember) -> None:
        self.member = member

    def store(self, *, timeout_s: float = 10.0) -> Store:
        return EtcdStore([self.member.endpoint], request_timeout_s=timeout_s)

    async def pass_time(self, seconds: float) -> None:
        """Real time passes by itself; the tests wait for what it brings."""

    async def go_away(self) -> None:
        assert self.member.pid is not None
        os.kill(self.member.pid, signal.SIGKILL)
        assert await self.member.wait_exit() == -signal.SIGKILL

    async def come_back(self) -> None:
        self.member.start()

    async def compact(self, revision: int) -> None:
        store = EtcdStore([self.member.endpoint])
        request = rpc_pb2.CompactionRequest(revision=revision, physical=True)
        await store._connections.call(
            lambda endpoint, timeout_s, metadata: endpoint.kv.Compact(request, timeout=timeout_s), repeatable=False
        )
        await store.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMember]:
    member = asyncio.run(lone_member(tmp_path_factory.mktemp("etcd")))
    yield member
    asyncio.run(member.stop())
    member.discard()


@pytest.fixture(params=["memory", "etcd"])
def bench(request: pytest.FixtureRequest) -> Bench:
    if request.param == "memory":
        return MemoryBench()
    member: EtcdMember = request.getfixturevalue("etcd")
    if not member.running:  # a test before this one failed half-way
        member.start()
    return EtcdBench(member)


_numbers = itertools.count(1)


@pytest.fixture
def here() -> str:
    """A prefix of its own for each test."""
    return f"/test/{next(_numbers)}/"


def run(body: Callable[[Store], Coroutine[Any, Any, None]], bench: Bench, *, timeout_s: float = 10.0) -> None:
    async def main() -> None:
        store = bench.store(timeout_s=timeout_s)
        try:
            await asyncio.wait_for(body(store), LIMIT_S)
        finally:
            await store.close()

    asyncio.run(main())


class Listener:
    """A watch that records its events."""

    def __init__(self, store: Store, prefix: str, after: int) -> None:
        self._found: asyncio.Queue[Change | BaseException] = asyncio.Queue()
        self.task = asyncio.ensure_future(self._listen(store, prefix, after))

    async def _listen(self, store: Store, prefix: str, after: int) -> None:
        try:
            async for change in store.watch(prefix, after):
                self._found.put_nowait(change)
        except StoreError as error:
            self._found.put_nowait(error)

    async def next(self) -> Change:
        found = await self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    async def take(self, count: int) -> list[tuple[str, str, bytes]]:
        """The next changes, as (kind, last segment of the key, value)."""
        changes = [await self.next() for _ in range(count)]
        return [(change.kind.value, change.entry.key.rpartition("/")[2], change.entry.value) for change in changes]

    def nothing_more(self) -> bool:
        return self._found.empty()


@contextlib.asynccontextmanager
async def listening(store: Store, prefix: str, after: int) -> AsyncIterator[Listener]:
    listener = Listener(store, prefix, after)
    try:
        yield listener
    finally:
        listener.task.cancel()
        await asyncio.wait([listener.task])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until it holds; the test's own time limit ends it."""
    while not await condition():  # noqa: ASYNC110 -- another process does not tell
        await asyncio.sleep(0.02)


async def put(store: Store, key: str, value: bytes = b"", lease: int = 0) -> int:
    revision = await store.write([Put(key, value, lease)])
    assert revision is not None
    return revision


def names(entries: Sequence[KeyValue]) -> list[str]:
    return [entry.key.rpartition("/")[2] for entry in entries]


def test_what_was_written_is_read_with_its_revisions(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        first = await put(store, here + "a", b"1")
        second = await put(store, here + "a", b"2")
        assert second > first
        snapshot = await store.read(here)
        assert snapshot.entries == (KeyValue(here + "a", b"2", first, second, 0),)
        assert snapshot.revision == second

    run(body, bench)


def test_reading_nothing_gives_nothing_and_a_revision(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        snapshot = await store.read(here)
        assert snapshot.entries == ()
        assert snapshot.revision >= 1

    run(body, bench)


def test_a_prefix_ends_where_it_should_and_keys_are_sorted(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        for name in ("n/10", "n/9", "n/", "n", "n0", "m/1", "n/ü", "n/\U0001f600"):
            await put(store, here + name)
        found = [entry.key[len(here) :] for entry in (await store.read(here + "n/")).entries]
        assert found == ["n/", "n/10", "n/9", "n/ü", "n/\U0001f600"]
        assert len((await store.read(here)).entries) == 8
        everything = (await store.read("")).entries
        assert {entry.key for entry in everything} >= {here + "n", here + "m/1"}
        assert [entry.key.encode() for entry in everything] == sorted(entry.key.encode() for entry in everything)

    run(body, bench)


def test_empty_and_binary_values_come_back_as_they_were(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        await put(store, here + "binary", bytes(range(256)) * 2000)
        await put(store, here + "empty", b"")
        assert [entry.value for entry in (await store.read(here)).entries] == [bytes(range(256)) * 2000, b""]

    run(body, bench)


def test_delete_one_key_or_a_prefix(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        for name in ("a", "ab", "b/1", "b/2", "b"):
            await put(store, here + name)
        assert await store.write([Delete(here + "a")]) is not None
        assert names((await store.read(here)).entries) == ["ab", "b", "1", "2"]
        assert await store.write([Delete(here + "b/", prefix=True)]) is not None
        assert names((await store.read(here)).entries) == ["ab", "b"]

    run(body, bench)


def test_deleting_nothing_is_no_error_and_uses_no_revision(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        before = await put(store, here + "a")
        assert await store.write([Delete(here + "gone"), Delete(here + "gone/", prefix=True)]) == before

    run(body, bench)


def test_a_key_that_comes_back_has_a_new_create_revision(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        await put(store, here + "a")
        await store.write([Delete(here + "a")])
        again = await put(store, here + "a")
        assert (await store.read(here)).entries[0].create_revision == again

    run(body, bench)


def test_one_transaction_is_one_revision_and_happens_in_whole(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        await put(store, here + "old")
        revision = await store.write([Put(here + "a", b"1"), Put(here + "b", b"2"), Delete(here + "old")])
        entries = (await store.read(here)).entries
        assert names(entries) == ["a", "b"]
        assert {entry.mod_revision for entry in entries} == {revision}

    run(body, bench)


def test_condition_on_the_create_revision(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        key = here + "a"
        created = await store.write([Put(key, b"1")], [CreatedAt(key, 0)])
        assert created is not None
        assert await store.write([Put(key, b"2")], [CreatedAt(key, 0)]) is None
        assert await store.write([Put(key, b"3")], [CreatedAt(key, created)]) is not None
        assert await store.write([Put(key, b"4")], [CreatedAt(key, created)]) is not None, "modifying changes nothing"
        assert await store.write([Put(key, b"5")], [CreatedAt(key, created + 1)]) is None
        assert (await store.read(here)).entries[0].value == b"4"

    run(body, bench)


def test_condition_on_the_mod_revision(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        key = here + "a"
        first = await store.write([Put(key, b"1")], [ModifiedAt(key, 0)])
        assert first is not None
        second = await store.write([Put(key, b"2")], [ModifiedAt(key, first)])
        assert second is not None
        assert await store.write([Put(key, b"3")], [ModifiedAt(key, first)]) is None
        assert await store.write([Put(key, b"3")], [ModifiedAt(key, 0)]) is None
        await store.write([Delete(key)])
        assert await store.write([Put(key, b"4")], [ModifiedAt(key, 0)]) is not None

    run(body, bench)


def test_all_conditions_must_hold_and_nothing_is_written_otherwise(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        first = await put(store, here + "a", b"1")
        operations: list[Put | Delete] = [Put(here + "b", b""), Delete(here + "a")]
        assert await store.write(operations, [CreatedAt(here + "a", first), CreatedAt(here + "b", 7)]) is None
        snapshot = await store.read(here)
        assert names(snapshot.entries) == ["a"]
        assert snapshot.revision == first

    run(body, bench)


def test_conditions_alone_ask_without_writing(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        first = await put(store, here + "a")
        assert await store.write([], [CreatedAt(here + "a", first)]) == first
        assert await store.write([], [CreatedAt(here + "a", 0)]) is None

    run(body, bench)


def test_of_many_that_create_the_same_key_one_wins(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        key = here + "master"
        attempts = [store.write([Put(key, str(number).encode())], [CreatedAt(key, 0)]) for number in range(20)]
        won = [number for number, revision in enumerate(await asyncio.gather(*attempts)) if revision is not None]
        assert len(won) == 1
        assert (await store.read(here)).entries[0].value == str(won[0]).encode()

    run(body, bench)


@pytest.mark.parametrize(
    "names_of",
    [
        pytest.param(lambda here: [Put(here, b""), Put(here, b"")], id="put twice"),
        pytest.param(lambda here: [Put(here, b""), Delete(here)], id="put and deleted"),
        pytest.param(lambda here: [Delete(here, prefix=True), Put(here + "a", b"")], id="put and deleted by prefix"),
        pytest.param(lambda here: [Put("", b"")], id="empty key"),
        pytest.param(lambda here: [Put(f"{here}{number}", b"") for number in range(129)], id="129 operations"),
    ],
)
def test_what_etcd_does_not_take_is_an_error_everywhere(
    bench: Bench, here: str, names_of: Callable[[str], list[Put | Delete]]
) -> None:
    async def body(store: Store) -> None:
        with pytest.raises(StoreError) as raised:
            await store.write(names_of(here))
        assert raised.value.definite
        assert (await store.read(here)).entries == ()

    run(body, bench)


def test_a_lease_holds_its_keys_until_it_is_revoked(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        lease = await store.grant_lease(30)
        assert lease != 0
        assert await store.renew_lease(lease) == pytest.approx(30)
        await put(store, here + "a", lease=lease)
        await put(store, here + "b", lease=lease)
        await put(store, here + "free")
        await put(store, here + "b")  # no longer on the lease
        assert [entry.lease for entry in (await store.read(here)).entries] == [lease, 0, 0]
        await store.revoke_lease(lease)
        assert names((await store.read(here)).entries) == ["b", "free"]

    run(body, bench)


def test_a_lease_that_is_gone_is_lost_for_renewal_and_writes_but_revoking_is_no_error(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        lease = await store.grant_lease(30)
        await store.revoke_lease(lease)
        await store.revoke_lease(lease)
        with pytest.raises(LeaseLost):
            await store.renew_lease(lease)
        with pytest.raises(LeaseLost):
            await store.write([Put(here + "kept out", b""), Put(here + "a", b"", lease)])
        assert (await store.read(here)).entries == ()
        assert await store.write([Put(here + "a", b"", lease)], [CreatedAt(here + "a", 9)]) is None, "conditions first"

    run(body, bench)


def test_a_lease_that_nobody_renews_ends_and_a_watch_sees_its_keys_go(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        kept, lost = await store.grant_lease(1), await store.grant_lease(1)
        await put(store, here + "kept", lease=kept)
        await put(store, here + "lost 2", lease=lost)
        revision = await put(store, here + "lost 1", lease=lost)
        async with listening(store, here, revision) as listener:
            found = asyncio.ensure_future(listener.take(2))
            while not found.done():
                await store.renew_lease(kept)
                await bench.pass_time(0.5)
                await asyncio.wait([found], timeout=0.1)
            assert found.result() == [("delete", "lost 1", b""), ("delete", "lost 2", b"")]
        with pytest.raises(LeaseLost):
            await store.renew_lease(lost)
        assert names((await store.read(here)).entries) == ["kept"]

    run(body, bench)


def test_a_watch_tells_past_and_coming_changes_once_and_in_order(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        before = await put(store, here + "before")
        first = await put(store, here + "a", b"1")
        async with listening(store, here, before) as listener:
            assert await listener.next() == Change(ChangeKind.PUT, KeyValue(here + "a", b"1", first, first, 0))
            second = await put(store, here + "a", b"2")
            third = await store.write([Delete(here + "a")])
            assert third is not None
            assert await listener.next() == Change(ChangeKind.PUT, KeyValue(here + "a", b"2", first, second, 0))
            assert await listener.next() == Change(ChangeKind.DELETE, KeyValue(here + "a", b"", 0, third, 0))
            await put(store, here + "last")
            assert await listener.take(1) == [("put", "last", b"")]
            assert listener.nothing_more()

    run(body, bench)


def test_a_watch_sees_its_prefix_only(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        after = (await store.read(here)).revision
        async with listening(store, here + "n/", after) as listener:
            for name in ("n", "n0", "m/x", "n/1", "o", "n/2"):
                await put(store, here + name)
            assert await listener.take(2) == [("put", "1", b""), ("put", "2", b"")]
            assert listener.nothing_more()

    run(body, bench)


def test_a_watch_tells_all_changes_of_one_transaction(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        after = await put(store, here + "x/1")
        await put(store, here + "x/2")
        async with listening(store, here, after + 1) as listener:
            await store.write([Delete(here + "x/", prefix=True), Put(here + "b", b""), Put(here + "a", b"")])
            assert sorted(await listener.take(4)) == [
                ("delete", "1", b""),
                ("delete", "2", b""),
                ("put", "a", b""),
                ("put", "b", b""),
            ]

    run(body, bench)


def test_several_watches_each_get_everything(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        after = (await store.read(here)).revision
        async with listening(store, here, after) as one, listening(store, here, after) as other:
            for number in range(200):
                await put(store, f"{here}{number}")
            expected = [("put", str(number), b"") for number in range(200)]
            assert await one.take(200) == expected
            assert await other.take(200) == expected

    run(body, bench)


def test_a_watch_from_a_revision_the_store_has_never_seen_is_an_error(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        now = await put(store, here + "a")
        async with listening(store, here, now + 1) as listener:
            with pytest.raises(StoreError, match="Read again"):
                await listener.next()

    run(body, bench)


def test_a_watch_that_missed_compacted_changes_says_so(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        first = await put(store, here + "a", b"1")
        await put(store, here + "a", b"2")
        last = await put(store, here + "a", b"3")
        await bench.compact(last - 1)  # one of the two changes after the first
        async with listening(store, here, first) as listener:
            with pytest.raises(StoreError, match=r"no longer kept|have been compacted"):
                await listener.next()
        async with listening(store, here, last - 1) as listener:
            assert await listener.take(1) == [("put", "a", b"3")]

    run(body, bench)


def test_without_a_store_calls_fail_as_indefinite_and_work_again_afterwards(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        await put(store, here + "a", b"1")
        lease = await store.grant_lease(30)
        await put(store, here + "leased", b"2", lease)
        await bench.go_away()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.read(here),
            lambda: store.write([Put(here + "b", b"")]),
            lambda: store.renew_lease(lease),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable) as raised:
                await call()
            assert not raised.value.definite
        await bench.come_back()
        await until(lambda: answers(store, here))
        assert [entry.value for entry in (await store.read(here)).entries if entry.key != here + "b"] == [b"1", b"2"]
        assert await store.renew_lease(lease) == pytest.approx(30)

    run(body, bench, timeout_s=0.5)


async def answers(store: Store, prefix: str) -> bool:
    try:
        await store.read(prefix)
    except StoreUnavailable:
        return False
    return True


def test_a_watch_outlives_the_store_and_misses_nothing(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        after = (await store.read(here)).revision
        async with listening(store, here, after) as listener:
            expected = []
            for life in range(2):
                await put(store, f"{here}{life} before")
                await bench.go_away()
                await bench.come_back()
                await until(lambda: answers(store, here))
                await put(store, f"{here}{life} after")
                expected += [("put", f"{life} before", b""), ("put", f"{life} after", b"")]
            assert await listener.take(4) == expected
            assert listener.nothing_more()

    run(body, bench)


def test_closing_ends_watches_and_refuses_calls(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        after = await put(store, here + "a")
        async with listening(store, here, after - 1) as listener:
            await listener.next()
            await store.close()
            await asyncio.wait_for(listener.task, 5)
            assert listener.nothing_more()
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.read(here)

    run(body, bench)


def test_cancelling_a_call_or_a_watch_leaves_the_store_usable(bench: Bench, here: str) -> None:
    async def body(store: Store) -> None:
        await put(store, here + "a")
        tasks = [asyncio.ensure_future(store.read(here)) for _ in range(5)]
        listener = Listener(store, here, (await store.read(here)).revision)
        await asyncio.sleep(0)
        for task in [*tasks, listener.task]:
            task.cancel()
        await asyncio.gather(*tasks, listener.task, return_exceptions=True)
        assert names((await store.read(here)).entries)[0] == "a"

    run(body, bench)


def test_the_memory_store_follows_its_clock_to_the_moment() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    lease = store.grant_now(2.5)
    store.write_now([Put("a", b"", lease)])
    clock.advance(2.9)
    assert store.next_expiry_s() == 3.0
    assert store.renew_now(lease) == 3.0
    clock.advance(2.99)
    assert store.tick() == []
    clock.advance(0.01)
    assert store.tick() == [lease]
    assert [change.kind for change in store.changes_since(0)] == [ChangeKind.PUT, ChangeKind.DELETE]
    frozen: Clock = clock
    assert frozen.now_s() == pytest.approx(5.9)


def test_the_log_of_the_member_is_beside_its_data(etcd: EtcdMember) -> None:
    assert etcd.log_file.parent == etcd.data_dir.parent
    assert etcd.log_file.exists()
