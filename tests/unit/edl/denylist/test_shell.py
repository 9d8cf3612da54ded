"""The denylist beside the Master: what it is told, and what is written when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from edl.denylist.plan import Author
from edl.denylist.shell import DenylistCompanion
from edl.errors import DenylistError
from edl.testing.clock import FakeClock
from edl.watched_master import WatchedMaster
from edl.wire.denylist import DenylistEntry
from edl.wire.status import JobStatus
from tests.support.master_fixture import turns, until
from tests.unit.edl.denylist.test_plan import dropped, entry, status


class MemoryPlace:
    """A place in memory, which may be out of order."""

    where, look_s, left_out = "the place", 0.0, ""

    def __init__(self, *entries: DenylistEntry) -> None:
        self.held = {one.name: one for one in entries}
        self.broken = False
        self.fixed: set[str] = set()
        """Names of entries that cannot be removed."""

    async def entries(self) -> Sequence[DenylistEntry]:
        if self.broken:
            raise DenylistError("the denylist in the place cannot be used: No such device")
        return [self.held[name] for name in sorted(self.held)]

    async def put(self, one: DenylistEntry) -> None:
        self.held[one.name] = one

    async def remove(self, name: str) -> None:
        if name in self.fixed:
            raise DenylistError("the denylist in the place cannot be used: Operation not permitted")
        self.held.pop(name, None)


class Boss:
    """An elected Master, as far as this companion uses it."""

    def __init__(self, *statuses: JobStatus) -> None:
        self.statuses = list(statuses)
        self.told: list[tuple[DenylistEntry, ...]] = []
        self.values: dict[str, str] = {}

    def status(self) -> JobStatus:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    async def ended_within(self, limit_s: float) -> bool:
        await asyncio.sleep(limit_s)
        return False

    def denylist(self, entries: Sequence[DenylistEntry]) -> None:
        self.told.append(tuple(entries))

    def kept(self, name: str) -> str:
        return self.values.get(name, "")

    async def keep(self, name: str, value: str) -> None:
        self.values[name] = value


def companion(master: Boss, place: MemoryPlace, log: list[str], clock: FakeClock | None = None) -> DenylistCompanion:
    author, watched = Author("digits", "run1", 100.0), cast(WatchedMaster, master)
    clock = clock or FakeClock(0.0)
    return DenylistCompanion(watched, cast(Any, place), author, lambda: 1000.0, log.append, clock)


def test_the_master_is_told_once() -> None:
    async def body() -> None:
        foreign = entry("m9", run="run9")
        expired = entry(device="G1", run="run9", until_s=51.0)
        master, place, clock = Boss(status()), MemoryPlace(foreign, expired), FakeClock(0.0)
        one = companion(master, place, [], clock)
        for now_s in (0.0, 49.0):
            clock.advance(now_s)
            await one.look()
        assert sorted(place.held) == ["device/G1", "host/m9"], "the clock of this host may be wrong"
        clock.advance(1.0)
        await one.look()
        assert master.told == [(foreign,)]
        assert list(place.held) == ["host/m9"], "what has expired is tidied up"

    asyncio.run(body())


def test_a_bad_device_is_added_once_even_if_somebody_removes_it() -> None:
    async def body() -> None:
        log: list[str] = []
        master, place = Boss(status(dropped(device="G7"))), MemoryPlace()
        one = companion(master, place, log)
        await one.look()
        assert list(place.held) == ["device/G7"]
        assert log == ["added to the denylist in the place: device/G7: failed by itself 2 times"]
        place.held.clear()
        await one.look()
        assert not place.held
        await companion(master, place, log).look()  # the next Master's
        assert not place.held
        assert master.told == [(), ()], "each Master learns that nothing else is on the denylist"

    asyncio.run(body())


def test_a_master_that_dies_between_adding_and_noting() -> None:
    async def body() -> None:
        master, place = Boss(status(dropped(device="G7"))), MemoryPlace(entry(device="G7"))
        await companion(master, place, []).look()
        place.held.clear()
        await companion(master, place, []).look()
        assert not place.held

    asyncio.run(body())


def test_a_place_out_of_order_is_reported_once_and_what_was_there_still_counts() -> None:
    async def body() -> None:
        log: list[str] = []
        foreign = entry("m9", run="run9")
        master, place = Boss(status()), MemoryPlace(foreign)
        working = asyncio.create_task(companion(master, place, log).run())
        await until(lambda: bool(master.told))
        place.broken = True
        await until(lambda: bool(log))
        await turns()
        assert log == ["the denylist in the place cannot be used: No such device"]
        assert master.told == [(foreign,)]
        place.broken = False
        await until(lambda: len(log) > 1)
        assert log[1] == "the denylist in the place can be used again"
        master.statuses = [status(phase="ended")]
        await working

    asyncio.run(body())


def test_a_device_that_is_bad_again_after_it_was_used_is_listed_again() -> None:
    async def body() -> None:
        bad, good = status(dropped(device="G7")), status()
        master, place = Boss(bad), MemoryPlace()
        one = companion(master, place, [])
        for now, listed in ((bad, ["device/G7"]), (good, []), (bad, ["device/G7"])):
            master.statuses = [now]
            await one.look()
            assert list(place.held) == listed
        del place.held["device/G7"]  # by hand
        await one.look()
        assert not place.held, "not against somebody's will"

    asyncio.run(body())


def test_an_outdated_entry_that_only_another_user_can_remove_does_no_harm() -> None:
    async def body() -> None:
        log: list[str] = []
        outdated = [entry(device=name, run="run9", until_s=1.0) for name in ("G1", "G2")]
        master, place = Boss(status(dropped(device="G7"))), MemoryPlace(*outdated)
        place.fixed = {"device/G1"}
        await companion(master, place, log).look()
        assert list(place.held) == ["device/G1", "device/G7"]
        assert master.values == {"denylist": "device/G7"}

    asyncio.run(body())


def test_entries_that_cannot_be_read_are_reported_once() -> None:
    async def body() -> None:
        log: list[str] = []
        master, place = Boss(status()), MemoryPlace()
        place.left_out = "1 entry does not count"
        working = asyncio.create_task(companion(master, place, log).run())
        await until(lambda: bool(log))
        await turns()
        master.statuses = [status(phase="ended")]
        await working
        assert log == ["1 entry does not count"]

    asyncio.run(body())
