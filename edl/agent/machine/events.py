"""Events and effects of the agent's machine."""

from __future__ import annotations

from dataclasses import dataclass

from edl import machine
from edl.agent.machine.state import AgentState, Outcome
from edl.machine import Tick as Tick
from edl.machine import WakeAt as WakeAt
from edl.types import Round
from edl.wire.alarm import Alarm
from edl.wire.health import CheckHealth, HealthChecked
from edl.wire.local import ToWorker
from edl.wire.messages import AgentMessage, Asked, Hanging, HangLimit, KeepWith, Kept, MasterMessage, Pace
from edl.wire.process_events import ForkServerLost, WorkersStopped
from edl.wire.records import NodeInfo, Version, World

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkServerReady:
    """The fork server is ready to start workers."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream to a Master is open; no message has been sent on it yet."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream to the Master broke."""


@dataclass(frozen=True, slots=True)
class MasterSaid:
    """A message from the Master."""

    message: MasterMessage


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The store has renewed the lease. The request was sent ``age_s`` seconds ago, and the lease counts from then."""

    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseGone:
    """The store reports that the lease has ended."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The node has a new lease and therefore a new incarnation."""

    info: NodeInfo


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker process has ended. The texts come from its output."""

    round: Round
    slot: int
    exit_code: int
    exception: str = ""
    traceback: str = ""
    tail: str = ""
    peer_loss: bool = False
    host: str = ""
    pid: int = 0
    time_s: float = 0.0
    error_file: str = ""


@dataclass(frozen=True, slots=True)
class WorkerEntered:
    """A worker uses edl. ``rejoins``: it can join the next world in process; ``why_not``: the reason if it cannot."""

    round: Round
    slot: int
    rejoins: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class WorkerParked:
    """A worker has left the world of round ``left`` (0: it was in none) and waits for a place."""

    round: Round
    slot: int
    left: Round


@dataclass(frozen=True, slots=True)
class WorkerUnderway:
    """A worker trains in the world of round ``joined``."""

    round: Round
    slot: int
    joined: Round
    connect_s: float = 0.0
    """Seconds that forming the communicator took."""
    restore_s: float = 0.0
    """Seconds that restoring the state took."""


@dataclass(frozen=True, slots=True)
class WorkerHere:
    """A worker's answer to ``Hold``: its newest commit."""

    round: Round
    slot: int
    hold: int
    commit: int


@dataclass(frozen=True, slots=True)
class WorkerGaveUp:
    """A worker is about to fail for good: the job is to end with this exit status."""

    round: Round
    slot: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The in-memory state has changed other than by a commit: a checkpoint was loaded, or could not be."""


@dataclass(frozen=True, slots=True)
class Report:
    """A message for the Master that needs no decision here."""

    message: Kept | Asked | Hanging | Pace


@dataclass(frozen=True, slots=True)
class SavesFlushed:
    """The result of ``FlushSaves``."""

    round: Round
    pending: bool = False
    """Writing takes a while; another event follows."""
    unsaved: str = ""
    """The reason why the newest saved commit is not in the checkpoint directory; empty if it is."""


@dataclass(frozen=True, slots=True)
class LoggingChanged:
    """Log files cannot be written for lack of space, or can be again."""

    why: str
    """The reason; empty when they can be written."""


@dataclass(frozen=True, slots=True)
class AlarmsChanged:
    """The watchdogs of this node have looked for the first time, or have other alarms than before."""

    alarms: tuple[Alarm, ...]


@dataclass(frozen=True, slots=True)
class Suspected:
    """Workers of this node look as if they hung, or no longer do."""

    alarm: Alarm | None


@dataclass(frozen=True, slots=True)
class HangLimitChanged:
    """Another limit was learnt for the detection of hangs."""

    limit: HangLimit


@dataclass(frozen=True, slots=True)
class HealthProbed:
    """The probe of a health check has ended."""

    number: int
    stage: int
    """Those of its order."""
    found: HealthChecked | None
    """None: the probe could not be started."""


@dataclass(frozen=True, slots=True)
class KeepingChanged:
    """There is no memory for commits of this node's workers, or there is again."""

    why: str
    """The reason; empty when there is memory."""


