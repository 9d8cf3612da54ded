"""A Master waits for its store, whatever the store says, and says what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from edl.errors import FencedOut, LeaseLost, StoreError, StoreFull, StoreRefused, StoreUnavailable
from edl.master import guarded as guarded_module
from edl.master.guarded import GuardedStore
from edl.ports import Condition, CreatedAt, Guard, Operation, PrefixSnapshot, Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import FencingToken

KEY = "/edl/my-job/master"
LAST = "/edl/my-job/last-write"


class Moody(MemoryStore):
    """Answers writes with these errors first."""

    def __init__(self, clock: FakeClock, errors: Sequence[StoreError]) -> None:
        super().__init__(clock)
        self.errors = list(errors)
        self.trouble: list[str] = []
        self.guarded: GuardedStore | None = None

    async def write(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
    ) -> int | None:
        assert self.guarded is not None
        self.trouble.append(self.guarded.trouble())
        if self.errors:
            raise self.errors.pop(0)
        return self.write_now(operations, conditions)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_module, "RETRY_S", 0)


def written(*errors: StoreError, elected: bool = True) -> tuple[Moody, list[str]]:
    """Result of a write, and its log lines."""
    said: list[str] = []
    store = Moody(FakeClock(), errors)

    async def scenario() -> None:
        token = store.write_now([Put(KEY, b"a")]) or 0
        guard = Guard(KEY, FencingToken(token if elected else token + 1))
        store.guarded = GuardedStore(store, guard, LAST, FakeClock(), said.append)
        await asyncio.wait_for(store.guarded.write([Put("what", b"is decided")]), 5)
        assert store.guarded.trouble() == ""

    asyncio.run(scenario())
    return store, said


@pytest.mark.parametrize(
    "error", [StoreUnavailable("silent"), StoreFull("no room"), StoreRefused("no"), StoreError("!")]
)
def test_what_is_decided_is_written_as_soon_as_it_can_be(error: StoreError) -> None:
    store, said = written(error, error, error)
    assert [entry.value for entry in store.read_now("what").entries] == [b"is decided"]
    assert said == [f"world changes wait for the store, training continues: {error}"]
    assert store.trouble == [
        "",
        *[f"world changes have waited 0 s for the store; training continues. {error}"] * 3,
    ]


def test_the_members_of_a_store_take_turns_in_not_answering_and_that_is_said_once() -> None:
    silent = [StoreUnavailable(f"member {number % 3}: silent") for number in range(6)]
    store, said = written(*silent)
    assert said == ["world changes wait for the store, training continues: member 0: silent"]
    assert store.trouble[-1].endswith("member 2: silent"), "the status has the newest reason"


def test_another_reason_is_said_as_well() -> None:
    _, said = written(StoreUnavailable("silent"), StoreFull("no room"), StoreFull("no room"))
    assert [text.partition(": ")[2] for text in said] == ["silent", "no room"]


def test_who_has_been_replaced_waits_for_nothing() -> None:
    with pytest.raises(FencedOut):
        written(StoreFull("no room"), elected=False)


def test_a_lost_lease_is_not_waited_for() -> None:
    with pytest.raises(LeaseLost):
        written(LeaseLost("gone"))


def test_that_waits_long_says_how_long() -> None:
    clock, said = FakeClock(), list[str]()
    store = Moody(clock, [StoreFull("no room")] * 2)

    async def scenario() -> None:
        store.guarded = guarded = GuardedStore(store, Guard(KEY, FencingToken(0)), LAST, clock, said.append)
        write = store.write

        async def slow(
            operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
        ) -> int | None:
            clock.advance(7)
            return await write(operations, conditions)

        store.write = slow  # type: ignore[method-assign]
        await guarded.write([])

    asyncio.run(scenario())
    assert store.trouble[-1].startswith("world changes have waited 14 s for the store")


def test_the_condition_is_the_guards() -> None:
    assert Guard(KEY, FencingToken(3)).condition() == CreatedAt(KEY, FencingToken(3))


# --- writes that come late -------------------------------------------------------------------------------------------


class Late(MemoryStore):
    """Gives no answer to the first writes, and carries them out when it is told to."""

    def __init__(self, unanswered: int = 0) -> None:
        super().__init__(FakeClock())
        self.unanswered = unanswered
        self.reads = 0
        self.silent = asyncio.Event()
        self._kept: list[tuple[Sequence[Operation], Sequence[Condition]]] = []

    async def write(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
    ) -> int | None:
        if self.unanswered:
            self.unanswered -= 1
            self._kept.append((operations, conditions))
            self.silent.set()
            raise StoreUnavailable("silent")
        return self.write_now(operations, conditions)

    async def read(self, prefix: str) -> PrefixSnapshot:
        self.reads += 1
        return self.read_now(prefix)

    def arrive(self) -> list[int | None]:
        """Carry out what was not answered; the result of each."""
        found = [self.write_now(*one) for one in self._kept]
        self._kept.clear()
        return found

    def value(self) -> bytes:
        return self.read_now("what").entries[0].value

    def master(self, token: int | None = None) -> GuardedStore:
        found = self.write_now([Put(KEY, b"a")]) if token is None else token
        return GuardedStore(self, Guard(KEY, FencingToken(found or 0)), LAST, FakeClock(), lambda text: None)


def test_a_write_that_comes_late_changes_nothing() -> None:
    store = Late()

    async def scenario() -> None:
        master = store.master()
        await master.write([Put("what", b"1")])
        store.unanswered = 1
        await master.write([Put("what", b"2")])  # its first attempt stays under way
        await master.write([Put("what", b"3")])
        assert store.arrive() == [None]
        assert store.value() == b"3"
        await master.write([Put("what", b"4")])

    asyncio.run(scenario())
    assert store.value() == b"4"


def test_an_attempt_that_has_come_through_is_not_repeated() -> None:
    store = Late()

    async def scenario() -> int:
        master = store.master()
        await master.write([Put("what", b"1")])
        store.unanswered = 1
        writing = asyncio.ensure_future(master.write([Put("what", b"2")]))
        await store.silent.wait()
        [done] = store.arrive()
        assert await writing == done
        assert store.value() == b"2"
        return await master.write([Put("what", b"3")])

    assert asyncio.run(scenario()) == store.revision
    assert store.value() == b"3"


def test_a_write_that_was_given_up_does_not_refuse_the_next() -> None:
    store = Late(unanswered=1)

    async def scenario() -> None:
        master = store.master()
        with pytest.raises(StoreUnavailable):
            await master.write_once([Put("what", b"1")])
        assert store.arrive() != [None]  # it comes late, before the next one
        await master.write_once([Put("what", b"2")])

    asyncio.run(scenario())
    assert store.value() == b"2"


def test_who_is_elected_again_does_not_take_an_earlier_write_for_its_own() -> None:
    """A launcher that steps down and cannot delete the election key may become the Master under its old token."""
    store = Late()

    async def scenario() -> None:
        first = store.master()
        await first.write([Put("what", b"1")])
        store.unanswered = 1
        with pytest.raises(StoreUnavailable):
            await first.write_once([Put("what", b"2")])
        again = store.master(first._guard.token)
        await again.read("/edl/my-job/")  # what it continues from
        store.arrive()
        with pytest.raises(FencedOut):
            await again.write([Put("what", b"3")])

    asyncio.run(scenario())
    assert store.value() == b"2"


def test_a_write_costs_no_read() -> None:
    store = Late()

    async def scenario() -> None:
        master = store.master()
        await master.read("/edl/my-job/")
        for number in range(5):
            await master.write([Put("what", b"%d" % number)])

    asyncio.run(scenario())
    assert store.reads == 1


def test_writes_at_the_same_time_take_turns() -> None:
    store = Late()

    async def scenario() -> None:
        master = store.master()
        await asyncio.gather(*(master.write([Put(f"what/{number}", b"")]) for number in range(10)))

    asyncio.run(scenario())
    assert len(store.read_now("what/").entries) == 10
