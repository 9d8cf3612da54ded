"""Runs the parts of one launcher (store member, registration, election, agent) until its node leaves or the job
ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edl.adapters.etcd_room import keep_room
from edl.adapters.etcd_server import EtcdMember
from edl.agent.machine.events import Interrupted, LeaseGone, Noticed
from edl.agent.machine.state import Outcome
from edl.agent.shell import AgentShell
from edl.errors import StoreError
from edl.exit_codes import ExitCode
from edl.launch.console import exit_at_once
from edl.launch.leave_signals import SIGNALS, handled_signals
from edl.launch.preemption_notices import Poller
from edl.launch.registration import JobEnded, Registration
from edl.launch.settings import LeaveSettings
from edl.launch.temporary_files import keep_temporary
from edl.master.candidate import Candidate
from edl.master.history import KEPT
from edl.master.shell import COMPANIONS_S, MasterShell
from edl.ports import ChangeKind, Clock, Store
from edl.tasks import Backoff, end
from edl.types import Incarnation, JobId
from edl.wire.keys import JobKeys
from edl.wire.records import Failure, NodeInfo
from edl.wire.status import HistoryEntry

FAREWELL_S = 6.0
"""Seconds that a launcher whose job has ended waits for the other nodes: as the Master until they know of the end, as a
member of the store until they have left."""

REPORT_S = 5.0
"""Seconds that an ending launcher waits for its report to be written to disk."""

AT_ONCE = 3
"""The third signal ends the launcher at once. The first makes the node leave gracefully, the second kills its
workers."""

MEMBER_PAUSE_S = 1.0
LONGEST_MEMBER_PAUSE_S = 30.0
"""Longest pause in seconds between two starts of a store member that keeps ending; each is twice the previous one."""


class Sidecar(Protocol):
    """Processes of a launcher that are not its workers."""

    def drain(self) -> None:
        """Called once or more when this node begins to leave a job that goes on without it: begin to pass on what
        others need."""
        ...

    def hurry(self) -> None:
        """Called at the second signal to leave: stop waiting for others."""
        ...

    async def leave(self) -> None:
        """End the processes and wait until they have ended. Without ``drain`` before, the job has ended, and nobody
        needs anything of them."""
        ...


class ListeningServer(Protocol):
    """The launcher's server, which other launchers connect to."""

    async def stop(self) -> None:
        """Stop listening; open streams end."""
        ...


class LocalJobFile(Protocol):
    """A file on this host from which ``edl status`` and the like find the job's store."""

    def write(self) -> None:
        """Create or replace the file."""
        ...

    def keep(self) -> None:
        """Write the file again if somebody has removed it."""
        ...

    def remove(self) -> None:
        """Delete the file, if it exists."""
        ...


class ReportFiles(Protocol):
    """Writes how the job has ended; implemented by ``edl.launch.reporting.Reporter``."""

    @property
    def folder(self) -> str:
        """The folder of the files."""
        ...

    def keep(self, status: int, reason: str, failures: Sequence[Failure], history: Sequence[HistoryEntry]) -> None:
        """Write the files; blocks on the disk. ``status``: exit status of the launcher."""
        ...


class LeaseRenewer(Protocol):
    """Renews the lease while the event loop is busy; implemented by ``LeaseGuard``."""

    def holds(self, lease: int, asked_s: float, lease_s: float) -> None:
        """Called when the lease of ``lease_s`` seconds was granted or renewed by a request sent at ``asked_s``.
        ``lease`` 0: the launcher has none."""
        ...

    def end(self) -> None:
        """Stop renewing; does not wait for a renewal that has begun."""
        ...


