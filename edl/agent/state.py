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
    """The nursery is importing the framework; nothing can be started yet."""
    IDLE = "idle"
    """Ready for the next round."""
    RUNNING = "running"
    """The workers of ``world`` run here, or have ended by themselves."""
    STOPPING = "stopping"
    """The workers have been told to end; when the last one has, the node is ready again."""
    LEAVING = "leaving"
    """The workers have been told to end; when the last one has, the launcher exits."""
    OVER = "over"
    """The exit has been decided and carried out."""


class WorkerStatus(enum.Enum):
    """What one worker does."""

    ALIVE = "alive"
    DONE = "done"
    """Ended with status 0."""
    FAILED = "failed"
    STOPPED = "stopped"
    """Ended after it had been told to."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker of the current world on this node."""

    local_rank: int
    rank: Rank
    status: WorkerStatus = WorkerStatus.ALIVE
    frozen_since_s: float | None = None
    """Since when it has been stopped by a signal such as SIGSTOP."""
    condemned: str = ""
    """Why it was killed by this agent, when it was: its end is reported in these words."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the launcher ends."""

    exit_code: int
    reason: str
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentState:
    """Everything an agent decides from."""

    info: NodeInfo
    timeouts: Timeouts
    phase: AgentPhase = AgentPhase.WARMING
    warm: bool = False
    """The nursery is up; without it nothing can be started."""
    connected: bool = False
    """The stream to the Master is open."""
    registered: bool = True
    """The lease lives, as far as this node knows."""
    contact_s: float = 0.0
    """When the store or the Master was last known to be in reach."""
    seen_round: Round = Round(0)
    world: World | None = None
    workers: tuple[Worker, ...] = ()
    kill_at_s: float | None = None
    """When stopping workers get SIGKILL."""
    killed: bool = False
    """SIGKILL has been sent to the stopping workers."""
    unsent: tuple[Failure, ...] = ()
    """Failures of the current round; told again at each attach until the round is stopped."""
    outcome: Outcome | None = None
    """Set when leaving: what to exit with once the workers are gone."""
    reason: str = ""

    @property
    def alive(self) -> tuple[Worker, ...]:
        """Workers that have not ended."""
        return tuple(worker for worker in self.workers if worker.status is WorkerStatus.ALIVE)

    @property
    def running_round(self) -> Round:
        """Round whose workers this node answers for; 0 when it runs none."""
        if self.world is None or self.phase not in (AgentPhase.RUNNING, AgentPhase.STOPPING):
            return Round(0)
        return self.world.round

    @property
    def done(self) -> bool:
        """Every worker here has ended with status 0."""
        return bool(self.workers) and all(worker.status is WorkerStatus.DONE for worker in self.workers)

    def attach(self) -> Attach:
        """What this node tells a Master it meets."""
        return Attach(self.info, self.seen_round, self.running_round, self.done)
