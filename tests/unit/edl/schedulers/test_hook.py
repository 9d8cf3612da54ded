"""A command that lists hosts: which nodes drain, also when the Master changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from edl.errors import SchedulerError, StoreUnavailable
from edl.schedulers import hook
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.hook import SEEN, DiscoveryScheduler
from edl.schedulers.port import Disruption, Observation, Sized


class Memory:
    """What the store holds from one Master to the next."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.away = False
        self.writes = 0

    def kept(self, name: str) -> str:
        return self.values.get(name, "")

    async def keep(self, name: str, value: str) -> None:
        if self.away:
            raise StoreUnavailable("no answer")
        self.writes += 1
        self.values[name] = value


class Lists:
    """A command that prints these lists one after another, ``!`` if it fails."""

    def __init__(self, *lists: str) -> None:
        self._lists = list(lists)

    async def run(self, *arguments: str) -> str:
        if not self._lists:
            raise asyncio.CancelledError  # the Master is gone
        if (text := self._lists.pop(0)) == "!":
            raise SchedulerError("it failed", retry=True)
        return text.replace(" ", "\n")


class Deps:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def log(self, text: str) -> None:
        pass


def term(memory: Memory, *lists: str) -> list[str]:
    """What one Master hears: the size, or the name of a host whose nodes drain."""
    heard: list[Observation] = []

    async def listen() -> None:
        scheduler = DiscoveryScheduler(cast(Any, Lists(*lists)), "hosts", 0.0, cast(SchedulerDeps, Deps(memory)))
        try:
            async for one in scheduler.watch():
                heard.append(one)
        except asyncio.CancelledError:
            pass

    asyncio.run(listen())
    return [str(one.size.nodes) if isinstance(one, Sized) else one.node for one in heard]


def hosts_of(memory: Memory) -> Sequence[str]:
    return memory.values[SEEN].split("\n")


def test_hosts_that_are_no_longer_listed_drain() -> None:
    assert term(Memory(), "a b c", "a c", "!", "c", "c d") == ["3", "b", "2", "a", "1", "2"]


def test_so_do_those_that_vanish_while_there_is_no_master() -> None:
    memory = Memory()
    assert term(memory, "a b c") == ["3"]
    assert term(memory, "a c") == ["b", "2"]
    assert term(memory, "a c") == ["b", "2"], "that Master may have died before it drained them"
    assert term(memory, "c b", "c") == ["a", "2", "b", "1"]


def test_what_is_remembered_is_written_when_it_changes_and_stays_small(monkeypatch: Any) -> None:
    monkeypatch.setattr(hook, "MOST_GONE", 2)
    memory = Memory()
    term(memory, "b a", "a b", "b a")
    assert (memory.writes, hosts_of(memory)) == (1, ["a", "b"])
    term(memory, "b", "c", "d", "e")
    assert hosts_of(memory) == ["c", "d", "e"]


def test_a_store_that_is_away_is_tried_again() -> None:
    memory = Memory()
    term(memory, "a b")
    memory.away = True
    assert term(memory, "b", "b") == ["a", "1"]
    memory.away = False
    assert term(memory, "b c", "c") == ["a", "2", "b", "1"]
    assert hosts_of(memory) == ["a", "b", "c"]


def test_a_node_drains_if_its_host_has_vanished() -> None:
    """The reason names the command and the host."""

    async def body() -> Observation:
        memory = Memory()
        await memory.keep(SEEN, "a\nb")
        scheduler = DiscoveryScheduler(cast(Any, Lists("b")), "hosts", 0.0, cast(SchedulerDeps, Deps(memory)))
        return await anext(scheduler.watch())

    assert asyncio.run(body()) == Disruption("a", "hosts no longer lists a")
