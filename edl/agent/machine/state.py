"""The state of an agent's machine."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from edl.config import Timeouts
from edl.types import Rank, Round
from edl.wire.alarm import Alarm
from edl.wire.health import CheckHealth, HealthChecked
from edl.wire.messages import Attach, HangLimit
from edl.wire.records import Failure, NodeInfo, World


class AgentPhase(enum.Enum):
    """The phases of a node."""

    WARMING = "warming"
    """The fork server is importing the framework; no worker can be started yet."""
    PREPARING = "preparing"
    """No worker of a round runs here; workers are being started ahead of the next world."""
    IDLE = "idle"
    """Ready for the next round."""
    RUNNING = "running"
    """The workers of ``world`` run here, or have ended by themselves."""
    STOPPING = "stopping"
    """The workers are leaving their round; when the last one has ended or parked, the node is ready."""
    LEAVING = "leaving"
    """The workers are being ended; when the last one has ended, the launcher exits."""
    OVER = "over"
    """The launcher exits."""


_P = AgentPhase
NEXT_PHASES: dict[AgentPhase, frozenset[AgentPhase]] = {
    _P.WARMING: frozenset({_P.IDLE, _P.PREPARING, _P.LEAVING}),
    # WARMING, from here on: the fork server was lost.
    _P.PREPARING: frozenset({_P.IDLE, _P.RUNNING, _P.WARMING, _P.LEAVING}),
    # STOPPING: workers that wait are ended, because they are not to be used.
    _P.IDLE: frozenset({_P.RUNNING, _P.PREPARING, _P.STOPPING, _P.WARMING, _P.LEAVING}),
    # IDLE: the round is over and no worker has to be stopped.
    _P.RUNNING: frozenset({_P.STOPPING, _P.IDLE, _P.WARMING, _P.LEAVING}),
    _P.STOPPING: frozenset({_P.IDLE, _P.PREPARING, _P.WARMING, _P.LEAVING}),
    _P.LEAVING: frozenset({_P.OVER}),
    _P.OVER: frozenset(),
}
"""Which phase may follow which. ``tests/sim/test_transitions.py`` holds the machine to it."""


class WorkerStatus(enum.Enum):
    """The phases of a worker."""

    STARTING = "starting"
    """Started ahead of a world; has not reached its waiting point yet."""
    PARKED = "parked"
    """Lives, belongs to no world, and waits for a place."""
    ALIVE = "alive"
    """Belongs to the world."""
    DONE = "done"
    """Ended with status 0."""
    FAILED = "failed"
    STOPPED = "stopped"
    """Ended on request."""


HAS_PROCESS = frozenset({WorkerStatus.STARTING, WorkerStatus.PARKED, WorkerStatus.ALIVE})


@dataclass(frozen=True, slots=True)
class Worker:
    """The occupant of one slot."""

    slot: int
    rank: Rank
    status: WorkerStatus = WorkerStatus.ALIVE
    local_rank: int = -1
    """Its local rank in the world; -1 if it belongs to none."""
    born: Round = Round(0)
    """Round in which, or after which, its process was started; together with the slot it identifies the process."""
    bound: int = -1
    """Local rank with which its process was started, which determines its device for good."""
    rejoins: bool = False
    """It can leave a world and join the next one without a restart."""
    underway: bool = False
    """It has its state and a communicator, and trains."""
    connect_s: float = 0.0
    """Seconds that forming its last communicator took."""
    restore_s: float = 0.0
    """Seconds that it last took to restore the state."""
    here: int | None = None
    """Its answer to the current ``Hold``: its newest commit."""
    how: str = "started"
    """How it came into the current world, as text."""
    gone: str = ""
    """Why its process ended, as text."""
    frozen_since_s: float | None = None
    """Time at which it was stopped by a signal such as SIGSTOP."""
    ending: bool = False
    """It has been sent a signal to end; its messages no longer count."""
    condemned: str = ""
    """Why this agent killed it; its end is reported with this text."""
    being_replaced: bool = False
    """The process cannot fill this place: it has been killed, and another is started when it has ended."""
    final: int = 0
    """Exit status with which the job ends if this worker fails; 0: it may be restarted."""
    renewals: int = 0
    """Consecutive requests of this slot's process to be restarted (``edl.agent.machine.independent``)."""
    renewed_s: float = 0.0
    """Time of the last such request."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the launcher ends."""

    exit_code: int
    reason: str
    failures: tuple[Failure, ...] = ()
    drained: bool = False
    """It left the job gracefully, and the job continues without it."""
    save: bool = True
    """Save the newest commit before the launcher exits, unless the job has succeeded."""
    job_over: bool = False
    """The job has ended for all its nodes, as the Master says or the store shows."""


