"""A simulated launcher: the shipped shells, connected by ``edl.launch.wiring`` as in a real launcher, in virtual
time."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from edl.agent.deps import AgentDeps
from edl.agent.machine import events as ag
from edl.agent.machine.state import AgentPhase, AgentState, Outcome
from edl.agent.shell import AgentShell
from edl.errors import EdlError, StoreUnavailable
from edl.exit_codes import ExitCode
from edl.launch import launcher as real
from edl.launch.registration import JobEnded, Registration
from edl.launch.wiring import wire
from edl.master import events as ev
from edl.master.candidate import Candidate
from edl.master.election import MasterInfo
from edl.master.goodput.stored import StoredSlotTimes
from edl.master.shell import MasterDeps, MasterShell
from edl.master.state import MasterState, Record
from edl.master.stored import record_in
from edl.ports import Operation
from edl.testing.sim.alarming import SimWatchdogs
from edl.testing.sim.goodput_check import GoodputCheck, amount_ns
from edl.testing.sim.memory_checkpoints import SimMemory
from edl.testing.sim.node import SimCheckpoints, SimPorts, SimProcesses, SimSwitchFiles, SimWorkerLink, SimWorkers
from edl.testing.sim.pacing import SimPaces
from edl.testing.sim.process import SimDeps, SimProcess
from edl.testing.sim.stepping import Stepper
from edl.testing.sim.store import StoreClient
from edl.testing.sim.transport import SimConnection, SimServer, answers, refuses
from edl.testing.sim.workers import SimWorker
from edl.types import FencingToken, NodeId
from edl.wire import plain
from edl.wire.messages import Hold, Kept, MasterMessage, ServiceFromWorker, Switch
from edl.wire.records import Failure, NodeInfo
from edl.wire.status import HistoryEntry

T = TypeVar("T")
RETRY_S = 0.1
BUG = "a bug in edl"


class SimLauncher(SimProcess):
    """The launcher process of one node, from its start to its exit or crash."""

    def __init__(self, deps: SimDeps, info: NodeInfo, warm_s: float) -> None:
        super().__init__(deps, info.host, info.port)
        self.info = info
        self.memory = SimMemory(self, deps.states)
        self.workers: list[SimWorker] = []
        self.lost = 0
        self.outcome: Outcome | None = None
        """The outcome with which it has decided to exit."""
        self.isolated_s: float | None = None
        """Since when it has reached neither the store nor the elected Master. Set by the world."""
        self.server = SimServer(self)
        self.server.sent = self._sent
        self.store = StoreClient(deps.store, deps.network, self, self._writes)
        self.processes = SimProcesses(self, warm_s, lambda: self.workers)
        self.group = SimWorkers(self, self.processes)
        self.candidate: Candidate | None = None
        self.shell: AgentShell | None = None
        self._link: SimWorkerLink | None = None
        self.relay: Callable[[ServiceFromWorker], None] = lambda said: None
        """Receives the workers' messages to services of the Master."""
        self._connection: SimConnection | None = None
        self._decision: ev.Decision | None = None
        self._goodput_check = GoodputCheck()
        """The last decision of the Master in this process."""
        self._decided_s = 0.0
        self._token = FencingToken(0)
        """Fencing token of the Master that made the decision: its write may take effect after the Master or this
        process has ended."""
        self._main = self.loop.create_task(self._run())
        self._main.add_done_callback(self._returned)

    # --- main task ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        deps = self.deps
        registration = Registration(
            *(self.store, deps.keys, deps.spec, self.info.node),
            functools.partial(refuses, deps, self.host),
            functools.partial(answers, deps, self.host),
            self.log,
        )
        try:
            await self._retried(registration.agree)
            if not deps.checks.is_this_job(registration.token):
                self.say("belongs to another job of the same id, which is not looked at")
                return
            self.info = await self._retried(lambda: registration.join(self.info))
        except JobEnded as error:
            self.outcome = Outcome(error.outcome.exit_code, error.outcome.reason, error.outcome.failures)
            return
        launcher = self._put_together(registration)
        if self.deps.watchdogs is not None:
            self.after(self.deps.watchdogs.pause_s(), self._look_at_disks, self.deps.watchdogs)
        if self.deps.paces is not None:
            self.after(self.deps.paces.pause_s(), self._report_paces, self.deps.paces)
        await launcher.run()

    def _report_paces(self, paces: SimPaces) -> None:
        """Report how the ranks of this node spend their time, while they train."""
        state = self.shell.state if self.shell is not None else None
        if state is not None and state.underway:
            stepping = [worker for worker in self.workers if isinstance(worker, Stepper)]
            commit = max((worker.boundary.passed for worker in stepping), default=0)
            slots = [worker.slot for worker in state.in_world]
            self.tell_agent(
                ag.Report(paces.pace(self.node, state.running_round, commit, slots, self.deps.timeline.now_s))
            )
        self.after(paces.pause_s(), self._report_paces, paces)

    def _look_at_disks(self, watchdogs: SimWatchdogs) -> None:
        """Report what the watchdogs of this node find, and what those of the job find if the Master is here."""
        self.tell_agent(ag.AlarmsChanged(tuple(watchdogs.of_node())))
        self.tell_agent(ag.Suspected(watchdogs.suspicion()))
        self.tell_agent(ag.HangLimitChanged(watchdogs.hang_limit()))
        if self.master_shell is not None and self.master_shell.serving:
            self.master_shell.watched(watchdogs.of_job())
            nodes = self._decision.state.nodes if self._decision is not None and not self.deps.healed else {}
            self.master_shell.denylist(watchdogs.denylist([nodes[node].info for node in sorted(nodes)]))
        self.after(watchdogs.pause_s(), self._look_at_disks, watchdogs)

    async def _retried(self, action: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await action()
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)

    def _put_together(self, registration: Registration) -> real.Launcher:
        deps, spec, info = self.deps, self.deps.spec, self.info
        clock = _ProcessClock(self.now_s)
        self.candidate, self.shell, launcher = wire(
            MasterDeps(
                store=self.store,
                clock=clock,
                keys=deps.keys,
                spec=spec,
                node=info.node,
                refuses=self._refuses,
                log=self.log,
                wall_clock_s=lambda: deps.timeline.now_s,
                checkpoint_dir="directory",
                services=deps.plugin.services,
                companions=lambda master: deps.plugin.companions(self, master),
                decided=self._master_decided,
            ),
            MasterInfo(info.node, info.host, info.port),
            elected=self.server.serve,
            make_agent=lambda candidate, register: self._agent(clock, candidate, register),
            make_deps=lambda candidate, agent: real.LauncherDeps(
                job=spec.job,
                clock=clock,
                store=self.store,
                member=None,
                server=self.server,
                registration=registration,
                candidate=candidate,
                agent=agent,
                info=info,
                local_job=_NoFile(),
                log=self.log,
                reporter=_NoReport(),
                guard=lambda renewed: _NoGuard(),
                exit_now=lambda code: self.crash(),  # at the third signal
            ),
        )
        return launcher

    def _agent(
        self, clock: _ProcessClock, candidate: Candidate, register: Callable[[], Awaitable[NodeInfo]]
    ) -> AgentShell:
        deps, spec, info = self.deps, self.deps.spec, self.info
        state = AgentState(info, spec.timeouts, contact_s=self.now_s(), independent=spec.independent)
        return AgentShell(
            AgentDeps(
                clock=clock,
                processes=self.processes,
                warming=asyncio.ensure_future(self.processes.warm()),
                workers=self.group,
                worker_server=lambda heard, relay: self._linked(relay),
                ports=SimPorts(deps.checks.fresh_ports),
                checkpoints=SimCheckpoints(self.memory),
                secret=lambda number: f"secret {number}",
                connect=self._connect,
                refuses=self._refuses,
                register=register,
                master_refused=candidate.master_refused,
                log=self.log,
                switches=SimSwitchFiles(deps.states.directory),
                decided=self._agent_decided,
                health=functools.partial(deps.probe, self) if deps.probe is not None else None,
            ),
            dataclasses.replace(state, by_device=bool(info.devices)),
        )

    def _linked(self, relay: Callable[[ServiceFromWorker], None]) -> SimWorkerLink:
        self.relay = relay
        self._link = SimWorkerLink(self, self.group)
        return self._link

    def _connect(self, host: str, port: int) -> SimConnection:
        self._connection = SimConnection(self, host, port, _server_of)
        return self._connection

    async def _refuses(self, host: str, port: int, timeout_s: float = 1.0) -> bool:
        return await refuses(self.deps, self.host, host, port, timeout_s)

    def _returned(self, main: asyncio.Task[None]) -> None:
        """The launcher's main task has ended."""
        error = None if main.cancelled() else main.exception()
        if isinstance(error, EdlError):
            self.outcome = self.outcome or Outcome(int(error.exit_code), str(error))
        elif error is not None:
            self.deps.checks.fail(f"{self.node}: the launcher ends with {error!r}")
        self.end()

    def log(self, text: str) -> None:
        """Write a log line. A line that reports a bug in edl is a violation."""
        if BUG in text:
            self.deps.checks.fail(f"{self.node}: {text}")
        self.say(text)

    # --- the shells' decisions ----------------------------------------------------------------------------------------

    def _master_decided(self, before: MasterState | None, events: Sequence[ev.Event], decision: ev.Decision) -> None:
        shell = self.candidate.shell if self.candidate is not None else None
        if before is None:
            self._goodput_check = GoodputCheck()
        else:
            checks = self.deps.checks
            checks.master_stepped(before, events, decision, self.host)
            if shell is not None:
                elected = self.deps.store.created(self.deps.keys.master) == shell.token
                stored_ns = checks.stored_ns if elected else 0  # else it may be another Master's by now
                if trouble := self._goodput_check.trouble(shell.slot_times, before, stored_ns):
                    checks.fail(f"the goodput that {self.node} counts {trouble}")
        self._decision, self._decided_s = decision, self.deps.timeline.now_s
        if self.candidate is not None and self.candidate.shell is not None:
            self._token = self.candidate.shell.token

    def _writes(self, operations: Sequence[Operation]) -> Callable[[], None]:
        """A write is sent. If it writes the Master's record, that comes from the Master's last decision. It may take
        effect late, in another term under the same token, which it fences at its next write."""
        return functools.partial(self._wrote, operations, self._decision, self._decided_s, self._token)

    def _wrote(
        self, operations: Sequence[Operation], decision: ev.Decision | None, decided_s: float, token: FencingToken
    ) -> None:
        deps, keys = self.deps, self.deps.keys
        written = {operation.key for operation in operations}
        if keys.goodput in written:
            stored = deps.store.values(keys.goodput).values()  # none once the job has ended
            deps.checks.stored_ns = sum(amount_ns(plain.loads(StoredSlotTimes, value)) for value in stored)
        if keys.spec in written and self.candidate is None:
            deps.checks.job_founded(self.node)
        if decision is None or not written & {keys.record, keys.scale}:
            return
        record = record_in(deps.store.values(keys.prefix), keys)
        if record is None:
            return  # the job's keys are cleared
        if record != decision.state.record:
            deps.checks.fail(f"{self.node} decides, and the store holds: {_differences(decision.state.record, record)}")
        changed = deps.checks.record != record
        elected = deps.store.created(keys.master)
        revision = deps.store.modified(keys.scale)
        deps.checks.record_written(decision.state, decided_s, token, elected, revision)
        if deps.kill_on_write and changed:
            deps.kill_on_write = False
            self.after(0.0, self.crash)
        elif deps.kill_on_switch and _tells(decision, Switch):
            deps.kill_on_switch = False
            self.crash()

    def _sent(self, message: MasterMessage) -> None:
        if self.deps.kill_on_hold and isinstance(message, Hold):
            self.deps.kill_on_hold = False
            self.deps.timeline.after(self.deps.rng.uniform(0.0, 0.02), self.crash)

    def _agent_decided(self, before: AgentState, event: ag.Event | None, decision: ag.Decision) -> None:
        if event is not None:
            self.deps.checks.agent_stepped(before, event, decision, self.now_s())
            if self.deps.trace is not None and not isinstance(event, ag.LeaseRenewed):
                self.say(f"agent <- {event}: {decision.state.phase.value}")
        self.info = decision.state.info
        if decision.state.outcome is not None and before.outcome is None:
            self._check_isolation(decision.state.outcome)
        for effect in decision.effects:
            if isinstance(effect, ag.Exit):
                self._leaves(effect.outcome)

    def _check_isolation(self, outcome: Outcome) -> None:
        """A launcher decides to leave. The store may answer again before its workers have ended."""
        alone_s = self.now_s() - self.store.renewed_s
        early = alone_s < self.deps.spec.timeouts.recover_s
        if outcome.exit_code == ExitCode.STORE_UNREACHABLE and early:
            self.deps.checks.fail(f"{self.node} gives up although the store renewed its lease {alone_s:g} s ago")

    def _leaves(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if not outcome.save:
            self.deps.checks.lost_memories += 1

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def node(self) -> NodeId:
        """The node it runs on."""
        return self.info.node

    @property
    def agent(self) -> AgentState | None:
        """State of its agent; ``None`` before the agent exists."""
        return self.shell.state if self.shell is not None else None

    @property
    def master_shell(self) -> MasterShell | None:
        """The shell of the Master in this process, if there is one."""
        return self.candidate.shell if self.candidate is not None and self.alive else None

    @property
    def lease_s(self) -> float:
        """Duration of the lease that the store has granted it, in seconds."""
        return self.store.lease_s or self.deps.spec.timeouts.lease_ttl_s

    @property
    def lets_train(self) -> bool:
        """Whether its agent has not stopped the workers of its round."""
        return not self.paused and self.shell is not None and self.shell.state.phase is AgentPhase.RUNNING

    @property
    def trains(self) -> bool:
        """Whether workers of a round run on its node."""
        return any(worker.alive and worker.round for worker in self.workers)

    def clients(self) -> set[NodeId]:
        """The nodes whose streams to this launcher are open."""
        return {one.node for one in self.server.clients() if isinstance(one, SimLauncher)}

    def connected_to(self) -> SimProcess | None:
        """The process at the other end of the agent's open connection."""
        return self._connection.other if self._connection is not None else None

    # --- reported by its workers --------------------------------------------------------------------------------------

    def tell_agent(self, event: ag.Event) -> None:
        """Post an event of a worker to the agent."""
        if self.shell is not None:
            self.shell.post(event)

    def worker_ended(self, worker: SimWorker, code: int, peer_loss: bool) -> None:
        """A worker process has ended."""
        self.group.worker_ended(worker, code, peer_loss)

    def kept(self, message: Kept) -> None:
        """A commit was written to the checkpoint directory, or could not be."""
        if self.shell is not None and self.alive:
            self.run(self.shell.kept, message)

    def copied(self) -> None:
        """A shard of another node's commit has arrived."""
        if self.shell is not None and self.alive:
            self.run(self.shell.copied)

    def progressed(self, slot: int, commit: int) -> None:
        """A worker has committed."""
        if self._link is not None:
            self._link.progressed(slot, commit)

    # --- life cycle ---------------------------------------------------------------------------------------------------

    def lose_fork_server(self) -> None:
        """Kill the fork server, and with it the workers it has started."""
        self.lost += 1
        self.processes.lose()

    def interrupt(self, number: int) -> None:
        """Deliver a signal. A launcher that does not handle it yet ends."""
        if not self.loop.signal(number):
            self.outcome = Outcome(128 + number, "interrupted at the start")
            self.end()

    def end(self) -> None:
        """End the process and its workers."""
        self._die()
        for worker in self.workers:
            if worker.alive:
                self.deps.training.end(worker, -9)

    def crash(self) -> None:
        """Kill the launcher and its workers, as SIGKILL or a power loss does."""
        self.say("crashes")
        if self.alive:
            self.deps.checks.lost_memories += 1
            self.deps.checks.trouble(0.0)
        self.end()

    def _die(self) -> None:
        if not self.alive:
            return
        super().end()
        self.memory.end()
        self.server.hang_up()
        if self._connection is not None:
            self._connection.hang_up()


def _server_of(process: SimProcess) -> SimServer:
    assert isinstance(process, SimLauncher)  # noqa: S101 - no others listen
    return process.server


def _tells(decision: ev.Decision, kind: type) -> bool:
    return any(isinstance(effect, ev.TellNode) and isinstance(effect.message, kind) for effect in decision.effects)


@dataclasses.dataclass(frozen=True)
class _ProcessClock:
    now_s: Callable[[], float]


class _NoFile:
    def write(self) -> None:
        """Does nothing: the simulator does not use it."""

    def keep(self) -> None:
        """Does nothing: the simulator does not use it."""

    def remove(self) -> None:
        """Does nothing: the simulator does not use it."""


class _NoReport:
    folder = ""

    def keep(self, status: int, reason: str, failures: Sequence[Failure], history: Sequence[HistoryEntry]) -> None:
        """Does nothing: the simulator does not read it."""


class _NoGuard:
    """Renews nothing: a simulated loop is never busy while the lease's guard would still run."""

    def holds(self, lease: int, asked_s: float, lease_s: float) -> None:
        """Does nothing: no thread renews the lease."""

    def end(self) -> None:
        """Does nothing, because no thread was started."""


def _differences(decided: Record, stored: Record) -> str:
    """The fields in which two records differ, with both values."""
    names = [field.name for field in dataclasses.fields(Record)]
    both = [(name, getattr(decided, name), getattr(stored, name)) for name in names]
    return "; ".join(f"{name} {one}, {other}" for name, one, other in both if one != other)
