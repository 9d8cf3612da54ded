"""Runs the reconciler beside the elected Master: passes it the state of job and scheduler, and executes its
decisions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from edl.errors import EdlError, FencedOut, SchedulerError
from edl.job_records import SizeOwner
from edl.ports import Clock, ElectedMaster
from edl.rendezvous.phrases import one_line
from edl.schedulers import reconcile as rc
from edl.schedulers.plan import JobSummary, Node
from edl.schedulers.port import Scheduler, SchedulerSize
from edl.tasks import BackgroundTasks, Timer, end
from edl.wire.scale_requests import ScaleRequest
from edl.wire.status import JobStatus

CALL_LIMIT_S = 120.0
"""Safety limit in seconds on a call of an adapter, above the adapters' own timeouts."""
REQUEST_LIMIT_S = 30.0
"""Seconds to wait for the Master's answer, which needs the store."""
WATCH_AGAIN_S = 60.0
"""Pause in seconds after a permanent failure of a watch."""
WATCH_RETRY_S = 5.0
"""Pause in seconds after a transient failure of a watch."""
MOST_REASON = 200
"""Limit on the characters of a reason, which may become an argument of a program."""
CLOSE_LIMIT_S = 2.0
"""Seconds that closing an adapter may take."""


class Reconciler:
    """The reconciler for one Master's term. ``make`` creates the adapter."""

    def __init__(
        self,
        make: Callable[[], Scheduler],
        master: ElectedMaster,
        clock: Clock,
        owner: SizeOwner,
        log: Callable[[str], None],
    ) -> None:
        self._make = make
        self._master = master
        self._clock = clock
        self._owner = owner
        self._log = log
        self._events: asyncio.Queue[rc.Event] = asyncio.Queue()
        self._background = BackgroundTasks()
        self._timer = Timer(clock.now_s, lambda: self._events.put_nowait(rc.Tick()))
        self._shown: JobSummary | None = None

    async def run(self) -> None:
        """Run until the job has ended and nothing is left to do, or until cancelled."""
        try:
            scheduler = self._make()
        except EdlError as error:
            self._log(f"cannot use the scheduler: {error}")
            return
        about = rc.About(scheduler.name, self._owner, scheduler.indexed, scheduler.ask_none_at_end)
        tasks = [asyncio.ensure_future(work) for work in (self._look_at_job(), self._watch(scheduler))]
        try:
            await self._loop(rc.ReconcileState(about), scheduler)
        finally:
            self._timer.set(None)
            self._background.drop()
            for task in tasks:
                await end(task)
            with contextlib.suppress(SchedulerError, asyncio.TimeoutError):
                await asyncio.wait_for(scheduler.close(), CLOSE_LIMIT_S)

    async def _loop(self, state: rc.ReconcileState, scheduler: Scheduler) -> None:
        while True:
            decision = rc.step(state, await self._events.get(), self._clock.now_s())
            state = decision.state
            wake_s = None
            for effect in decision.effects:
                match effect:
                    case rc.Current():
                        self._background.begin(self._call(self._size(scheduler)))
                    case rc.Ask(nodes, reason):
                        self._background.begin(self._call(scheduler.request(nodes, reason)))
                    case rc.ReleaseNodes(names, nodes, reason):
                        self._background.begin(self._call(scheduler.release(names, nodes, reason)))
                    case rc.TellMaster(request):
                        self._background.begin(self._submit(request))
                    case rc.Explain(text):
                        self._master.explain(text)
                    case rc.LogMessage(text):
                        self._log(text)
                    case rc.WakeAt(at_s):
                        wake_s = at_s
                    case rc.Finished():
                        return
            self._timer.set(wake_s)

    async def _size(self, scheduler: Scheduler) -> SchedulerSize:
        return await scheduler.current()

    async def _call(self, work: Awaitable[SchedulerSize | None]) -> None:
        """Await a call of the adapter, and report its outcome to the machine in any case."""
        try:
            self._events.put_nowait(rc.CallSucceeded(await asyncio.wait_for(work, CALL_LIMIT_S)))
        except SchedulerError as error:
            self._events.put_nowait(rc.CallFailed(str(error), error.retry))
        except asyncio.TimeoutError:
            self._events.put_nowait(rc.CallFailed(f"the scheduler has not answered for {CALL_LIMIT_S:g} s", True))
        except Exception as error:  # noqa: BLE001 - top of a task: a bug in an adapter must not block the machine
            self._events.put_nowait(rc.CallFailed(f"the scheduler's adapter: {type(error).__name__}: {error}", False))

    async def _submit(self, request: ScaleRequest) -> None:
        """Submit a request to the Master, and report its answer to the machine."""
        try:
            granted = await asyncio.wait_for(self._master.submit(request), REQUEST_LIMIT_S)
        except FencedOut:
            return  # another Master has been elected, which ends this reconciler
        except asyncio.TimeoutError:
            self._unheard(f"the Master has not answered for {REQUEST_LIMIT_S:g} s: the store may be unreachable")
        except Exception as error:  # noqa: BLE001 - as in _call
            self._unheard(f"the Master could not accept the request: {type(error).__name__}: {error}")
        else:
            self._show()  # before the answer: a node may have become a member before the request was processed
            self._events.put_nowait(rc.Replied(granted))

    def _unheard(self, text: str) -> None:
        self._show()
        self._events.put_nowait(rc.Unheard(text))

    async def _look_at_job(self) -> None:
        with contextlib.suppress(FencedOut):  # another Master has been elected, which ends this reconciler
            while True:
                await self._master.changed()
                self._show()

    def _show(self) -> None:
        """Report the state of the job to the machine, if it has changed."""
        job = job_of(self._master.status())
        if job != self._shown:
            self._shown = job
            self._events.put_nowait(rc.Looked(job))

    async def _watch(self, scheduler: Scheduler) -> None:
        said = ""
        while True:
            try:
                async for observation in scheduler.watch():
                    said = ""
                    self._events.put_nowait(rc.Observed(observation))
                return
            except SchedulerError as error:
                text, pause_s = str(error), WATCH_RETRY_S if error.retry else WATCH_AGAIN_S
            except Exception as error:  # noqa: BLE001 - a bug in an adapter must not end the watch
                text, pause_s = f"the scheduler's adapter: {type(error).__name__}: {error}", WATCH_AGAIN_S
            if text != said:
                said = text
                self._log(f"{text} (retrying every {pause_s:g} s)")
            await asyncio.sleep(pause_s)


def job_of(status: JobStatus) -> JobSummary:
    """The part of a status that the reconciler needs."""
    scale = status.scale
    return JobSummary(
        minimum=scale.minimum,
        maximum=scale.maximum,
        unit=scale.unit,
        desired=scale.desired,
        asked=scale.asked > 0,
        running=status.phase == "running",
        suspended=scale.suspended,
        ended=status.phase == "ended",
        reason=one_line(scale.reason)[:MOST_REASON],
        nodes=tuple(
            Node(
                node.node,
                node.index,
                member=node.position >= 0,
                spare=node.state == "spare",
                cordoned=node.node in scale.cordoned,
                is_master=node.node == status.master,
                host=node.host,
            )
            for node in status.nodes
        ),
    )