@dataclass(slots=True)
class LauncherDeps:
    """The parts of a launcher, built by ``edl.launch.compose``."""

    job: JobId
    clock: Clock
    store: Store
    member: EtcdMember | None
    server: ListeningServer
    registration: Registration
    candidate: Candidate
    agent: AgentShell
    info: NodeInfo
    local_job: LocalJobFile
    log: Callable[[str], None]
    reporter: ReportFiles
    guard: Callable[[Callable[[float], None]], LeaseRenewer]
    """Starts a ``LeaseRenewer``. Its argument is called on the event loop after each renewal, with the time of the
    request."""
    sidecars: Sequence[Sidecar] = ()
    """Other processes of this launcher, such as readers of data."""
    leave: LeaveSettings = field(default_factory=LeaveSettings)
    temporary: Sequence[Path] = ()
    """Files and folders of this launcher that programs which clean up temporary folders must not delete."""
    notices: Poller | None = None
    """Polls for notices that this host will be taken away; None: no polling."""
    worker_status: bool = False
    """Whether the launcher of a failed job exits with the status of the worker that failed first."""
    kill_workers: Callable[[], None] = lambda: None
    """Sends SIGKILL to every worker and to the fork server, without waiting."""
    exit_now: Callable[[int], object] = exit_at_once
    """Exits this process with a status at once, whatever is still running in it."""


