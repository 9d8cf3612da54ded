"""Helpers: processes that serve a job without being nodes of it, such as remote readers and pservers.

A launcher keeps a number of them running, beside its workers or instead of them (``--role``). Each has a key in the
job's store, all under one lease of that launcher; the Master's service that uses them learns of them from these keys.
They may come and go while training continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edl.adapters.clock import SystemClock
from edl.config import JobSpec
from edl.errors import LeaseLost, SettingError, StoreError, StoreUnavailable, UsageError, WorkerStartError
from edl.exit_codes import ExitCode
from edl.launch.addresses import address_towards, etcd_store
from edl.launch.console import console
from edl.launch.helper_process import HelperProcess
from edl.launch.launcher import SIGNALS
from edl.launch.settings import HelperSettings
from edl.ports import Delete, Operation, Put, Store
from edl.tasks import end
from edl.types import JobId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish
from edl.wire.secret import Secret, described, described_own, token_of

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""Longest pause in seconds between the end of a process and the start of the next one. The pause doubles each time,
until a process has lived this long."""
START_TRIES = 3
RETRY_S = 0.2
LOOK_S = 1.0
"""Seconds between two checks of a launcher without workers whether the job has begun or ended."""


class HelperKind(Protocol):
    """One kind of helper process."""

    what: str
    """Name of the kind, for messages."""
    service: str
    """The Master's service that uses them."""
    folder: str
    """The folder of their keys, below the service's."""
    count: int
    grace_s: float
    """Seconds that a process may take to finish its work after its key has been deleted; 0: it is killed."""
    farewell_s: float
    """Seconds between deleting the keys of leaving processes and ending them, so that others learn of it first."""
    drain_s: float
    """Seconds to wait for processes that were asked to end, while their keys stay; 0: no wait."""
    fenced: bool
    """Others take over their data once the keys are gone, so the processes must not outlive their keys."""

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        """Start process number ``index``. Raises ``WorkerStartError``."""
        ...

    def key_content(self, process: HelperProcess, host: str) -> Mapping[str, Any]:
        """The content of the key of a process."""
        ...


@dataclass(frozen=True, slots=True)
class HelperDeps:
    """Dependencies of a group of helper processes on its launcher."""

    store: Store
    keys: JobKeys
    lease_ttl_s: float
    node: str
    host: str
    """Address at which trainers reach the helpers."""
    log: Callable[[str], None]


