"""What happens to an agent, and what it has done about it."""

from __future__ import annotations

from dataclasses import dataclass

from edl import machine
from edl.agent.machine.state import AgentState, Outcome
from edl.machine import Tick as Tick
from edl.machine import WakeAt as WakeAt
from edl.types import Round
from edl.wire.local import ToWorker
from edl.wire.messages import (
    AgentMessage,
    Asked,
    Hanging,
    KeepWith,
    Kept,
    MasterMessage,
    NodeInfo,
    Pace,
    Version,
    World,
)

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Warmed:
    """The fork server can start workers."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream to a Master is open; nothing has been said on it yet."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream to the Master broke."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The Master said something."""

    message: MasterMessage


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The store has renewed the lease; the request was sent ``age_s`` ago, and the lease counts from no earlier."""

    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseGone:
    """The store says that the lease has ended."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The node has a new lease and with it a new incarnation."""

    info: NodeInfo


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker process is gone. The texts come from what it wrote."""

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
    """A worker uses edl, and says whether it can rejoin in process."""

    round: Round
    slot: int
    rejoins: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class WorkerParked:
    """A worker has left the world ``left`` (0: it was in none) and waits for a place."""

    round: Round
    slot: int
    left: Round


@dataclass(frozen=True, slots=True)
class WorkerUnderway:
    """A worker trains in the world ``joined``."""

    round: Round
    slot: int
    joined: Round


@dataclass(frozen=True, slots=True)
class WorkerHere:
    """A worker's answer to a ``Hold``."""

    round: Round
    slot: int
    hold: int
    commit: int


@dataclass(frozen=True, slots=True)
class WorkerGaveUp:
    """A worker is about to fail for good: the job is to end with this status."""

    round: Round
    slot: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class StateChanged:
    """What the keeper holds has changed other than by a commit (loaded from the checkpoint directory, or not)."""


@dataclass(frozen=True, slots=True)
class Report:
    """Something for the Master that needs no decision here."""

    message: Kept | Asked | Hanging | Pace


@dataclass(frozen=True, slots=True)
class SavesFlushed:
    """The answer to ``FlushSaves``."""

    round: Round
    pending: bool = False
    """Not yet: the answer follows."""
    unsaved: str = ""
    """Why the newest saved commit is not in the checkpoint directory."""


@dataclass(frozen=True, slots=True)
class LoggingChanged:
    """There is no room for log files any more, or there is again."""

    why: str
    """Empty: there is."""


@dataclass(frozen=True, slots=True)
class KeepingChanged:
    """Commits of this node's workers find no memory, or find it again."""

    why: str
    """Empty: they do."""


@dataclass(frozen=True, slots=True)
class WorkerFroze:
    """A worker was stopped by a signal."""

    round: Round
    slot: int


@dataclass(frozen=True, slots=True)
class WorkerThawed:
    """A stopped worker goes on."""

    round: Round
    slot: int


@dataclass(frozen=True, slots=True)
class WorkersKilled:
    """All workers have been killed for a reason that is none of theirs; those come as ``WorkerEnded`` of their own."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForkServerGone:
    """The fork server died, and its workers with it; those come as ``WorkerEnded`` of their own."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fatal:
    """The launcher cannot go on (fork server cannot warm up, name conflict, store refused)."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The launcher got SIGINT, SIGTERM or another signal to leave by. The second one means: now."""

    signal: int
    again: bool


@dataclass(frozen=True, slots=True)
class Noticed:
    """Whoever owns this host says that it will be taken away: a notice of preemption, a signal that announces one."""

    reason: str
    deadline_s: float = 0.0
    """Seconds from now until then; 0: as long as ``--shutdown-timeout``."""


Event = (
    Warmed
    | Connected
    | Disconnected
    | Heard
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
    | KeepingChanged
    | LoggingChanged
    | WorkerFroze
    | WorkerThawed
    | WorkersKilled
    | ForkServerGone
    | Fatal
    | Interrupted
    | Noticed
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """Send to the Master."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Announce:
    """Reserve fresh ports unless some are held already, and tell the Master that this node is ready."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start workers of a world in these slots; each end comes back as ``WorkerEnded``."""

    world: World
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartAhead:
    """Start workers in these slots that wait for their world; ``born`` names the processes."""

    slots: tuple[int, ...]
    born: Round


@dataclass(frozen=True, slots=True)
class GivePlace:
    """Tell these waiting workers their places in the world."""

    world: World
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellWorkers:
    """Say this to these workers, as far as they use edl."""

    message: ToWorker
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have all workers write their stacks to their standard error."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Send copies of commits to that node from now on."""

    peer: KeepWith


@dataclass(frozen=True, slots=True)
class Load:
    """Read the newest usable commit from the checkpoint directory; comes back as ``StateChanged``."""


@dataclass(frozen=True, slots=True)
class FlushSaves:
    """All workers of this round have ended well: see that the newest commit which they saved reaches the checkpoint
    directory. Comes back as ``SavesFlushed``, at once with ``pending`` if that takes a while."""

    round: Round


@dataclass(frozen=True, slots=True)
class Write:
    """Write what is here of a commit, if the checkpoint directory has none as new; comes back as ``Report`` of ``Kept``
    if it was written, and as ``StateChanged``."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Send a signal to these workers' process groups; an empty tuple means all that live, in a world or not."""

    number: int
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Warm:
    """Bring up the fork server; comes back as ``Warmed`` or ``Fatal``."""


@dataclass(frozen=True, slots=True)
class Register:
    """Hang up and call the Master again, since a stream belongs to one incarnation (what the Master still says on the
    old one is not for the next), get a new lease and register under it; comes back as ``Registered`` or ``Fatal``."""


@dataclass(frozen=True, slots=True)
class Log:
    """Tell the person who reads the launcher's output."""

    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the launcher."""

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
    | Keep
    | Load
    | FlushSaves
    | Write
    | Warm
    | Register
    | WakeAt
    | Log
    | Exit
)


Decision = machine.Decision[AgentState, Effect]
