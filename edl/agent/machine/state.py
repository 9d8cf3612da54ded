"""What an agent knows of its own node."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from edl.config import Timeouts
from edl.types import Rank, Round
from edl.wire.messages import Attach, Failure, NodeInfo, World


class AgentPhase(enum.Enum):
    """Where a node stands."""

    WARMING = "warming"
    """The fork server is importing the framework; nothing can be started yet."""
    PREPARING = "preparing"
    """No worker of a round runs here; workers are being started ahead, so that the next world finds them waiting."""
    IDLE = "idle"
    """Ready for the next round."""
    RUNNING = "running"
    """The workers of ``world`` run here, or have ended by themselves."""
    STOPPING = "stopping"
    """The workers have been told to leave their round; when the last one has ended or parked, the node is ready."""
    LEAVING = "leaving"
    """The workers have been told to end; when the last one has, the launcher exits."""
    OVER = "over"
    """The exit has been decided and carried out."""


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
    """What one worker does."""

    STARTING = "starting"
    """Started ahead of a world; has not come to where it waits."""
    PARKED = "parked"
    """Lives, belongs to no world, and waits for a place."""
    ALIVE = "alive"
    """Belongs to the world."""
    DONE = "done"
    """Ended with status 0."""
    FAILED = "failed"
    STOPPED = "stopped"
    """Ended after it had been told to."""


HAS_PROCESS = frozenset({WorkerStatus.STARTING, WorkerStatus.PARKED, WorkerStatus.ALIVE})


@dataclass(frozen=True, slots=True)
class Worker:
    """What fills one slot of this node."""

    slot: int
    rank: Rank
    status: WorkerStatus = WorkerStatus.ALIVE
    local_rank: int = -1
    """Its place among the workers of this node in the world; -1: it belongs to none."""
    born: Round = Round(0)
    """Round into which, or after which, its process was started; with the slot it names the process."""
    bound: int = -1
    """Local rank that its process was started with: by that it has found its device, for good."""
    rejoins: bool = False
    """It has said that it can leave a world and join the next one without a restart."""
    underway: bool = False
    """It has its state and a communicator, and trains."""
    here: int | None = None
    """Commit it answered to the ``Hold`` under way."""
    how: str = "started"
    """Which way it took into the current world, in words."""
    gone: str = ""
    """Why it has no process any more, in words."""
    frozen_since_s: float | None = None
    """Since when it has been stopped by a signal such as SIGSTOP."""
    ending: bool = False
    """It has been sent a signal to end by: whatever it still says, it will not live."""
    condemned: str = ""
    """Why it was killed by this agent, when it was: its end is reported in these words."""
    anew: bool = False
    """The process in this slot cannot fill this place: it has been killed, and when it has ended another is started."""
    final: int = 0
    """Exit status with which the job is to end when this worker fails; 0: it may be started again."""
    renewals: int = 0
    """How often in a row the process in this slot has asked to be started again (``edl.agent.machine.independent``)."""
    renewed_s: float = 0.0
    """When that was last done."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the launcher ends."""

    exit_code: int
    reason: str
    failures: tuple[Failure, ...] = ()
    drained: bool = False
    """It has left in good order a job that goes on without it."""
    save: bool = True
    """Bring the newest commit where it survives before the launcher ends, unless the job has ended with success."""


class Leave(enum.Enum):
    """How the running round is being left, while ``STOPPING``."""

    AT_BOUNDARY = "at boundary"
    """At an agreed step boundary; nobody has been interrupted."""
    AT_ONCE = "at once"


