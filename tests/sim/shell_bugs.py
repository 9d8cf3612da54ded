"""Bugs planted in the shells: mistakes of asyncio code around a machine that is right.

``python -m tests.sim.shell_bugs`` prints after how many schedules each is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

from edl import tasks
from edl.agent import shell as agent_shell
from edl.agent.shell import AgentShell
from edl.errors import FencedOut, LeaseLost, StoreError
from edl.launch import launcher
from edl.launch.registration import Registration
from edl.master import events, guarded, watches
from edl.master import shell as master_shell
from edl.master.candidate import Candidate
from edl.master.shell import MasterShell
from edl.master.streams import AgentStreams
from edl.testing.sim.store import StoreClient
from edl.types import Incarnation
from tests.sim.planted import Planted, seeds_needed

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


def sends_before_it_writes() -> contextlib.AbstractContextManager[Any]:
    """The Master's shell sends what it has decided, and writes it then."""
    carry_out = MasterShell._carry_out

    async def hasty(self: Any, caused: Any, decision: events.Decision) -> None:
        for effect in decision.effects:
            if isinstance(effect, events.TellNode):
                await self._run(effect, decision.state.record)
        await carry_out(self, caused, decision)

    return mock.patch.object(MasterShell, "_carry_out", hasty)


def wakes_nobody_for_a_new_master() -> contextlib.AbstractContextManager[Any]:
    """The agent clears the order to redial after it has looked for one: it may clear one that it has not seen."""

    async def stay(self: Any) -> None:
        while True:
            await self._redial.wait()
            pauses = tasks.Backoff(agent_shell.RECONNECT_PAUSE_S, agent_shell.LONGEST_RECONNECT_PAUSE_S)
            while self._master is not None:
                await self._call(*self._master, pauses)
                if self._redial.is_set():
                    break
            await asyncio.sleep(0.3)
            self._redial.clear()

    return mock.patch.object(AgentShell, "_stay_attached", stay)


def alarm_is_not_set_again() -> contextlib.AbstractContextManager[Any]:
    """The Master's timer keeps the time that it was set to first."""
    set_timer = tasks.Timer.set

    def once(self: Any, at_s: float | None) -> None:
        if at_s is None or self._handle is None:
            set_timer(self, at_s)

    return mock.patch.object(tasks.Timer, "set", once)


def stream_is_kept_after_its_end() -> contextlib.AbstractContextManager[Any]:
    """The Master does not forget the queue of a stream that has broken."""
    return mock.patch.object(AgentStreams, "_detach", lambda self, info, outgoing: None)


def events_are_handled_twice() -> contextlib.AbstractContextManager[Any]:
    """The Master's watch of the nodes begins some revisions too early, and tells what was read already again."""

    async def repeated(store: Any, prefix: str, revision: int, *more: Any) -> None:
        await watches.watch_nodes(store, prefix, max(0, revision - 3), *more)

    return mock.patch.object(master_shell, "watch_nodes", repeated)


def tries_without_a_pause() -> contextlib.AbstractContextManager[Any]:
    """A call to a Master that is gone is made again at once, for ever."""
    return mock.patch.object(tasks.Backoff, "next", lambda self: 0.0)


def lease_outlives_its_loop() -> contextlib.AbstractContextManager[Any]:
    """Something renews the lease of a launcher whose event loop is stopped."""
    keep = Registration.keep

    async def eternal(self: Any, renewed: Any, missed: Any) -> None:
        store = self._store._store
        lease = self.lease

        def again() -> None:
            with contextlib.suppress(StoreError):
                store.do(lambda memory: memory.renew_now(lease))
                store.timeline.after(0.5, again)

        again()
        await keep(self, renewed, missed)

    return mock.patch.object(Registration, "keep", eternal)


def watch_goes_on_at_the_wrong_revision() -> contextlib.AbstractContextManager[Any]:
    """After an outage a watch begins with what comes, and misses what came meanwhile."""

    async def watch(self: Any, prefix: str, after_revision: int) -> AsyncIterator[Any]:
        news, seen = asyncio.Event(), after_revision
        self._store.watches[news] = prefix
        try:
            while True:
                news.clear()
                await asyncio.sleep(self._network.delay_s())
                if self._store.away or not self._network.both("store", self._caller.host):
                    await news.wait()
                    seen = self._store.memory.revision
                    continue
                for change in self._store.memory.changes_since(seen, prefix):
                    seen = change.entry.mod_revision
                    yield change
                await news.wait()
        finally:
            self._store.watches.pop(news, None)

    return mock.patch.object(StoreClient, "watch", watch)


