"""Shell of the agent: one queue, one consumer; each event is stepped, then its effects run in order."""

from __future__ import annotations

import asyncio
import collections
import errno
import signal
import statistics
import traceback
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from typing import Any

from edl.agent.attach_trouble import AttachTrouble
from edl.agent.deps import AgentDeps, MasterStream
from edl.agent.entitlement import LOOK_SHARE, Entitlement
from edl.agent.held_starts import FilesAlike, HeldStarts
from edl.agent.machine import events as ev
from edl.agent.machine.leaving import saving_time_s
from edl.agent.machine.machine import begin, step
from edl.agent.machine.state import AgentState, Outcome
from edl.agent.switch_watch import SwitchWatch
from edl.agent.workers import rank_paces
from edl.agent.workers.hang import HangWatch
from edl.agent.workers.hang_shell import HangDetection, HangSources
from edl.agent.workers.rank_paces import RankPaces
from edl.agent.workers.step_rate import Mark, tell_pace
from edl.errors import EdlError, StoreError
from edl.exit_codes import ExitCode
from edl.tasks import BackgroundTasks, Backoff, Timer, end
from edl.types import FencingToken, Round
from edl.wire.health import CheckHealth
from edl.wire.messages import (
    AgentMessage,
    Attach,
    Kept,
    MasterMessage,
    Preparing,
    Ready,
    ServiceFromWorker,
    ServiceToWorker,
)
from edl.wire.process_events import ProcessEvent, WorkerExited, WorkerResumed, WorkerSuspended
from edl.wire.rank_pace import RankPace
from edl.wire.records import Version, World

RECONNECT_PAUSE_S = 0.05
LONGEST_RECONNECT_PAUSE_S = 2.0
"""Bounds of the pause between two connections to one Master. It doubles until a connection has lasted the longest
pause. A new Master is contacted at once."""
REGISTER_PAUSE_S = 0.5
STACKS_S = 10.0
"""Time limit in seconds for dumping the stacks of all workers."""
LOGS_S = 2.0
"""Seconds that a launcher waits for the logs' disk before it exits."""
LACKING_AGAIN_S = 1.0
"""Pause before another attempt at what failed because the host lacked something."""
_LACKING = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRINUSE)
"""Errors of a host that has no process, descriptor, memory or port left, perhaps only for a moment."""
LET_GO_S = 1.0
"""Seconds that the agent waits for a cancelled save to end."""