@dataclass(frozen=True, slots=True)
class AgentState:
    """Everything an agent decides from."""

    info: NodeInfo
    timeouts: Timeouts
    phase: AgentPhase = AgentPhase.WARMING
    warm: bool = False
    """The fork server is up; without it nothing can be started."""
    connected: bool = False
    """The stream to the Master is open."""
    independent: bool = False
    """Workers need no others, and train on from world to world; see ``edl.agent.machine.independent``."""
    registered: bool = True
    """The lease lives, as far as this node knows."""
    contact_s: float = 0.0
    """When the store or the Master was last known to be in reach."""
    seen_round: Round = Round(0)
    world: World | None = None
    workers: tuple[Worker, ...] = ()
    use: tuple[int, ...] = ()
    """Slots that workers of the next world are in, as far as is known here; empty: the first ones."""
    by_device: bool = False
    """Workers find their devices by their local ranks: one that gets another local rank has to be started anew."""
    leave: Leave = Leave.AT_ONCE
    park_by_s: float | None = None
    """When those that were to park, and have not, are stopped."""
    rejoins: bool = False
    """Workers of this job can rejoin in process, as far as is known here: keep the slots filled ahead of a world."""
    ahead_failed: str = ""
    """Why workers could not be started ahead; tried again after the next round."""
    hold: int = 0
    """Number of the agreement on a step boundary under way, 0 for none."""
    binding: bool = False
    """Once answered, this node's workers may go on only by a Master's word; see ``Hold.binding``."""
    doubt_by_s: float | None = None
    """When a round is broken off whose workers wait for that word in vain."""
    draining: Outcome | None = None
    """This node wants to leave, and trains on until the others have a world without it."""
    drain_by_s: float | None = None
    gone_by_s: float | None = None
    """When whoever owns this host takes it away, as far as it was told: what is not saved then is not."""
    word_by_s: float | None = None
    """Until when it stays for the Master's word on how to end, though its workers may be gone."""
    drained_exit_code: int = 0
    """What a launcher ends with that has left in good order while the job goes on."""
    idling: bool = False
    """No worker is to wait here for a world; until the next world, or until some are asked for."""
    kill_at_s: float | None = None
    """When stopping workers get SIGKILL."""
    shed_by_s: float | None = None
    """When those get SIGKILL that are in slots which are not used."""
    killed: bool = False
    """SIGKILL has been sent to the stopping workers."""
    flushed: bool = False
    """What the workers of this round saved is written, or known to be lost (``unsaved``). Only once all have ended."""
    unsaved: str = ""
    """Why the newest commit that they saved is not in the checkpoint directory; see ``WorkersDone``."""
    not_kept: str = ""
    """Why commits of this node's workers are not kept in memory."""
    not_logged: str = ""
    """Why what this node's workers write is not kept in files."""
    unsent: tuple[Failure, ...] = ()
    """Failures of the current round; told again at each attach until the round is stopped."""
    outcome: Outcome | None = None
    """Set when leaving: what to exit with once the workers are gone."""
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
        """``use``, also where nothing was said."""
        return self.use or tuple(range(self.info.slots))

    @property
    def shed(self) -> tuple[Worker, ...]:
        """Workers without a world that have been told to end."""
        return tuple(worker for worker in self.alive if worker.ending and worker.status is not WorkerStatus.ALIVE)

    @property
    def between(self) -> bool:
        """No world runs here, but independent workers may: they train on until the next one."""
        return self.independent and self.phase in (AgentPhase.IDLE, AgentPhase.WARMING)

    @property
    def unbroken(self) -> bool:
        """The round goes on here, or is being left at a boundary: nobody has been told to stop at once."""
        leaving = self.phase is AgentPhase.STOPPING and self.leave is Leave.AT_BOUNDARY
        return self.phase is AgentPhase.RUNNING or leaving or (self.between and bool(self.in_world))

    @property
    def parked(self) -> bool:
        """Every slot that is to be used has a worker that waits for a place."""
        waiting = {worker.slot for worker in self.workers if worker.status is WorkerStatus.PARKED and not worker.ending}
        return waiting >= set(self.uses)

    @property
    def underway(self) -> bool:
        """Every worker of the world here trains, and can be held at a step boundary."""
        running = self.phase is AgentPhase.RUNNING and bool(self.in_world)
        return running and all(worker.underway for worker in self.in_world)

    @property
    def running_round(self) -> Round:
        """Round whose workers this node answers for; 0 when it runs none."""
        if self.world is None or self.phase not in (AgentPhase.RUNNING, AgentPhase.STOPPING):
            return Round(0)
        return self.world.round

    @property
    def done(self) -> bool:
        """Every worker here has ended with status 0."""
        placed = [worker for worker in self.workers if worker not in self.shed]
        running = self.phase is AgentPhase.RUNNING and bool(placed)
        return running and all(worker.status is WorkerStatus.DONE for worker in placed)

    @property
    def in_doubt(self) -> bool:
        """Whether something may have been agreed on that these workers must not go on without."""
        return bool(self.hold) and self.binding and all(worker.here is not None for worker in self.in_world)

    def attach(self) -> Attach:
        """What this node tells a Master it meets."""
        return Attach(
            self.info,
            self.seen_round,
            self.running_round,
            self.done,
            self.underway,
            self.use,
            saving=self.done and not self.flushed,
            unsaved=self.unsaved,
        )
