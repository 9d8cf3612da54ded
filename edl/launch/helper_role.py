"""A launcher that has only helpers (``--role=reader``, ``--role=pserver``): it waits for a job, and runs helpers until
the job ends. If the job is founded again meanwhile, helpers with its new settings and secret replace the present ones.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass

from edl import __version__
from edl.adapters.clock import SystemClock
from edl.config import JobSpec
from edl.errors import ForeignJob, SettingError, StoreError, StoreUnavailable, UsageError
from edl.exit_codes import ExitCode
from edl.launch.addresses import etcd_store, reachable_address
from edl.launch.console import console
from edl.launch.helpers import HelperDeps, HelperKind, Helpers
from edl.launch.leave_signals import handled_signals
from edl.launch.settings import HelperSettings
from edl.ports import Store
from edl.tasks import end
from edl.types import JobId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish
from edl.wire.release import compatible, founder_of, refusal
from edl.wire.secret import Secret, described, described_own, token_of

LOOK_S = 1.0
"""Seconds between two polls of the store: has the job begun, has it ended, has it been founded again?"""

MakeKind = Callable[[JobSpec, str], HelperKind]
"""A function from a job's settings and its token to the kind of helpers."""


class _Departure:
    """Makes the helpers of a launcher leave. The second signal to leave kills them."""

    def __init__(self) -> None:
        self.groups: list[Helpers] = []
        """Those that are running; at most one but for a moment."""
        self.begun = asyncio.Event()
        self._signalled = False

    def announced(self) -> None:
        """Handle a signal that announces another one, as Slurm's before its SIGTERM: it is not counted."""
        for helpers in self.groups:
            helpers.drain()
        self.begun.set()

    def interrupted(self) -> None:
        """Handle a signal to leave."""
        if self._signalled:
            for helpers in self.groups:
                helpers.kill()
        self._signalled = True
        self.announced()