class Leave(enum.Enum):
    """How the current round is being left, while ``STOPPING``."""

    AT_BOUNDARY = "at boundary"
    """At an agreed step boundary, without interrupting any worker."""
    AT_ONCE = "at once"


@dataclass(frozen=True, slots=True)
class AgentState:
    """Everything that the agent's decisions depend on."""

    info: NodeInfo
    timeouts: Timeouts
    phase: AgentPhase = AgentPhase.WARMING
    warm: bool = False
    """The fork server is up; without it no worker can be started."""
    connected: bool = False
    """The stream to the Master is open."""
    independent: bool = False
    """Workers are independent and continue from world to world; see ``edl.agent.machine.independent``."""
    registered: bool = True
    """The lease is alive, as far as this node knows."""
    contact_s: float = 0.0
    """Time of the last contact with the store or the Master."""
    seen_round: Round = Round(0)
    world: World | None = None
    workers: tuple[Worker, ...] = ()
    use: tuple[int, ...] = ()
    """Slots that the next world is expected to use; empty: the first ones."""
    by_device: bool = False
    """Workers choose their devices by local rank: one whose local rank changes must be restarted."""
    leave: Leave = Leave.AT_ONCE
    park_by_s: float | None = None
    """Deadline for workers to park; then they are stopped."""
    rejoins: bool = False
    """Workers of this job can rejoin in process: fill the slots ahead of a world."""
    ahead_failed: str = ""
    """Why workers could not be started ahead; retried after the next round."""
    hold: int = 0
    """Number of the current agreement on a step boundary, 0 for none."""
    binding: bool = False
    """After their answers, this node's workers may continue only on a Master's order; see ``Hold.binding``."""
    doubt_by_s: float | None = None
    """Deadline after which a round whose workers wait for that order is interrupted."""
    draining: Outcome | None = None
    """This node wants to leave, and trains until the others have a world without it."""
    drain_by_s: float | None = None
    gone_by_s: float | None = None
    """Time at which this host is taken away, if known; anything unsaved is then lost."""
    word_by_s: float | None = None
    """Deadline for the Master's answer to a leaving node, even if its workers have ended."""
    drained_exit_code: int = 0
    """Exit status of a launcher that left gracefully while the job continues."""
    idling: bool = False
    """No worker waits here for a world, until the next world or until the Master asks for some."""
    kill_at_s: float | None = None
    """Deadline after which stopping workers get SIGKILL."""
    shed_by_s: float | None = None
    """Deadline after which workers in unused slots get SIGKILL."""
    bury_by_s: float | None = None
    """Deadline after which a leaving launcher exits although killed workers have not ended."""
    killed: bool = False
    """SIGKILL has been sent to the stopping workers."""
    stopped_itself: bool = False
    """The fork server killed the workers of the last round before their stop order arrived; see ``Ready``."""
    flushed: bool = False
    """The saves of this round's workers are written, or known to be lost (``unsaved``). Only set once all have
    ended."""
    unsaved: str = ""
    """Why their newest saved commit is not in the checkpoint directory; see ``WorkersDone``."""
    not_kept: str = ""
    """Why commits of this node's workers are not kept in memory."""
    not_logged: str = ""
    """Why the output of this node's workers is not written to files."""
    alarms: tuple[Alarm, ...] | None = None
    """Alarms of this node's watchdogs; None: they have not looked yet, or there are none."""
    suspicion: Alarm | None = None
    """The alarm about workers that look as if they hung."""
    hang_limit: HangLimit | None = None
    """The limit that was learnt for that; None: nothing was learnt."""
    health_order: CheckHealth | None = None
    """Order of the probe that runs; None: none runs."""
    health_answer: HealthChecked | None = None
    """Result of the last probe."""
    unsent: tuple[Failure, ...] = ()
    """Failures of the current round; sent again at each attach until the round is stopped."""
    outcome: Outcome | None = None
    """Set when leaving: how to exit once the workers have ended."""
    reason: str = ""

    @property
    def alive(self) -> tuple[Worker, ...]:
        """Workers that have a process, in a world or not."""
        return tuple(worker for worker in self.workers if worker.status in HAS_PROCESS)

    @property
    def in_world(self) -> tuple[Worker, ...]:
        """Workers that belong to the world and have not ended."""
        return tuple(worker for worker in self.workers if worker.status is WorkerStatus.ALIVE)

    @property
    def uses(self) -> tuple[int, ...]:
        """``use``, or the first slots if it is empty."""
        return self.use or tuple(range(self.info.slots))

    @property
    def shed(self) -> tuple[Worker, ...]:
        """Workers without a world that are being ended."""
        return tuple(worker for worker in self.alive if worker.ending and worker.status is not WorkerStatus.ALIVE)

    @property
    def between(self) -> bool:
        """Whether no world runs here, but independent workers may: they train on until the next one."""
        return self.independent and self.phase in (AgentPhase.IDLE, AgentPhase.WARMING)

    @property
    def unbroken(self) -> bool:
        """Whether the round continues here, or is being left at a step boundary, without an interruption."""
        leaving = self.phase is AgentPhase.STOPPING and self.leave is Leave.AT_BOUNDARY
        return self.phase is AgentPhase.RUNNING or leaving or (self.between and bool(self.in_world))

    @property
    def parked(self) -> bool:
        """Whether every slot to be used has a worker that waits for a place."""
        waiting = {worker.slot for worker in self.workers if worker.status is WorkerStatus.PARKED and not worker.ending}
        return waiting >= set(self.uses)

    @property
    def underway(self) -> bool:
        """Whether all workers of the world here train, and can be held at a step boundary."""
        running = self.phase is AgentPhase.RUNNING and bool(self.in_world)
        return running and all(worker.underway for worker in self.in_world)

    @property
    def running_round(self) -> Round:
        """Round whose workers this node is responsible for; 0 if it runs none."""
        if self.world is None or self.phase not in (AgentPhase.RUNNING, AgentPhase.STOPPING):
            return Round(0)
        return self.world.round

    @property
    def done(self) -> bool:
        """Whether all workers here have ended with status 0."""
        placed = [worker for worker in self.workers if worker not in self.shed]
        running = self.phase is AgentPhase.RUNNING and bool(placed)
        return running and all(worker.status is WorkerStatus.DONE for worker in placed)

    @property
    def leaves(self) -> bool:
        """Whether this node leaves a job that goes on without it."""
        over = self.outcome is not None and self.outcome.job_over
        leaving = self.draining is not None or self.phase in (AgentPhase.LEAVING, AgentPhase.OVER)
        return leaving and not over

    @property
    def in_doubt(self) -> bool:
        """Whether a step boundary may have been agreed that these workers must not ignore."""
        held = bool(self.hold) and self.binding and bool(self.in_world)
        return held and all(worker.here is not None for worker in self.in_world)

    def attach(self) -> Attach:
        """The message with which this node introduces itself to a Master."""
        return Attach(
            self.info,
            self.seen_round,
            self.running_round,
            self.done,
            self.underway,
            self.use,
            saving=self.done and not self.flushed,
            unsaved=self.unsaved,
            unbroken=self.unbroken,
            in_doubt=self.in_doubt,
        )