def nobody_reads_a_failed_task() -> contextlib.AbstractContextManager[Any]:
    """The Master's watch of the nodes ends with an error in a task that has no reader."""

    async def quiet(*all_of_it: Any) -> None:
        feed = asyncio.ensure_future(watches.watch_nodes(*all_of_it))
        await asyncio.sleep(6.0)
        feed.cancel()

    return mock.patch.object(master_shell, "watch_nodes", quiet)


def end_waits_for_itself() -> contextlib.AbstractContextManager[Any]:
    """A launcher that leaves waits for the end of its own lease."""
    leave = Registration.leave

    async def until_gone(self: Any) -> None:
        key = self._keys.node(self._node)
        while any(entry.key == key for entry in (await self._store.read(key)).entries):
            await asyncio.sleep(0.2)
            with contextlib.suppress(StoreError):
                await self._store.renew_lease(self.lease)
        await leave(self)

    return mock.patch.object(Registration, "leave", until_gone)


def answer_of_the_store_is_believed_to_be_no() -> contextlib.AbstractContextManager[Any]:
    """A campaign whose write had no answer counts as lost, and its key stays."""

    async def create(self: Any, depose: Any) -> Any:
        token = await created(self, depose)
        self._uncertain = False
        return token

    created = Candidate._create
    return mock.patch.object(Candidate, "_create", create)


def write_is_done_again_after_a_fence() -> contextlib.AbstractContextManager[Any]:
    """A write that another Master's election has refused is tried again without the fence."""
    attempt = guarded.GuardedStore._attempt

    async def stubborn(self: Any, operations: Any) -> int:
        try:
            return await attempt(self, operations)
        except FencedOut:
            return int(await self._store.write(operations))

    return mock.patch.object(guarded.GuardedStore, "_attempt", stubborn)


def late_write_is_not_refused() -> contextlib.AbstractContextManager[Any]:
    """A write has no other condition than that its Master is still elected."""

    async def attempt(self: Any, operations: Any) -> int:
        done = await self._store.write(operations, [self._guard.condition()])
        if done is None:
            raise FencedOut("another Master has been elected")
        return int(done)

    return mock.patch.object(guarded.GuardedStore, "_attempt", attempt)


def old_lease_is_renewed() -> contextlib.AbstractContextManager[Any]:
    """After the lease was lost the launcher goes on without a new one."""

    async def deaf(self: Any) -> None:
        deps = self._deps
        while True:
            with contextlib.suppress(LeaseLost):
                await deps.registration.keep(self._renewed, self._missed)
            deps.registration.lease = Incarnation(0)
            await asyncio.sleep(3600.0)

    return mock.patch.object(launcher.Launcher, "_keep_lease", deaf)


def nodes_that_broke_off_are_not_missed() -> contextlib.AbstractContextManager[Any]:
    """While a write waits for the store, the Master does not notice that nodes break off."""

    def misses(self: Any) -> bool:
        nodes = self._state.nodes.values() if self._state is not None else ()
        return any(entry.registered and not entry.attached for entry in nodes)

    return mock.patch.object(MasterShell, "misses_nodes", property(misses))


BUGS: dict[str, Planted] = {
    plant.__name__: Planted(plant, within, known)
    for plant, within, known in (
        (sends_before_it_writes, 300, 1),
        (wakes_nobody_for_a_new_master, 300, 4),
        (alarm_is_not_set_again, 300, 8),
        (stream_is_kept_after_its_end, 300, 1),
        (events_are_handled_twice, 300, 40),
        (tries_without_a_pause, 300, 9),
        (lease_outlives_its_loop, 300, 11),
        (watch_goes_on_at_the_wrong_revision, 300, 44),
        (nobody_reads_a_failed_task, 300, 9),
        (end_waits_for_itself, 300, 1),
        (answer_of_the_store_is_believed_to_be_no, 1000, 148),
        (write_is_done_again_after_a_fence, 1000, 130),
        (late_write_is_not_refused, 300, 31),
        (old_lease_is_renewed, 300, 9),
        (nodes_that_broke_off_are_not_missed, 2000, 360),
    )
}


if __name__ == "__main__":
    for name, bug in BUGS.items():
        count, violation = seeds_needed(dataclasses.replace(bug, known=0))
        print(f"{name:42} {count:5}  {violation[:150]}", flush=True)
