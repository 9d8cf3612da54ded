"""Helpers: processes that serve a job without being nodes of it, such as remote readers and pservers.

A launcher keeps a number of them running, beside its workers or instead of them (``--role``). Each has a key in the
job's store, under one lease of that launcher. The Master's service that uses them watches these keys. Helpers may come
and go while training continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edl.adapters.clock import SystemClock
from edl.errors import LeaseLost, StoreError, WorkerStartError
from edl.launch.helper_process import HelperProcess
from edl.launch.lease_length import LeaseLength
from edl.ports import Delete, Operation, Put, Store
from edl.rendezvous.phrases import count
from edl.tasks import end
from edl.wire.keys import JobKeys

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""Longest pause in seconds before a process that has ended is replaced. The pause starts at ``FIRST_PAUSE_S``, doubles
each time, and is reset once a process has lived this long."""
START_TRIES = 3
RETRY_S = 0.2
ANSWER_S = 1.0
"""Seconds to wait for a process's word whether a Master is in contact with it."""


class HelperKind(Protocol):
    """One kind of helper process."""

    what: str
    """Name of the kind, singular, for messages."""
    service: str
    """The Master's service that uses them."""
    folder: str
    """The folder of their keys, below the service's."""
    count: int
    """Number of processes of this launcher."""
    grace_s: float
    """Seconds that a process may take to finish its work after its key has been deleted; 0: it is killed. One that can
    be drained only gets them if it may have to write something."""
    farewell_s: float
    """Seconds between deleting the keys of leaving processes and ending them, so that clients learn of it first."""
    drain_s: float
    """Seconds to wait for draining processes, whose keys stay; 0: they are not drained."""
    fenced: bool
    """Whether processes must not outlive their keys, because others take over their data once the keys are gone."""

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        """Start process number ``index``, from 0. ``name``: its name in the store. ``host``: address of this node.
        Raises ``WorkerStartError``."""
        ...

    def key_content(self, process: HelperProcess, host: str) -> Mapping[str, Any]:
        """The content of a process's key, to be written as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class HelperDeps:
    """What a group of helper processes gets from its launcher."""

    store: Store
    keys: JobKeys
    lease_ttl_s: float
    node: str
    host: str
    """Address at which trainers reach the helpers."""
    log: Callable[[str], None]


class Helpers:
    """A group of helper processes of one kind and their keys. A process that ends is replaced."""

    def __init__(self, deps: HelperDeps, kind: HelperKind) -> None:
        self._deps = deps
        self._kind = kind
        self._clock = SystemClock()
        self._numbers: Iterator[int] | None = None
        """Free numbers for names."""
        self._numbers_known = asyncio.Event()
        """Set once ``_numbers`` is."""
        self._running: dict[str, HelperProcess] = {}
        """Processes by name."""
        self._changed = asyncio.Event()
        """Set when the keys have to be updated."""
        self._lease = 0
        """The lease of the keys; 0: none."""
        self._length = LeaseLength(deps.lease_ttl_s)
        self._renewed_s = self._clock.now_s()
        """When the last successful renewal was sent."""
        self._store_down = False
        self._ever_started = False
        self._leaving = False
        self._drain_by_s: float | None = None
        """When draining ends; None: not draining."""
        self._alone = False
        """Whether no process of another launcher is left that could take over."""

    async def run(self) -> None:
        """Run the processes until cancelled. Raises ``WorkerStartError`` if no process has ever started and one has
        failed ``START_TRIES`` times."""
        tasks = [asyncio.ensure_future(self._keep_keys())]
        tasks += [asyncio.ensure_future(self._keep_one(index)) for index in range(self._kind.count)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._leaving = True
            for task in tasks:
                await end(task)

    def drain(self) -> None:
        """Ask the processes to end as soon as others have taken over their data. ``run`` must continue meanwhile."""
        if self._kind.drain_s and self._drain_by_s is None:
            self._drain_by_s = self._clock.now_s() + self._kind.drain_s
            self._alone = False  # others may have started since the store was read
            for process in self._running.values():
                process.ask_to_end()
            self._changed.set()

    async def drained(self) -> None:
        """Wait until the draining processes have ended. Returns early after ``drain_s`` seconds, or if no other process
        can take over."""
        while self._running and self._drain_by_s is not None and self._clock.now_s() < self._drain_by_s:
            if self._alone:
                self._deps.log(
                    f"no other {self._kind.what} can take over from those here: ending them without draining"
                )
                return
            await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Delete the keys, then end the processes, which have ``grace_s`` seconds to finish their work."""
        lease, self._lease = self._lease, 0
        if lease:
            with contextlib.suppress(StoreError):
                await self._deps.store.revoke_lease(lease)
        if self._running:
            await asyncio.sleep(self._kind.farewell_s)
            # A process ends by itself after its grace; only one that hangs is killed.
            grace_s = self._kind.grace_s + 1.0 if self._kind.grace_s else 0.0
            drains = self._kind.drain_s > 0
            ends = (
                process.stop(grace_s if process.writes or not drains else 0.0, drains=drains)
                for process in self._running.values()
            )
            await asyncio.gather(*ends)
            self._running.clear()

    def kill(self) -> None:
        """Send SIGKILL to all processes."""
        for process in self._running.values():
            process.kill()

    # --- the processes ---------------------------------------------------------------------------------------------

    async def _keep_one(self, index: int) -> None:
        """Keep process number ``index`` running: start another one whenever it ends."""
        await self._numbers_known.wait()
        failures = 0
        while self._drain_by_s is None:
            started_s = self._clock.now_s()
            try:
                await self._run_one(index)
            except WorkerStartError as error:
                if failures + 1 >= START_TRIES and not self._ever_started:
                    raise
                self._deps.log(str(error))
            failures = 0 if self._clock.now_s() - started_s > LONGEST_PAUSE_S else failures + 1
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1)))
        await asyncio.Event().wait()  # ends together with ``run``

    async def _run_one(self, index: int) -> None:
        """Run one process from its start to its end. It has a key while it is in ``_running``."""
        deps, what = self._deps, self._kind.what
        assert self._numbers is not None  # noqa: S101 - set before the event is
        name = f"{deps.node}-{next(self._numbers)}"
        process = await self._kind.start(index, name, deps.host)
        self._ever_started = True
        self._running[name] = process
        self._changed.set()
        deps.log(f"{what} {name} (pid {process.pid}) listens on port {process.ready['port']}")
        if self._drain_by_s is not None:
            process.ask_to_end()
        try:
            how = await process.ended()
        finally:
            if not self._leaving:  # otherwise ``leave`` ends it
                self._running.pop(name, None)
                self._changed.set()
        following = "" if self._drain_by_s is not None else "; starting another one"
        deps.log(f"{what} {name} (pid {process.pid}) {how}{following}")

    # --- their keys ------------------------------------------------------------------------------------------------

    async def _keep_keys(self) -> None:
        """Renew the lease, and keep one key under it for each running process, until cancelled."""
        what = self._kind.what
        while True:
            self._changed.clear()
            try:
                await self._renew_and_sync()
                pause_s = self._deps.lease_ttl_s / 3  # also of a longer lease: its end must be noticed soon
                if self._store_down:
                    self._store_down = False
                    self._deps.log("the store answers again")
            except LeaseLost:
                self._lease, pause_s = 0, 0.0
                self._length.lost(self._clock.now_s())
                await self._lease_ended()
            except StoreError as error:  # also one that refuses by now: decision 0035
                pause_s = RETRY_S
                if not self._store_down:
                    self._store_down = True
                    why = f"refuses ({error})" if error.definite else "does not answer"
                    self._deps.log(
                        f"the store {why}: {what}s continue; trainers learn of new ones when it answers again"
                    )
                self._fence_if_isolated()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause_s)

    async def _lease_ended(self) -> None:
        """Fence processes with which no Master has been in contact. A store whose leader was frozen ends all leases at
        once, also those that were renewed meanwhile, and nobody has taken over: the other processes get keys of the
        same names under a new lease. Should a Master have taken one for dead after all, it gets another number from it
        and drops its data."""
        if not self._kind.fenced:
            return
        await asyncio.gather(*(process.look(ANSWER_S) for process in self._running.values()))
        without = [name for name, process in self._running.items() if process.masterless]
        self._fence(without, "their lease has expired and others take over")
        if self._running:
            running = count(len(self._running), self._kind.what)
            verb = "continues" if len(self._running) == 1 else "continue"
            self._deps.log(f"the lease has ended: {running} {verb} under a new one, as a Master knows them")

    def _fence_if_isolated(self) -> None:
        """Fence the processes if neither the store nor a Master has been reachable for the lease time: others may have
        taken over."""
        late = self._clock.now_s() - self._renewed_s >= self._deps.lease_ttl_s
        if late and self._running and all(process.masterless for process in self._running.values()):
            self._fence(
                self._running, f"neither the store nor a Master could be reached for {self._deps.lease_ttl_s:g} s"
            )

    def _fence(self, names: Iterable[str], why: str) -> None:
        """Kill these processes, if they are of a fenced kind; ``run`` replaces them under new names."""
        # Removed now: until the ends are noticed, their keys would be written again.
        fenced = [self._running.pop(name) for name in list(names)] if self._kind.fenced else []
        if fenced:
            self._deps.log(f"killing {len(fenced)} {self._kind.what}s: {why}")
        for process in fenced:
            process.kill()

    async def _renew_and_sync(self) -> None:
        """Renew the lease, or take a new one, and make the keys in the store match the running processes. It reads the
        store each time, so a deleted key is written again. Raises ``LeaseLost`` and other errors of the store."""
        deps, folder = self._deps, self._kind.folder
        sent_s = self._clock.now_s()
        if self._lease:
            await deps.store.renew_lease(self._lease)
        else:
            self._lease = await deps.store.grant_lease(self._length.next_s(sent_s))
        self._renewed_s = sent_s
        here = deps.keys.helper(self._kind.service, f"{folder}/{deps.node}-")
        snapshot = await deps.store.read(deps.keys.helper(self._kind.service, f"{folder}/"))
        mine = [entry for entry in snapshot.entries if _number(entry.key, here)]
        self._alone = all(entry in mine or _drains(entry.value) for entry in snapshot.entries)
        if self._numbers is None:
            # An earlier launcher of this name may have just died: do not reuse the names of its processes.
            self._numbers = itertools.count(1 + max((_number(entry.key, here) for entry in mine), default=0))
            self._numbers_known.set()
        wanted = {
            deps.keys.helper(self._kind.service, f"{folder}/{n}"): self._key_content(p)
            for n, p in self._running.items()
        }
        there = {entry.key: entry.value for entry in mine if entry.lease == self._lease}
        operations: list[Operation] = [Delete(key) for key in there if key not in wanted]
        operations += [Put(key, value, self._lease) for key, value in wanted.items() if there.get(key) != value]
        for begin in range(0, len(operations), 100):  # etcd accepts at most 128 operations in one transaction
            await deps.store.write(operations[begin : begin + 100])

    def _key_content(self, process: HelperProcess) -> bytes:
        content = dict(self._kind.key_content(process, self._deps.host))
        if self._drain_by_s is not None:
            content["draining"] = True
        return json.dumps(content).encode()