async def serve_helpers(settings: HelperSettings, make: MakeKind, leaving_text: str) -> int:
    """Run a launcher that has only helpers: wait for the job, and run them until it ends; returns the exit status.
    ``leaving_text``: log line for a signal to leave."""
    log = console(settings.node)
    loop, departure = asyncio.get_running_loop(), _Departure()
    store = etcd_store(settings.store, settings.store.endpoints)
    for number in handled_signals():
        loop.add_signal_handler(number, departure.interrupted)
    loop.add_signal_handler(signal.SIGUSR2, departure.announced)
    leaving = asyncio.ensure_future(departure.begun.wait())
    work = asyncio.ensure_future(_take_part(settings, store, departure.groups, make, log))
    try:
        await asyncio.wait({leaving, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        log(leaving_text)
        for helpers in departure.groups:
            await helpers.drained()
        return int(ExitCode.OK)
    finally:
        await end(work)
        await end(leaving)
        for helpers in departure.groups:
            await helpers.leave()
        await store.close()


async def _take_part(
    settings: HelperSettings, store: Store, groups: list[Helpers], make: MakeKind, log: Callable[[str], None]
) -> int:
    """Run helpers from the beginning of the job to its end; returns the exit status. They are in ``groups`` until they
    have left; the caller ends those that have not."""
    keys = JobKeys(settings.job)
    poll = _JobPoll(store, keys, settings.recover_s, settings.store.secret, __version__)
    while True:
        job = await poll.until_begun(log)
        if job is None:
            log(poll.reason)
            return int(ExitCode.OK)
        host = reachable_address(settings.local_addr, settings.store.endpoints, job.spec.nodes.maximum, log)
        deps = HelperDeps(store, keys, job.spec.timeouts.lease_ttl_s, settings.node, host, log)
        helpers = Helpers(deps, make(job.spec, job.token))
        groups.append(helpers)
        code = await _run_until_ended(helpers, poll, job)
        log(poll.reason)
        if code is not None:
            return code
        await helpers.leave()
        groups.remove(helpers)


async def _run_until_ended(helpers: Helpers, poll: _JobPoll, job: _FoundedJob) -> int | None:
    """Run these helpers until the job ends, or is founded again; see ``_JobPoll.until_ended``."""
    running = asyncio.ensure_future(helpers.run())
    watching = asyncio.ensure_future(poll.until_ended(job))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        return watching.result()
    finally:
        await end(running)
        await end(watching)


@dataclass(frozen=True, slots=True)
class _FoundedJob:
    """The job as one of its launchers has founded it. After the loss of all launchers, another one may found it again,
    with other settings."""

    spec: JobSpec
    token: str
    founding: tuple[bytes, bytes]
    """The token and the run as the store has them. Each founding writes another token, or with a secret another run."""


class _JobPoll:
    """Polls the store for the beginning and the end of the job."""

    def __init__(self, store: Store, keys: JobKeys, timeout_s: float, secret: Secret | None, version: str) -> None:
        """``version``: this launcher's version of edl."""
        self._secret = secret
        self._version = version
        self._store = store
        self._keys = keys
        self._timeout_s = timeout_s
        self._clock = SystemClock()
        self.reason = ""
        """Why the helpers end, for the log."""

    async def until_begun(self, log: Callable[[str], None]) -> _FoundedJob | None:
        """Wait for the job; returns None if it has just ended. Raises ``UsageError`` or ``StoreUnavailable`` after
        ``timeout_s`` seconds, ``SettingError`` if the job has another secret, and ``ForeignJob`` if it has a version of
        edl that is not compatible."""
        deadline_s, said, job = self._clock.now_s() + self._timeout_s, False, self._keys.job
        while True:
            problem: StoreUnavailable | None = None
            try:
                if await self._has_ended():
                    return None
                # Before the settings: should the job be founded again meanwhile, ``until_ended`` notices it.
                founding = await self._founding()
                spec = await self._value(self._keys.spec)
                if spec and founding[0] and (await self._store.read(self._keys.nodes)).entries:
                    self._refuse_other_version(await self._value(self._keys.origin))
                    return _FoundedJob(plain.loads(JobSpec, spec), self._read_token(founding[0]), founding)
            except StoreUnavailable as error:
                problem = error
            if self._clock.now_s() >= deadline_s:
                raise problem or _no_job(job, self._timeout_s)
            if not said:
                said = True
                log(f"waiting for job {job}" if problem is None else f"waiting for the store: {problem}")
            await asyncio.sleep(LOOK_S)

    async def until_ended(self, job: _FoundedJob) -> int | None:
        """Wait until the job has ended, or has had no node for its ``--recover-timeout``; returns the exit status, or
        None once the job has been founded again. Raises ``StoreError`` if the store does not answer or refuses for that
        long."""
        seen_s, timeout_s, name = self._clock.now_s(), job.spec.timeouts.recover_s, self._keys.job
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if await self._has_ended():
                    return int(ExitCode.OK)
                founding = await self._founding()
                nodes = (await self._store.read(self._keys.nodes)).entries
            except StoreError:  # also one that refuses by now: decision 0035
                if self._clock.now_s() - seen_s >= timeout_s:
                    raise
                continue
            if not founding[0]:
                self.reason = f"job {name} has ended"
                return int(ExitCode.OK)
            if founding != job.founding:
                self.reason = f"job {name} has been founded again: replacing all processes of this launcher"
                return None
            if nodes:
                seen_s = self._clock.now_s()
            elif self._clock.now_s() - seen_s >= timeout_s:
                self.reason = f"job {name} has had no node for {timeout_s:g} s"
                return int(ExitCode.NOT_ENOUGH_NODES)

    async def _has_ended(self) -> bool:
        farewell = await self._value(self._keys.farewell)
        if farewell:
            outcome = plain.loads(Finish, farewell)
            self.reason = f"job {self._keys.job} has ended: {outcome.reason}"
        return bool(farewell)

    async def _founding(self) -> tuple[bytes, bytes]:
        return await self._value(self._keys.token), await self._value(self._keys.run)

    def _refuse_other_version(self, origin: bytes) -> None:
        founder = founder_of(origin)
        if not compatible(self._version, founder.edl):
            raise ForeignJob(refusal(self._keys.job, self._version, founder))

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
