"""Readers: processes that read and decode data for a job's trainers, kept running and known to the job.

A launcher with ``--role=reader`` does nothing else; one that trains may have some as well (``--readers=N``). Each
process has a key in the job's store, all on one lease. The Master tells the trainers which there are. Nobody waits for
readers, and none of them counts as a node: they come and go while training goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass

from edl.adapters.clock import SystemClock
from edl.config import JobSpec
from edl.errors import LeaseLost, SettingError, StoreError, StoreUnavailable, UsageError, WorkerStartError
from edl.exit_codes import ExitCode
from edl.launch.console import console
from edl.launch.launcher import SIGNALS
from edl.launch.reach import address_towards, etcd_store
from edl.launch.reader_process import ReaderProcess
from edl.launch.settings import ReaderSettings
from edl.ports import Delete, Operation, Put, Store
from edl.tasks import end
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish

SERVICE = "data"
"""The Master's service that hears of readers."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""Between the end of a reader and the start of the next, doubled each time, unless it has lived for so long."""
START_TRIES = 3
RETRY_S = 0.2
LOOK_S = 1.0
"""How often a launcher of readers looks whether the job has come or ended."""
FAREWELL_S = 0.5
"""How long the key of readers that leave is gone before they refuse: trainers hear of it meanwhile."""


def check_packages(count: int) -> None:
    """Raises ``SettingError`` when readers are asked for that could not run here."""
    if count and importlib.util.find_spec("pyarrow") is None:
        raise SettingError("--readers", count, "readers need pyarrow", "Run: pip install 'edl[data]'")


@dataclass(frozen=True, slots=True)
class Kit:
    """What a group of readers needs to know."""

    store: Store
    keys: JobKeys
    lease_ttl_s: float
    node: str
    host: str
    """Where trainers reach them."""
    count: int
    capacity: int
    grace_s: float
    """For streams under way when a reader has to end."""
    log: Callable[[str], None]


class Readers:
    """A number of reader processes, started again when they die, and their keys."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._numbers = itertools.count(1)
        self._running: dict[str, ReaderProcess] = {}
        self._changed = asyncio.Event()
        self._lease = 0
        self._away = False
        self._ever = False
        self._leaving = False

    async def run(self) -> None:
        """Until cancelled. Raises ``WorkerStartError`` when not a single reader can be started at all."""
        tasks = [asyncio.ensure_future(self._keep_keys())]
        tasks += [asyncio.ensure_future(self._keep_one()) for _ in range(self._kit.count)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._leaving = True
            for task in tasks:
                await end(task)

    async def leave(self) -> None:
        """Take the keys back, then end the processes, which finish what they stream."""
        lease, self._lease = self._lease, 0
        if lease:
            with contextlib.suppress(StoreError):
                await self._kit.store.revoke_lease(lease)
        if self._running:
            await asyncio.sleep(min(FAREWELL_S, self._kit.grace_s))
            # A reader ends by itself when its time is over; killing it is for one that cannot.
            await asyncio.gather(*(reader.stop(self._kit.grace_s + 1.0) for reader in self._running.values()))
            self._running.clear()

    def hurry(self) -> None:
        """End the processes at once."""
        for reader in self._running.values():
            reader.kill()

    # --- the processes ---------------------------------------------------------------------------------------------

    async def _keep_one(self) -> None:
        """One process after the other."""
        clock, failures = SystemClock(), 0
        while True:
            started_s = clock.now_s()
            try:
                await self._live_one()
            except WorkerStartError as error:
                if failures + 1 >= START_TRIES and not self._ever:
                    raise
                self._kit.log(str(error))
            failures = 0 if clock.now_s() - started_s > LONGEST_PAUSE_S else failures + 1
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1)))

    async def _live_one(self) -> None:
        """One process from its start to its end, with its key while it lives."""
        kit = self._kit
        reader = await ReaderProcess.start(kit.host, kit.capacity, kit.grace_s)
        name = f"{kit.node}-{next(self._numbers)}"
        self._ever = True
        self._running[name] = reader
        self._changed.set()
        kit.log(f"reader {name} (pid {reader.pid}) serves at port {reader.port}")
        try:
            how = await reader.ended()
        finally:
            if not self._leaving:  # else it is ended in good order
                self._running.pop(name, None)
                self._changed.set()
        kit.log(f"reader {name} (pid {reader.pid}) {how}; another one is started")

    # --- their keys ------------------------------------------------------------------------------------------------

    async def _keep_keys(self) -> None:
        """Keep the lease, and on it a key of each process that runs and of no other."""
        while True:
            self._changed.clear()
            try:
                await self._bring_up_to_date()
                pause_s = self._kit.lease_ttl_s / 3
                if self._away:
                    self._away = False
                    self._kit.log("the store answers again")
            except LeaseLost:
                self._lease, pause_s = 0, 0.0
            except StoreUnavailable:
                pause_s = RETRY_S
                if not self._away:
                    self._away = True
                    self._kit.log("the store does not answer: readers go on, trainers hear of new ones when it does")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause_s)

    async def _bring_up_to_date(self) -> None:
        """The store is read each time, so a key that anybody has removed comes back."""
        kit = self._kit
        if self._lease:
            await kit.store.renew_lease(self._lease)
        else:
            self._lease = await kit.store.grant_lease(kit.lease_ttl_s)
        wanted = {kit.keys.helper(SERVICE, f"readers/{name}"): self._told(one) for name, one in self._running.items()}
        snapshot = await kit.store.read(kit.keys.helper(SERVICE, f"readers/{kit.node}-"))
        there = {entry.key: entry.value for entry in snapshot.entries if entry.lease == self._lease}
        operations: list[Operation] = [Delete(key) for key in there if key not in wanted]
        operations += [Put(key, value, self._lease) for key, value in wanted.items() if there.get(key) != value]
        for begin in range(0, len(operations), 100):  # etcd takes at most 128 in one transaction
            await kit.store.write(operations[begin : begin + 100])

    def _told(self, reader: ReaderProcess) -> bytes:
        told = {
            "host": self._kit.host,
            "port": reader.port,
            "capacity": self._kit.capacity,
            "secret": reader.secret,
        }
        return json.dumps(told).encode()


class ReadersBeside:
    """Readers of a launcher that does something else. If they cannot be started, it goes on without them."""

    def __init__(self, kit: Kit) -> None:
        self._readers = Readers(kit)
        self._log = kit.log
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            await self._readers.run()
        except (StoreError, WorkerStartError) as error:
            self._log(f"no readers here: {error}")

    async def leave(self) -> None:
        """End them. Doing it twice does nothing."""
        await end(self._task)
        await self._readers.leave()


# --- the role --------------------------------------------------------------------------------------------------------


async def serve_readers(settings: ReaderSettings) -> int:
    """``--role=reader``: wait for the job, have readers while it runs; returns the exit status."""
    check_packages(settings.count)
    log = console(settings.node)
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    store = etcd_store(settings.store, settings.store.endpoints)
    party: list[Readers] = []

    def interrupt() -> None:
        for readers in party if told.is_set() else ():
            readers.hurry()
        told.set()

    for number in (one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN):
        loop.add_signal_handler(number, interrupt)
    leaving = asyncio.ensure_future(told.wait())
    work = asyncio.ensure_future(_take_part(settings, store, party, log))
    try:
        await asyncio.wait({leaving, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        log("leaving: streams under way end first")
        return int(ExitCode.OK)
    finally:
        await end(work)
        await end(leaving)
        for readers in party:
            await readers.leave()
        await store.close()


async def _take_part(settings: ReaderSettings, store: Store, party: list[Readers], log: Callable[[str], None]) -> int:
    """From the job's beginning to its end. The readers are added to ``party``; they still have to leave."""
    keys = JobKeys(settings.job)
    look = _Look(store, keys, settings.recover_s)
    spec = await look.until_there(log)
    if spec is None:
        log(look.reason)
        return int(ExitCode.OK)
    readers = Readers(
        Kit(
            store,
            keys,
            spec.timeouts.lease_ttl_s,
            settings.node,
            settings.local_addr or address_towards(settings.store.endpoints[0]),
            settings.count,
            settings.capacity,
            settings.grace_s,
            log,
        )
    )
    party.append(readers)
    running = asyncio.ensure_future(readers.run())
    watching = asyncio.ensure_future(look.until_over(spec.timeouts.recover_s))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        code = watching.result()
        log(look.reason)
        return code
    finally:
        await end(running)
        await end(watching)