def _number(key: str, prefix: str) -> int:
    """The number of a launcher's process, whose keys begin with ``prefix``; 0: the key is another launcher's, whose
    name may begin like this one's."""
    text = key.removeprefix(prefix)
    return int(text) if text.isdecimal() else 0


def _drains(value: bytes) -> bool:
    """Whether the content of a key marks its process as draining."""
    try:
        return bool(json.loads(value).get("draining"))
    except (ValueError, AttributeError):
        return False


class HelperProcesses:
    """Helpers of a launcher that also runs workers. If they cannot be started, the launcher continues without them."""

    def __init__(self, deps: HelperDeps, kind: HelperKind) -> None:
        self._helpers = Helpers(deps, kind)
        self._what = kind.what
        self._log = deps.log
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            await self._helpers.run()
        except WorkerStartError as error:
            self._log(f"continuing without {self._what}s on this node: {error}")
        except Exception as error:  # noqa: BLE001 -- otherwise nobody would learn of it until the node leaves
            text = "".join(traceback.format_exception(error))
            self._log(f"continuing without {self._what}s on this node. This is a bug in edl, please report it: {text}")
            await self._helpers.leave()

    def drain(self) -> None:
        """See ``edl.launch.launcher.Sidecar``."""
        self._helpers.drain()

    def hurry(self) -> None:
        """See ``edl.launch.launcher.Sidecar``."""
        self._helpers.kill()
        self._helpers.drain()  # so that none is started in their place

    async def leave(self) -> None:
        """Wait for draining helpers, then end all. May be called more than once."""
        if not self._task.done():
            await self._helpers.drained()
        await end(self._task)
        await self._helpers.leave()