class AgentShell:
    """Agent of one node. ``run`` returns the outcome with which the launcher exits."""

    def __init__(self, deps: AgentDeps, state: AgentState) -> None:
        self._deps = deps
        self._state = state
        self._events: asyncio.Queue[ev.Event | FilesAlike] = asyncio.Queue()
        self._ports = deps.ports
        self._ports_good_for: tuple[MasterStream | None, Round] | None = None
        self._gave_up_saves = False
        """The checkpoint directory was busy for too long, and still is."""
        self._no_ports = ""
        """Why no ports could be reserved the last time; empty: they were."""
        self._stream: MasterStream | None = None
        self._master: tuple[str, int, FencingToken] | None = None
        self._redial = asyncio.Event()
        self._trouble = AttachTrouble(deps.log, deps.clock.now_s, state.timeouts.lease_ttl_s)
        self._background = BackgroundTasks(self._task_failed)
        self._introduced: MasterStream | None = None
        self.exits: collections.Counter[str] = collections.Counter()
        """Workers that have ended, by result: ``success``, ``error``, ``signal``."""
        self._worker_server = deps.worker_server(self.post, self._relay)
        self._paces = RankPaces(self._worker_server.times)
        deps.workers.meet_at(self._worker_server.address)
        deps.workers.warn_by(lambda why: self.post(ev.LoggingChanged(why)))
        self._timer = Timer(deps.clock.now_s, lambda: self.post(ev.Tick()))
        self._ports_again = Timer(deps.clock.now_s, lambda: self.post(ev.StateChanged()))
        self._switches = (
            SwitchWatch(deps.switches, lambda: self._state, self._worker_server.progress, self.post)
            if deps.switches is not None
            else None
        )
        self._entitlement = Entitlement(state.info.lease_within(state.timeouts.lease_ttl_s), deps.clock.now_s())
        self._outcome: Outcome | None = None
        self._hurry: asyncio.Event | None = None
        """Exists while the agent waits; set when a second interrupt demands that it stop waiting."""
        self._saving_last = False
        """The newest commit is being written before the launcher exits."""
        self._warming: Awaitable[str] | None = deps.warming
        self._probing: asyncio.Future[None] | None = None
        """The health probe that runs."""
        self._held = (
            HeldStarts(deps.synced, self._events.put_nowait, self._task_failed) if deps.synced is not None else None
        )

    @property
    def state(self) -> AgentState:
        """Current state of the machine."""
        return self._state

    def post(self, event: ev.Event) -> None:
        """Queue an event for the machine."""
        if self._hurry is not None and isinstance(event, ev.Interrupted) and event.again:
            self._hurry.set()
        if isinstance(event, ev.LeaseGone):
            self._entitlement.lost()
        self._events.put_nowait(event)

    def leased(self, asked_s: float) -> None:
        """Report a lease renewal that was requested at ``asked_s``."""
        self._entitlement.leased(asked_s)
        self._entitle()
        self.post(ev.LeaseRenewed(self._deps.clock.now_s() - asked_s))

    async def run(self) -> Outcome:
        """Run the agent until the machine decides on an outcome."""
        deps = self._deps
        self._worker_server.open()
        self._background.begin(self._watch_processes())
        self._background.begin(self._stay_attached())
        self._background.begin(self._stay_entitled())
        if self._switches is not None:
            self._background.begin(self._switches.run())
        self._background.begin(tell_pace(self._mark, self.post, self._ranks, holders=deps.checkpoints.holders))
        if deps.run_states is not None:
            self._background.begin(
                rank_paces.watch(self._paces.shares, deps.workers.watched, deps.run_states, deps.clock.now_s)
            )
        if deps.hangs is not None and self._state.timeouts.hang.on and not self._state.independent:
            self._background.begin(self._watch_for_hangs(deps.hangs(self._worker_server.address)))
        try:
            await self._carry_out(None, begin(self._state))
            while self._outcome is None:
                event = await self._events.get()
                if isinstance(event, FilesAlike):
                    await self._start_held(event.world)
                    continue
                await self._carry_out(event, step(self._state, event, self._deps.clock.now_s()))
                if isinstance(event, ev.LeaseGone):
                    self._entitlement.acted()
            await self._deps.workers.done(LOGS_S)
            return self._outcome
        finally:
            self._let_go()

    async def _carry_out(self, event: ev.Event | None, decision: ev.Decision) -> None:
        self._deps.decided(self._state, event, decision)
        left, self._state = self._state.leaves, decision.state
        if self._state.leaves and not left:
            self._deps.leaves()
        wakes = []
        for effect in decision.effects:
            match effect:
                case ev.Say(message):
                    self._say(message)
                case ev.Announce():
                    self._announce()
                case ev.Warm():
                    self._background.begin(self._warm())
                case ev.Register():
                    self._dial()  # a stream belongs to one incarnation
                    self._background.begin(self._register())
                case ev.WakeAt(at_s):
                    wakes.append(at_s)
                case ev.ProbeHealth(order):
                    self._stop_probe()
                    self._probing = asyncio.ensure_future(self._probe(order))
                case ev.StopProbe():
                    self._stop_probe()
                case ev.Log(text):
                    self._deps.log(text)
                case ev.Exit(outcome):
                    self._outcome = await self._save(outcome)
                case _:
                    await self._carry_out_on_workers(effect)
        self._timer.set(min(wakes, default=None))

    async def _save(self, outcome: Outcome) -> Outcome:
        """Save the newest commit where it survives, if required, in the time left. The returned reason
        names a save that could not be written."""
        checkpoints, limit_s = self._deps.checkpoints, self._deps.save_timeout_s
        left_s = saving_time_s(outcome, self._state.gone_by_s, self._deps.clock.now_s(), limit_s)
        if left_s == 0:
            return outcome
        self._saving_last = True
        why = await self._within(checkpoints.save_what_is_left(outcome.reason), left_s)
        if why:
            self._deps.log(f"{why}: the newest commit may not be in the checkpoint directory")
        if not checkpoints.unsaved:
            return outcome
        self._deps.log(checkpoints.unsaved)
        return replace(outcome, reason=f"{outcome.reason}; {checkpoints.unsaved}")

    async def _within(self, work: Coroutine[Any, Any, object], limit_s: float | None = None) -> str:
        """Wait until ``work`` is done, times out or is interrupted; return why it was given up, or "". Raises the
        exceptions of ``work``."""
        self._hurry = asyncio.Event()
        working = asyncio.ensure_future(work)
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({working, hurry}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return ""
            return "interrupted again" if hurry.done() else "the time limit was reached"
        finally:
            self._hurry = None
            await end(working, LET_GO_S)
            await end(hurry)

    async def _start(self, starting: Coroutine[Any, Any, list[ev.WorkerEnded]]) -> None:
        """Wait until workers are started, without a limit: a fork server that does not answer is replaced. Workers
        that it starts after the wait was interrupted end with it."""

        async def start() -> None:
            for ended in await starting:
                self.post(ended)

        why = await self._within(start())
        if why:
            self._deps.log(f"{why}: no longer waiting for the workers to start")

    async def _start_held(self, world: World) -> None:
        slots = self._held.released(world) if self._held is not None else ()
        if slots:
            await self._start(self._deps.workers.start(world, slots))

    async def _flush_saves(self, round: Round) -> None:
        """Wait until the saves of this round's workers are written, at most ``--save-timeout``."""
        checkpoints, limit_s = self._deps.checkpoints, self._deps.save_timeout_s
        unsaved = ""
        if checkpoints.saving:
            self.post(ev.SavesFlushed(round, pending=True))
            try:
                unsaved = await asyncio.wait_for(checkpoints.flush_saves(), limit_s)
            except asyncio.TimeoutError:
                unsaved = f"{checkpoints.unsaved} (given up after {limit_s:g} s: --save-timeout={limit_s:g})"
        self.post(ev.SavesFlushed(round, unsaved=unsaved))

    async def _carry_out_on_workers(self, effect: ev.Effect) -> None:
        workers = self._deps.workers
        match effect:
            case ev.Start(world, slots):
                self._enter(world, slots)
                if self._held is None or not self._held.hold(slots):
                    await self._start(workers.start(world, slots))
            case ev.GivePlace(world, slots):
                self._enter(world)
                for slot in slots:
                    self._worker_server.give_place(slot, workers.seat(world, slot, self._deps.secret(world.round)))
            case ev.StartAhead(slots, born):
                await self._start(workers.start_ahead(born, slots, self._state.uses))
            case ev.SignalWorkers(number, slots):
                if self._held is not None:
                    self._held.signal(number, slots)
                await workers.signal(number, slots)
            case ev.TellWorkers(message, slots):
                self._worker_server.tell(message, slots)
            case ev.DumpStacks():
                why = await self._within(workers.dump_stacks(), STACKS_S)
                if why:
                    self._deps.log(f"{why}: no longer waiting for the remaining stacks")
            case ev.SendCopies(peer):
                self._deps.checkpoints.keep_with(peer)
            case ev.LoadCheckpoint():
                self._background.begin(self._load())
            case ev.FlushSaves(number):
                self._background.begin(self._flush_saves(number))
            case ev.Write(version, reason):
                self._background.begin(self._write(version, reason))

    def _say(self, message: AgentMessage) -> None:
        if isinstance(message, Preparing):
            message = replace(message, holdings=self._deps.checkpoints.holdings(), commit_age_s=self._commit_age_s())
        if self._stream is None:
            return
        self._stream.send(message)
        if isinstance(message, Attach) and self._master is not None:
            self._introduced = self._stream
            self._worker_server.reattached(self._master[2])

    async def _probe(self, order: CheckHealth) -> None:
        found = await self._deps.health(order) if self._deps.health is not None else None
        self.post(ev.HealthProbed(order.number, order.stage, found))

    def _stop_probe(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    def _relay(self, said: ServiceFromWorker) -> None:
        """Pass a worker's message to a service of the Master if this node is attached. Otherwise drop it: the worker
        is notified when a Master is available again."""
        if self._stream is not None and self._introduced is self._stream:
            self._stream.send(said)

    async def _announce_later(self) -> None:
        limit_s = self._deps.save_timeout_s
        try:
            await asyncio.wait_for(self._deps.checkpoints.settled(), limit_s)
        except asyncio.TimeoutError:
            if not self._gave_up_saves:
                limit = f"{limit_s:g} s (--save-timeout={limit_s:g})"
                self._deps.log(f"the checkpoint directory is busy for {limit}: the next world does not wait for it")
            self._gave_up_saves = True
        self.post(ev.StateChanged())

    async def _write(self, version: Version, reason: str) -> None:
        await self._deps.checkpoints.write(version, reason)
        self.post(ev.StateChanged())

    async def _load(self) -> None:
        await self._deps.checkpoints.load()
        self.post(ev.StateChanged())

    def _enter(self, world: World, started: tuple[int, ...] = ()) -> None:
        """Prepare for this node's membership in a world, in which workers of these slots are about to start."""
        self._ports.use()
        self._worker_server.newest = None  # the world may begin from an earlier commit
        self._deps.checkpoints.enter(world)
        if self._held is not None:
            self._held.enter(world, started)

    def _announce(self) -> None:
        if self._deps.checkpoints.loading:
            return  # its end announces what was read; until then the Master would take it for unusable
        if not self._deps.checkpoints.busy:
            self._gave_up_saves = False
        elif not self._gave_up_saves:
            # The next world may begin from it.
            self._background.begin(self._announce_later())
            return
        # Ports announced on an earlier stream or before the last ``StopRound`` may be in use by a world.
        good_for = (self._stream, self._state.seen_round)
        if good_for != self._ports_good_for:
            self._ports.use()
            self._ports_good_for = good_for
        try:
            ports = self._ports.ports(1 + self._state.info.slots)
        except OSError as error:
            self._lack_ports(error)
            return
        self._no_ports = ""
        if self._stream is not None:
            checkpoints = self._deps.checkpoints
            stored, sharded = checkpoints.stored
            self._stream.send(
                Ready(
                    self._state.seen_round,
                    ports,
                    self._state.parked,
                    checkpoints.holdings(),
                    stored,
                    sharded,
                    checkpoints.refused,
                    self._state.stopped_itself,
                    self._commit_age_s(),
                )
            )

    def _lack_ports(self, error: OSError) -> None:
        """Try again later if the host lacks ports or descriptors for the moment."""
        why = f"no free ports on this host for the next round: {error}"
        if error.errno not in _LACKING:
            self.post(ev.Fatal(Outcome(1, why)))
            return
        if why != self._no_ports:
            self._deps.log(f"{why}. Trying again every {LACKING_AGAIN_S:g} s")
        self._no_ports = why
        self._ports_again.set(self._deps.clock.now_s() + LACKING_AGAIN_S)

    # --- sources of events -------------------------------------------------------------------------------------------

    def follow(self, host: str, port: int, token: FencingToken) -> None:
        """Attach to this Master instead of the previous one."""
        self._master = (host, port, token)
        self._dial()

    def _dial(self) -> None:
        """Close the current connection, if any, and connect to the current Master."""
        self._redial.set()

    async def _stay_attached(self) -> None:
        """Keep one connection to the Master; it ends when it breaks, or when another Master is elected."""
        while True:
            await self._redial.wait()
            self._redial.clear()
            pauses = Backoff(RECONNECT_PAUSE_S, LONGEST_RECONNECT_PAUSE_S)
            while not self._redial.is_set() and self._master is not None:
                call = asyncio.ensure_future(self._call(*self._master, pauses))
                hang_up = asyncio.ensure_future(self._redial.wait())
                try:
                    await asyncio.wait({call, hang_up}, return_when=asyncio.FIRST_COMPLETED)
                finally:  # also on cancellation: the Master waits for the end of the stream
                    await end(call)
                    await end(hang_up)

    async def _call(self, host: str, port: int, token: FencingToken, pauses: Backoff) -> None:
        """Attach to a Master until the stream ends, then check whether that Master is dead."""
        stream, now_s = self._deps.connect(host, port), self._deps.clock.now_s
        attached, opened_s = False, 0.0

        def opened() -> None:
            nonlocal attached, opened_s
            attached, opened_s = True, now_s()
            self._stream = stream
            self._trouble.attached()
            self.post(ev.Connected())

        why = ""
        try:
            why = await stream.run(opened, self._hear)
        except Exception as error:  # noqa: BLE001 - such as no descriptor for a worker's message: it is sent again
            self._deps.log(f"the connection to the Master is closed, because a message could not be handled: {error}")
        finally:
            if attached:
                self._stream = None
                self.post(ev.Disconnected())
        if attached and now_s() - opened_s >= LONGEST_RECONNECT_PAUSE_S:
            pauses.reset()
        if not attached:
            self._trouble.failed(host, port, why)
        if await self._deps.refuses(host, port):
            self._deps.master_refused(token)
        await asyncio.sleep(pauses.next())

    async def _hear(self, message: MasterMessage) -> None:
        if isinstance(message, ServiceToWorker):
            self._worker_server.pass_on(message)
        else:
            self.post(ev.MasterSaid(message))

    def forward(self, number: int) -> None:
        """Forward a signal to the workers. The machine is not involved; it sees how they end as usual."""
        self._deps.log(f"{signal.Signals(number).name}: passed to the workers")
        self._background.begin(self._deps.workers.forward(number))

    def kept(self, message: Kept) -> None:
        """Report that a commit was written to the checkpoint directory, or that the write failed."""
        if self._switches is not None and not message.error:
            self._switches.kept(message.version)
        if not self._saving_last:
            self.post(ev.Report(message))
            return
        if message.error:  # the machine has stopped, and the Master may be gone
            self._deps.log(f"commit {message.version.commit} could not be written: {message.error}")
        self._say(message)

    def copied(self) -> None:
        """Report the arrival of a part of another node's commit: the next world may start from it."""
        self.post(ev.StateChanged())

    def room(self, why: str) -> None:
        """Report why there is no memory for commits; empty: there is again."""
        self.post(ev.KeepingChanged(why))

    def _mark(self) -> Mark | None:
        """Position of this node's workers if they train in a world."""
        newest, state = self._worker_server.newest, self._state
        if newest is None or not state.underway:
            return None
        waits = list(self._worker_server.waits.values()) or [(0.0, 0.0)]
        committing_s, waiting_s = (statistics.fmean(column) for column in zip(*waits, strict=True))
        return Mark(state.running_round, *newest, committing_s, waiting_s)

    def _ranks(self, round: Round) -> tuple[RankPace, ...]:
        slots = [worker.slot for worker in sorted(self._state.in_world, key=lambda worker: worker.local_rank)]
        return self._paces.take(round, slots)

    def _commit_age_s(self) -> float:
        """Seconds since the newest commit in memory, if it was made here in the last world; else 0."""
        newest = self._worker_server.newest
        held = max((one.version.commit for one in self._deps.checkpoints.holdings()), default=0)
        if newest is None or newest[0] != held:
            return 0.0
        return max(0.0, asyncio.get_running_loop().time() - newest[1])

    def _watch_for_hangs(self, sources: HangSources) -> Coroutine[None, None, None]:
        return HangDetection(
            HangWatch(self._state.timeouts),
            sources,
            lambda: self._state,
            self._worker_server.progress,
            self._deps.clock.now_s,
            self.post,
        ).run()

    async def _stay_entitled(self) -> None:
        """Tell the fork server that this launcher is alive, even while the agent waits."""
        while True:
            self._entitle()
            await asyncio.sleep(self._state.timeouts.lease_ttl_s * LOOK_SHARE)

    def _entitle(self) -> None:
        until_s = self._entitlement.look(self._deps.clock.now_s())
        if until_s is not None:
            self._deps.processes.entitle(until_s)

    async def _watch_processes(self) -> None:
        async for happened in self._deps.processes.events():
            event = await self._event_of(happened)
            if event is not None:
                self.post(event)

    async def _event_of(self, happened: ProcessEvent) -> ev.Event | None:
        """The machine's event for one of the fork server's; None for an unknown process."""
        workers = self._deps.workers
        match happened:
            case WorkerExited(pid, code):
                ended = await workers.ended(pid, code)
                if ended is not None:
                    self.exits["signal" if code < 0 else "error" if code else "success"] += 1
                return ended
            case WorkerSuspended(pid):
                place = workers.place(pid)
                return None if place is None else ev.WorkerFroze(*place)
            case WorkerResumed(pid):
                place = workers.place(pid)
                return None if place is None else ev.WorkerThawed(*place)
            case _:
                return happened

    async def _warm(self) -> None:
        said = ""
        while True:
            try:
                warming, self._warming = self._warming, None
                warmed, _, _ = await asyncio.gather(
                    warming or self._deps.processes.warm(), self._deps.checkpoints.look(), self._catch_up()
                )
                self._deps.log(warmed)
                self.post(ev.ForkServerReady())
                return
            except EdlError as error:
                if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in _LACKING):
                    self.post(ev.Fatal(Outcome(int(error.exit_code), str(error))))
                    return
                if str(error) != said:
                    said = str(error)
                    self._deps.log(f"{error}. Trying again every {LACKING_AGAIN_S:g} s")
                await asyncio.sleep(LACKING_AGAIN_S)

    async def _catch_up(self) -> None:
        """Fetch what the other nodes have written so far, while they train."""
        if self._deps.synced is not None:
            await self._deps.synced.caught_up()

    async def _register(self) -> None:
        said = ""
        while True:
            asked_s = self._deps.clock.now_s()
            try:
                info = await self._deps.register()
                self._entitlement.granted(asked_s, info.lease_within(self._state.timeouts.lease_ttl_s))
                self._entitle()
                self.post(ev.Registered(info))
                return
            except StoreError as error:  # also one that refuses: it has accepted this launcher before (decision 0035)
                if error.definite and str(error) != said:
                    said = str(error)
                    self._deps.log(f"cannot register again: {error}")
                await asyncio.sleep(REGISTER_PAUSE_S)
            except EdlError as error:
                self.post(ev.Fatal(Outcome(int(error.exit_code), str(error), job_over=error.job_over)))
                return

    def _task_failed(self, error: Exception) -> None:
        """Exit on a failed background task: without it this node would silently stall or miss events."""
        text = "".join(traceback.format_exception(error))
        self._deps.log(f"a bug in edl, please report it: {text}")
        self.post(ev.Fatal(Outcome(int(ExitCode.INTERNAL), f"a bug in edl's agent: {error!r}")))

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        self._timer.set(None)
        self._ports_again.set(None)
        self._stop_probe()
        self._ports.release()
        self._worker_server.close()
        self._background.drop()
        if self._held is not None:
            self._held.drop()