class _Look:
    """Looks now and then whether the job is there."""

    def __init__(self, store: Store, keys: JobKeys, patience_s: float) -> None:
        self._store = store
        self._keys = keys
        self._patience_s = patience_s
        self._clock = SystemClock()
        self.reason = ""
        """Why the readers end."""

    async def until_there(self, log: Callable[[str], None]) -> JobSpec | None:
        """Wait for the job; None when it has just ended. Raises ``UsageError`` or ``StoreUnavailable`` in the end."""
        deadline_s, said, job = self._clock.now_s() + self._patience_s, False, self._keys.job
        while True:
            problem: StoreUnavailable | None = None
            try:
                if await self._has_ended():
                    return None
                spec = await self._value(self._keys.spec)
                if spec and await self._value(self._keys.token) and (await self._store.read(self._keys.nodes)).entries:
                    return plain.loads(JobSpec, spec)
            except StoreUnavailable as error:
                problem = error
            if self._clock.now_s() >= deadline_s:
                raise problem or UsageError(
                    f"no job {job} in this store after {self._patience_s:g} s. Check --rdzv-id and --rdzv-endpoint"
                )
            if not said:
                said = True
                log(f"waiting for job {job}" if problem is None else f"waiting for the store: {problem}")
            await asyncio.sleep(LOOK_S)

    async def until_over(self, patience_s: float) -> int:
        """Wait until the job has ended; returns the exit status. Raises ``StoreUnavailable`` after ``patience_s``."""
        seen_s = self._clock.now_s()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if await self._has_ended():
                    return int(ExitCode.OK)
                there = await self._value(self._keys.token)
                nodes = (await self._store.read(self._keys.nodes)).entries
            except StoreUnavailable:
                if self._clock.now_s() - seen_s >= patience_s:
                    raise
                continue
            if not there:
                self.reason = f"job {self._keys.job} has ended"
                return int(ExitCode.OK)
            if nodes:
                seen_s = self._clock.now_s()
            elif self._clock.now_s() - seen_s >= patience_s:
                self.reason = f"job {self._keys.job} has had no node for {patience_s:g} s"
                return int(ExitCode.NOT_ENOUGH_NODES)

    async def _has_ended(self) -> bool:
        farewell = await self._value(self._keys.farewell)
        if farewell:
            outcome = plain.loads(Finish, farewell)
            self.reason = f"job {self._keys.job} has ended: {outcome.reason}"
        return bool(farewell)

    async def _value(self, key: str) -> bytes:
        entries = (await self._store.read(key)).entries
        return next((entry.value for entry in entries if entry.key == key), b"")
