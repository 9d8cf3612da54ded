"""A Master waits for its store, whatever the store says, and says what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from edl.errors import FencedOut, LeaseLost, StoreError, StoreFull, StoreRefused, StoreUnavailable
from edl.master import guarded as guarded_module
from edl.master.guarded import GuardedStore
from edl.ports import Condition, CreatedAt, Guard, Operation, Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import FencingToken

KEY = "/edl/my-job/master"


class Moody(MemoryStore):
    """Answers writes with these errors first."""

    def __init__(self, clock: FakeClock, errors: Sequence[StoreError]) -> None:
        super().__init__(clock)
        self.errors = list(errors)
        self.trouble: list[str] = []
        self.guarded: GuardedStore | None = None

    async def write(self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()) -> int | None:
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
        store.guarded = GuardedStore(store, guard, FakeClock(), said.append)
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
        store.guarded = guarded = GuardedStore(store, Guard(KEY, FencingToken(0)), clock, said.append)
        write = store.write

        async def slow(operations: Sequence[Operation], conditions: Sequence[Condition] = ()) -> int | None:
            clock.advance(7)
            return await write(operations, conditions)

        store.write = slow  # type: ignore[method-assign]
        await guarded.write([])

    asyncio.run(scenario())
    assert store.trouble[-1].startswith("world changes have waited 14 s for the store")


def test_the_condition_is_the_guards() -> None:
    assert Guard(KEY, FencingToken(3)).condition() == CreatedAt(KEY, FencingToken(3))