class Helpers:
    """A group of helper processes, restarted when they die, and their keys."""

    def __init__(self, deps: HelperDeps, kind: HelperKind) -> None:
        self._deps = deps
        self._kind = kind
        self._clock = SystemClock()
        self._numbers: Iterator[int] | None = None
        self._known = asyncio.Event()
        """Set once the free numbers for names are known."""
        self._running: dict[str, HelperProcess] = {}
        self._changed = asyncio.Event()
        self._lease = 0
        self._renewed_s = self._clock.now_s()
        self._away = False
        self._ever = False
        self._leaving = False
        self._drain_by_s: float | None = None
        self._alone = False

    async def run(self) -> None:
        """Run the processes until cancelled. Raises ``WorkerStartError`` if the first process cannot be started after
        ``START_TRIES`` attempts."""
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
        """Ask the processes to end once others have taken over their data. ``run`` must continue meanwhile."""
        if self._kind.drain_s and self._drain_by_s is None:
            self._drain_by_s = self._clock.now_s() + self._kind.drain_s
            self._alone = False  # others may have come since the store was read
            for process in self._running.values():
                process.ask_to_end()
            self._changed.set()

    async def drained(self) -> None:
        """Wait until the processes that were asked to end have ended. Returns earlier if their time is over, or if
        there is no other process to take over."""
        while self._running and self._drain_by_s is not None and self._clock.now_s() < self._drain_by_s:
            if self._alone:
                self._deps.log(f"there is no other {self._kind.what} to take over from those here")
                return
            await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Delete the keys, then end the processes, which may finish their work."""
        lease, self._lease = self._lease, 0
        if lease:
            with contextlib.suppress(StoreError):
                await self._deps.store.revoke_lease(lease)
        if self._running:
            await asyncio.sleep(self._kind.farewell_s)
            # A process ends by itself when its time is over; only one that hangs is killed.
            grace_s = self._kind.grace_s + 1.0 if self._kind.grace_s else 0.0
            await asyncio.gather(*(process.stop(grace_s) for process in self._running.values()))
            self._running.clear()

    def hurry(self) -> None:
        """Kill the processes at once."""
        for process in self._running.values():
            process.kill()

    # --- the processes ---------------------------------------------------------------------------------------------

    async def _keep_one(self, index: int) -> None:
        """Keep process number ``index`` running: start another one whenever it ends."""
        await self._known.wait()
        failures = 0
        while self._drain_by_s is None:
            started_s = self._clock.now_s()
            try:
                await self._live_one(index)
            except WorkerStartError as error:
                if failures + 1 >= START_TRIES and not self._ever:
                    raise
                self._deps.log(str(error))
            failures = 0 if self._clock.now_s() - started_s > LONGEST_PAUSE_S else failures + 1
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1)))
        await asyncio.Event().wait()  # ends together with ``run``

    async def _live_one(self, index: int) -> None:
        """Run one process from its start to its end, with its key while it lives."""
        deps, what = self._deps, self._kind.what
        assert self._numbers is not None  # noqa: S101 - set before the event is
        name = f"{deps.node}-{next(self._numbers)}"
        process = await self._kind.start(index, name, deps.host)
        self._ever = True
        self._running[name] = process
        self._changed.set()
        deps.log(f"{what} {name} (pid {process.pid}) serves on port {process.ready['port']}")
        if self._drain_by_s is not None:
            process.ask_to_end()
        try:
            how = await process.ended()
        finally:
            if not self._leaving:  # otherwise ``leave`` ends it in good order
                self._running.pop(name, None)
                self._changed.set()
        more = "" if self._drain_by_s is not None else "; starting another one"
        deps.log(f"{what} {name} (pid {process.pid}) {how}{more}")

    # --- their keys ------------------------------------------------------------------------------------------------

    async def _keep_keys(self) -> None:
        """Renew the lease, and keep under it a key for each running process and no other."""
        what = self._kind.what
        while True:
            self._changed.clear()
            try:
                await self._bring_up_to_date()
                pause_s = self._deps.lease_ttl_s / 3
                if self._away:
                    self._away = False
                    self._deps.log("the store answers again")
            except LeaseLost:
                self._lease, pause_s = 0, 0.0
                self._fence("their lease has expired and others take over")
            except StoreUnavailable:
                pause_s = RETRY_S
                if not self._away:
                    self._away = True
                    self._deps.log(
                        f"the store does not answer: {what}s continue; trainers learn of new ones when it answers"
                    )
                self._look_around()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause_s)

    def _look_around(self) -> None:
        """Fence the processes if neither the store nor a Master was reachable for the duration of the lease: others may
        have taken over."""
        late = self._clock.now_s() - self._renewed_s >= self._deps.lease_ttl_s
        if late and self._running and all(process.masterless for process in self._running.values()):
            self._fence(f"neither the store nor a Master could be reached for {self._deps.lease_ttl_s:g} s")

    def _fence(self, why: str) -> None:
        if self._kind.fenced and self._running:
            self._deps.log(f"killing {len(self._running)} {self._kind.what}s: {why}")
            self.hurry()
            # Their keys must not come back, not even until their ends are noticed.
            self._running.clear()

    async def _bring_up_to_date(self) -> None:
        """Renew the lease and correct the keys in the store. It reads the store each time, so a key that was removed
        comes back."""
        deps, folder = self._deps, self._kind.folder
        sent_s = self._clock.now_s()
        if self._lease:
            await deps.store.renew_lease(self._lease)
        else:
            self._lease = await deps.store.grant_lease(deps.lease_ttl_s)
        self._renewed_s = sent_s
        here = deps.keys.helper(self._kind.service, f"{folder}/{deps.node}-")
        snapshot = await deps.store.read(deps.keys.helper(self._kind.service, f"{folder}/"))
        self._alone = all(entry.key.startswith(here) or _drains(entry.value) for entry in snapshot.entries)
        mine = [entry for entry in snapshot.entries if entry.key.startswith(here)]
        if self._numbers is None:
            # A launcher of the same name may have just died: do not reuse the names of its processes.
            self._numbers = itertools.count(1 + max((_number(entry.key) for entry in mine), default=0))
            self._known.set()
        wanted = {
            deps.keys.helper(self._kind.service, f"{folder}/{n}"): self._key_content(p)
            for n, p in self._running.items()
        }
        there = {entry.key: entry.value for entry in mine if entry.lease == self._lease}
        operations: list[Operation] = [Delete(key) for key in there if key not in wanted]
        operations += [Put(key, value, self._lease) for key, value in wanted.items() if there.get(key) != value]
        for begin in range(0, len(operations), 100):  # etcd takes at most 128 in one transaction
            await deps.store.write(operations[begin : begin + 100])

    def _key_content(self, process: HelperProcess) -> bytes:
        content = dict(self._kind.key_content(process, self._deps.host))
        if self._drain_by_s is not None:
            content["draining"] = True
        return json.dumps(content).encode()


def _number(key: str) -> int:
    text = key.rpartition("-")[2]
    return int(text) if text.isdecimal() else 0


def _drains(value: bytes) -> bool:
    """Whether the content of a key says that its process is draining."""
    try:
        return bool(json.loads(value).get("draining"))
    except (ValueError, AttributeError):
        return False


class HelpersBeside:
    """Helpers of a launcher that also runs workers. If they cannot be started, it continues without them."""

    def __init__(self, deps: HelperDeps, kind: HelperKind) -> None:
        self._helpers = Helpers(deps, kind)
        self._what = kind.what
        self._log = deps.log
        self._signalled = False
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            await self._helpers.run()
        except (StoreError, WorkerStartError) as error:
            self._log(f"no {self._what}s here: {error}")

    def interrupt(self) -> None:
        """Drain the helpers, because the launcher is leaving; the second call kills them."""
        if self._signalled:
            self._helpers.hurry()
        self._signalled = True
        self._helpers.drain()

    async def leave(self) -> None:
        """End the helpers. A second call does nothing."""
        if not self._task.done():
            await self._helpers.drained()
        await end(self._task)
        await self._helpers.leave()


# --- the role --------------------------------------------------------------------------------------------------------


MakeKind = Callable[[JobSpec, str], HelperKind]
"""Makes the kind of helpers for a job with these settings and this token."""


async def serve_helpers(settings: HelperSettings, make: MakeKind, leaving_text: str) -> int:
    """Run a launcher that has only helpers: wait for the job, run them until it ends; returns the exit status."""
    log = console(settings.node)
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()
    store = etcd_store(settings.store, settings.store.endpoints)
    party: list[Helpers] = []

    def interrupt() -> None:
        for helpers in party:
            (helpers.hurry if interrupted.is_set() else helpers.drain)()
        interrupted.set()

    for number in (one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN):
        loop.add_signal_handler(number, interrupt)
    # SIGUSR2 announces SIGTERM.
    loop.add_signal_handler(signal.SIGUSR2, lambda: None if interrupted.is_set() else interrupt())
    leaving = asyncio.ensure_future(interrupted.wait())
    work = asyncio.ensure_future(_take_part(settings, store, party, make, log))
    try:
        await asyncio.wait({leaving, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        log(leaving_text)
        for helpers in party:
            await helpers.drained()
        return int(ExitCode.OK)
    finally:
        await end(work)
        await end(leaving)
        for helpers in party:
            await helpers.leave()
        await store.close()


async def _take_part(
    settings: HelperSettings, store: Store, party: list[Helpers], make: MakeKind, log: Callable[[str], None]
) -> int:
    """Run helpers from the beginning of the job to its end. They are added to ``party``; the caller ends them."""
    keys = JobKeys(settings.job)
    look = _Look(store, keys, settings.recover_s, settings.store.secret)
    found = await look.until_there(log)
    if found is None:
        log(look.reason)
        return int(ExitCode.OK)
    spec, token = found
    host = settings.local_addr or address_towards(settings.store.endpoints[0])
    helpers = Helpers(HelperDeps(store, keys, spec.timeouts.lease_ttl_s, settings.node, host, log), make(spec, token))
    party.append(helpers)
    running = asyncio.ensure_future(helpers.run())
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
    """Polls the store for the beginning and the end of the job."""

    def __init__(self, store: Store, keys: JobKeys, timeout_s: float, secret: Secret | None) -> None:
        self._secret = secret
        self._store = store
        self._keys = keys
        self._timeout_s = timeout_s
        self._clock = SystemClock()
        self.reason = ""
        """The reason why the launcher ends."""

    async def until_there(self, log: Callable[[str], None]) -> tuple[JobSpec, str] | None:
        """Wait for the job; returns its settings and its token, or None if it has just ended. Raises ``UsageError`` or
        ``StoreUnavailable`` when the time is over, and ``SettingError`` for another secret."""
        deadline_s, said, job = self._clock.now_s() + self._timeout_s, False, self._keys.job
        while True:
            problem: StoreUnavailable | None = None
            try:
                if await self._has_ended():
                    return None
                spec, token = await self._value(self._keys.spec), await self._value(self._keys.token)
                if spec and token and (await self._store.read(self._keys.nodes)).entries:
                    return plain.loads(JobSpec, spec), self._read_token(token)
            except StoreUnavailable as error:
                problem = error
            if self._clock.now_s() >= deadline_s:
                raise problem or _no_job(job, self._timeout_s)
            if not said:
                said = True
                log(f"waiting for job {job}" if problem is None else f"waiting for the store: {problem}")
            await asyncio.sleep(LOOK_S)

    async def until_over(self, timeout_s: float) -> int:
        """Wait until the job has ended; returns the exit status. Raises ``StoreUnavailable`` after ``timeout_s``."""
        seen_s = self._clock.now_s()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if await self._has_ended():
                    return int(ExitCode.OK)
                there = await self._value(self._keys.token)
                nodes = (await self._store.read(self._keys.nodes)).entries
            except StoreUnavailable:
                if self._clock.now_s() - seen_s >= timeout_s:
                    raise
                continue
            if not there:
                self.reason = f"job {self._keys.job} has ended"
                return int(ExitCode.OK)
            if nodes:
                seen_s = self._clock.now_s()
            elif self._clock.now_s() - seen_s >= timeout_s:
                self.reason = f"job {self._keys.job} has had no node for {timeout_s:g} s"
                return int(ExitCode.NOT_ENOUGH_NODES)

    async def _has_ended(self) -> bool:
        farewell = await self._value(self._keys.farewell)
        if farewell:
            outcome = plain.loads(Finish, farewell)
            self.reason = f"job {self._keys.job} has ended: {outcome.reason}"
        return bool(farewell)

    def _read_token(self, stored: bytes) -> str:
        token = token_of(stored, self._secret, self._keys.job)
        if token is None:
            what = f"job {self._keys.job} has {described(stored)}, and this launcher has {described_own(self._secret)}"
            raise SettingError("--secret-file", "''", what, "Give all launchers of a job the same secret")
        return token

    async def _value(self, key: str) -> bytes:
        entries = (await self._store.read(key)).entries
        return next((entry.value for entry in entries if entry.key == key), b"")


def _no_job(job: JobId, timeout_s: float) -> UsageError:
    return UsageError(f"no job {job} in this store after {timeout_s:g} s. Check --rdzv-id and --rdzv-endpoint")