@dataclass(frozen=True, slots=True)
class WorkerFroze:
    """A worker was stopped by a signal such as SIGSTOP."""

    round: Round
    slot: int


@dataclass(frozen=True, slots=True)
class WorkerThawed:
    """A stopped worker continues."""

    round: Round
    slot: int


@dataclass(frozen=True, slots=True)
class Fatal:
    """The launcher cannot continue (the fork server cannot warm up, name conflict, store refused)."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The launcher received SIGINT, SIGTERM or another signal to leave. ``again``: a second one, which means leave at
    once."""

    signal: int
    again: bool


@dataclass(frozen=True, slots=True)
class Noticed:
    """A preemption notice: this host will be taken away."""

    reason: str
    deadline_s: float = 0.0
    """Seconds from now until then; 0 means ``--shutdown-timeout``."""


Event = (
    ForkServerReady
    | Connected
    | Disconnected
    | MasterSaid
    | LeaseRenewed
    | LeaseGone
    | Registered
    | WorkerEnded
    | WorkerEntered
    | WorkerParked
    | WorkerUnderway
    | WorkerGaveUp
    | WorkerHere
    | StateChanged
    | Report
    | SavesFlushed
    | AlarmsChanged
    | Suspected
    | HangLimitChanged
    | HealthProbed
    | KeepingChanged
    | LoggingChanged
    | WorkerFroze
    | WorkerThawed
    | WorkersStopped
    | ForkServerLost
    | Fatal
    | Interrupted
    | Noticed
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to the Master."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Announce:
    """Reserve fresh ports unless some are already held, and tell the Master that this node is ready."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start workers of a world in these slots; each end is reported as ``WorkerEnded``."""

    world: World
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartAhead:
    """Start workers in these slots that wait for their world; ``born`` identifies the processes."""

    slots: tuple[int, ...]
    born: Round


@dataclass(frozen=True, slots=True)
class GivePlace:
    """Give these waiting workers their places in the world."""

    world: World
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellWorkers:
    """Send a message to those of these workers that use edl."""

    message: ToWorker
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Make all workers write their stacks to stderr."""


@dataclass(frozen=True, slots=True)
class SendCopies:
    """Send copies of commits to this peer from now on."""

    peer: KeepWith


@dataclass(frozen=True, slots=True)
class LoadCheckpoint:
    """Load the newest usable commit from the checkpoint directory; answered by ``StateChanged``."""


@dataclass(frozen=True, slots=True)
class FlushSaves:
    """All workers of this round have succeeded: make sure that their newest saved commit reaches the checkpoint
    directory. Answered by ``SavesFlushed``, immediately with ``pending`` if writing takes a while."""

    round: Round


@dataclass(frozen=True, slots=True)
class Write:
    """Write what this node has of a commit, unless the checkpoint directory has one as new. Answered by ``Report`` with
    ``Kept`` if it was written, and by ``StateChanged``."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Send a signal to these workers' process groups; an empty tuple means all living workers, in a world or not."""

    number: int
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeHealth:
    """Run the probe of a health check, instead of one that still runs; answered by ``HealthProbed``."""

    order: CheckHealth


@dataclass(frozen=True, slots=True)
class StopProbe:
    """End the probe that runs; there is no answer."""


@dataclass(frozen=True, slots=True)
class Warm:
    """Start the fork server; answered by ``ForkServerReady`` or ``Fatal``."""


@dataclass(frozen=True, slots=True)
class Register:
    """Reconnect to the Master, because a stream belongs to one incarnation, get a new lease and register under it;
    answered by ``Registered`` or ``Fatal``."""


@dataclass(frozen=True, slots=True)
class Log:
    """Show a line to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the agent with this outcome; the launcher then exits."""

    outcome: Outcome


Effect = (
    Say
    | Announce
    | Start
    | StartAhead
    | GivePlace
    | TellWorkers
    | SignalWorkers
    | DumpStacks
    | SendCopies
    | LoadCheckpoint
    | FlushSaves
    | Write
    | ProbeHealth
    | StopProbe
    | Warm
    | Register
    | WakeAt
    | Log
    | Exit
)


Decision = machine.Decision[AgentState, Effect]