class Launcher:
    """Runs the parts until the agent reports its outcome."""

    def __init__(self, deps: LauncherDeps) -> None:
        self._deps = deps
        self._signals = 0
        """Number of signals received that ask this launcher to leave."""
        self._renewed_s = 0.0
        """Time of the last successful renewal of the lease."""
        self._store_down = False
        self._renewing = asyncio.Event()
        """Set when the node has registered again."""
        self._guard: LeaseRenewer

    @property
    def store_answers(self) -> bool:
        """Whether the last attempt to renew the lease was answered."""
        return not self._store_down

    @property
    def lease_age_s(self) -> float:
        """Seconds since the lease was granted or last renewed; 0 before ``run``."""
        return self._deps.clock.now_s() - self._renewed_s if self._renewed_s else 0.0

    async def run(self) -> int:
        """Run until this node has left or the job has ended; returns the exit status."""
        deps = self._deps
        loop = asyncio.get_running_loop()
        for number in handled_signals():
            loop.add_signal_handler(number, self._interrupt, number)
        for announced in set(deps.leave.signals) - set(SIGNALS):
            loop.add_signal_handler(announced, self._announced, announced)
        for passed in deps.leave.passed:
            loop.add_signal_handler(passed, self._interrupt, passed)
        for forwarded in deps.leave.forwarded:
            loop.add_signal_handler(forwarded, deps.agent.forward, forwarded)
        deps.local_job.write()
        self._guard = deps.guard(self._renewed_by_guard)
        election = asyncio.ensure_future(deps.candidate.run())
        lease = asyncio.ensure_future(self._keep_lease())
        stores = [asyncio.ensure_future(self._keep_member())]
        if deps.member is not None:
            stores.append(asyncio.ensure_future(keep_room(deps.member, deps.log)))
        if deps.temporary:
            stores.append(asyncio.ensure_future(keep_temporary(deps.temporary, deps.local_job)))
        notices = asyncio.ensure_future(self._look_for_notices())
        try:
            deps.candidate.registered(deps.registration.lease)
            agent = asyncio.ensure_future(deps.agent.run())
            await asyncio.wait({agent, election, lease}, return_when=asyncio.FIRST_COMPLETED)
            for helper in (election, lease):
                if helper.done():
                    helper.result()
            outcome = await agent
            status = status_of_worker(outcome.exit_code, outcome.failures) if deps.worker_status else outcome.exit_code
            await self._report(status, outcome)
            await self._let_master_finish(deps.candidate.shell)
            await end(election)
            await self._end_sidecars(drain=not outcome.job_over)
        finally:
            self._guard.end()
            deps.local_job.remove()
            for task in (notices, *stores, lease, election):
                await end(task)
        await self._say_farewell(job_over=outcome.job_over)
        return status

    async def _end_sidecars(self, *, drain: bool) -> None:
        """End the sidecars, which may take long. Meanwhile this node keeps its lease, because others find what it still
        serves by its key; and another node becomes the Master, which pservers need to hand over their buckets."""
        if drain:
            for one in self._deps.sidecars:
                one.drain()
        resigning = asyncio.ensure_future(self._deps.candidate.resign())
        try:
            await asyncio.gather(*(one.leave() for one in self._deps.sidecars))
        finally:
            await end(resigning)  # the end of the lease deletes the election key as well

    async def _report(self, status: int, outcome: Outcome) -> None:
        """Write the report in a thread, and wait at most ``REPORT_S``: the disk may hang."""
        deps, shell = self._deps, self._deps.candidate.shell
        history = shell.history.last(KEPT) if shell is not None and shell.ended else ()
        keep = deps.reporter.keep
        writing = asyncio.ensure_future(asyncio.to_thread(keep, status, outcome.reason, outcome.failures, history))
        await asyncio.wait({writing}, timeout=REPORT_S)
        if writing.done():
            writing.result()
        else:
            deps.log(f"{deps.reporter.folder} does not respond: not waiting for the report to be written there")

    async def register_again(self) -> NodeInfo:
        """Register again under a new lease after the previous one was lost; returns the info with its new incarnation.
        Raises ``JobConflict`` if the job has ended."""
        deps = self._deps
        deps.info = await deps.registration.rejoin(deps.info)
        deps.candidate.registered(deps.registration.lease)
        self._renewing.set()
        return deps.info

    def lease_ended(self, lease: Incarnation) -> None:
        """Report that the store does not know a lease of this launcher any more."""
        self._deps.registration.ended(lease)

    async def _keep_lease(self) -> None:
        """Renew the lease until cancelled. If it is lost, tell the agent, and wait until the node has registered
        again."""
        deps = self._deps
        while True:
            self._renewed_s = deps.clock.now_s()
            self._guard.holds(deps.registration.lease, self._renewed_s, deps.registration.lease_s)
            await deps.registration.keep(self._renewed, self._missed)
            deps.registration.lease = Incarnation(0)
            self._guard.holds(0, 0.0, deps.registration.lease_s)
            deps.candidate.unregistered()
            self._renewing.clear()
            deps.agent.post(LeaseGone())
            await self._renewing.wait()

    async def _keep_member(self) -> None:
        """Restart the store member, which keeps its data, whenever its process ends. Training continues meanwhile."""
        deps, pauses = self._deps, Backoff(MEMBER_PAUSE_S, LONGEST_MEMBER_PAUSE_S)
        member, settled_s = deps.member, 0.0
        while member is not None:
            code = await member.wait_exit()
            if deps.clock.now_s() >= settled_s:
                pauses.reset()
                deps.log(f"the embedded etcd has ended with status {code}: restarting it with its data")
            else:
                deps.log(f"the embedded etcd keeps ending: {member.failure()}")
            try:
                member.start()
            except (StoreError, OSError) as error:
                deps.log(f"cannot start the embedded etcd: {error}")
            await asyncio.sleep(pauses.next())
            # From now, not from the start: the member may have ended during the pause.
            settled_s = deps.clock.now_s() + LONGEST_MEMBER_PAUSE_S

    def _renewed(self, asked_s: float) -> None:
        if self._store_down:
            self._store_down = False
            self._deps.log("the store answers again")
        self._renewed_s = self._deps.clock.now_s()
        self._guard.holds(self._deps.registration.lease, asked_s, self._deps.registration.lease_s)
        self._deps.agent.leased(asked_s)

    def _renewed_by_guard(self, asked_s: float) -> None:
        """Note a renewal that the guard has made while the event loop was busy: the store has answered."""
        self._renewed_s = max(self._renewed_s, asked_s)
        self._deps.agent.leased(asked_s)

    def _missed(self) -> None:
        if not self._store_down:
            self._store_down = True
            self._deps.log("the store does not answer: workers that train go on, changes of the world wait")
        if self._deps.clock.now_s() - self._renewed_s >= self._deps.registration.lease_s:
            self._deps.candidate.out_of_touch()

    def _interrupt(self, number: int) -> None:
        self._signals += 1
        if self._signals >= AT_ONCE:
            self._exit_at_once(number)
        self._deps.agent.post(Interrupted(number, again=self._signals > 1))
        for one in self._deps.sidecars:
            (one.hurry if self._signals > 1 else one.drain)()

    def _exit_at_once(self, number: int) -> None:
        """Kill the workers and exit, whatever this launcher is waiting for. Other launchers notice because its port
        refuses connections and its lease expires."""
        deps = self._deps
        name = signal.Signals(number).name
        deps.log(f"{name}, the third signal: killing all processes and exiting at once; nothing more is saved")
        deps.kill_workers()
        deps.local_job.remove()
        deps.exit_now(128 + number)

    def _announced(self, number: int) -> None:
        """Handle a signal that announces the end, such as Slurm's before a time limit. It is not counted: a later
        SIGTERM is the first signal."""
        self._deps.agent.post(Noticed(signal.Signals(number).name))

    async def _look_for_notices(self) -> None:
        if self._deps.notices is not None:
            await self._deps.notices.run(lambda notice: self._deps.agent.post(Noticed(notice.reason, notice.lead_s)))

    async def _let_master_finish(self, shell: MasterShell | None) -> None:
        """If this launcher is the Master and the job has ended, wait until the other nodes know, at most
        ``FAREWELL_S``, and then until the Master's companions have finished: a scheduler may take long to answer."""
        if shell is not None and shell.ended and await shell.ended_within(FAREWELL_S):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(shell.concluded.wait(), COMPANIONS_S)

    async def _say_farewell(self, *, job_over: bool) -> None:
        """Unregister and stop what else this launcher runs. The store member stops last, because others may still need
        it, and keeps its data unless the job is over: a job that goes on without this launcher needs them."""
        deps = self._deps
        with contextlib.suppress(StoreError):
            await deps.registration.leave()
        await deps.server.stop()
        if deps.member is not None and job_over:
            await _others_gone(deps.store, JobKeys(deps.job))
            # No grace: its data is deleted anyway, and a clean stop takes long without a majority.
            await deps.member.stop(0)
            deps.member.discard()


async def _others_gone(store: Store, keys: JobKeys) -> None:
    """Wait until the keys of all nodes and helpers of the ended job are gone, at most ``FAREWELL_S`` for each."""
    with contextlib.suppress(StoreError, asyncio.TimeoutError):
        snapshot = await store.read(keys.prefix)
        left = {entry.key for entry in snapshot.entries if entry.key.startswith((keys.nodes, keys.helpers))}
        changes = store.watch(keys.prefix, snapshot.revision)
        while left:
            change = await asyncio.wait_for(changes.__anext__(), FAREWELL_S)
            if change.kind is ChangeKind.DELETE:
                left.discard(change.entry.key)


def status_of_worker(exit_code: int, failures: Sequence[Failure]) -> int:
    """The exit status of a launcher with ``--exit-code=worker``, as with paddle.distributed.launch: the status of the
    worker that failed first, or 128 plus the signal that killed it. ``exit_code``: the launcher's own status, returned
    if no worker failed."""
    if exit_code != ExitCode.WORKER_FAILED or not failures:
        return exit_code
    status = failures[0].exit_code
    return 128 - status if status < 0 else status or exit_code


def ended_before(error: JobEnded, log: Callable[[str], None], *, worker_status: bool = False) -> int:
    """Log that the job of this node's previous launcher has ended; returns that job's exit status."""
    log(f"{error}. To start a new job, run the same command again")
    outcome = error.outcome
    return status_of_worker(outcome.exit_code, outcome.failures) if worker_status else outcome.exit_code
