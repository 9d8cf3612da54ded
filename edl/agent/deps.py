"""Dependencies of an agent's shell: workers, checkpoints, ports, and its connection to the Master."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from edl.agent.machine import events as ev
from edl.agent.machine.state import AgentState
from edl.agent.switch_watch import SwitchFiles
from edl.agent.workers.hang import Watched
from edl.agent.workers.hang_shell import HangSources
from edl.ports import Clock, RunState
from edl.types import FencingToken, Round
from edl.wire.health import CheckHealth, HealthChecked
from edl.wire.local import Seat, StepTimes, ToWorker
from edl.wire.messages import AgentMessage, KeepWith, MasterMessage, ServiceFromWorker, ServiceToWorker
from edl.wire.process_events import ProcessEvent
from edl.wire.records import Holding, NodeInfo, Version, World


class WorkerStarter(Protocol):
    """The process that starts workers, as the agent's shell uses it: a part of ``edl.ports.Processes``."""

    async def warm(self) -> str:
        """Start the process; returns a sentence for the log. Raises ``WorkerStartError``."""
        ...

    def events(self) -> AsyncIterator[ProcessEvent]:
        """Events of the workers, in order, for a single consumer."""
        ...

    def entitle(self, until_s: float) -> None:
        """Allow workers to run until this time on the monotonic clock."""
        ...


class Workers(Protocol):
    """The worker processes of this node. See ``edl.agent.workers.workers.WorkerGroup``."""

    def meet_at(self, worker_server: str) -> None:
        """Set the address at which workers connect to their agent."""
        ...

    def warn_by(self, warn: Callable[[str], None]) -> None:
        """``warn`` gets the reason when workers' output is not written to files, and an empty text when it is again."""
        ...

    async def start(self, world: World, slots: tuple[int, ...]) -> list[ev.WorkerEnded]:
        """Start workers of a world in these slots; returns a ``WorkerEnded`` for each that could not be created."""
        ...

    async def start_ahead(self, born: Round, slots: tuple[int, ...], uses: tuple[int, ...]) -> list[ev.WorkerEnded]:
        """Start workers that wait for their world; returns a ``WorkerEnded`` for each that could not be created."""
        ...

    def seat(self, world: World, slot: int, secret: str) -> Seat:
        """The place of a living worker in a world."""
        ...

    async def signal(self, number: int, slots: tuple[int, ...]) -> None:
        """Signal the process groups of these workers, or of all if ``slots`` is empty."""
        ...

    async def forward(self, number: int) -> None:
        """Pass a signal on to each worker that handles it."""
        ...

    async def dump_stacks(self) -> None:
        """Have all workers write the stacks of their threads to stderr; returns when they have."""
        ...

    def watched(self) -> dict[int, Watched]:
        """The workers that have a process, by slot."""
        ...

    def place(self, pid: int) -> tuple[Round, int] | None:
        """The round in which a process was started, and its slot; None if unknown."""
        ...

    async def ended(self, pid: int, code: int) -> ev.WorkerEnded | None:
        """Forget a process that has ended, and describe its end; None for one that is not known."""
        ...

    async def done(self, limit_s: float) -> None:
        """Wait until the workers' output is in files, at most ``limit_s`` seconds."""
        ...


class WorkerLink(Protocol):
    """Connections to the workers whose scripts use edl. See ``edl.agent.worker_server.WorkerServer``."""

    address: str
    progress: dict[int, int]
    """Newest commit of each slot."""
    newest: tuple[int, float] | None
    """The highest of these commits and its time on the event loop's clock; None before the first one."""
    waits: dict[int, tuple[float, float]]
    """Seconds that the worker of each slot has waited for its commits and for data, since its process started."""

    times: dict[int, StepTimes]
    """The last window of each slot's worker that has not been sent to the Master."""

    def open(self) -> None:
        """Start to accept connections."""
        ...

    def close(self) -> None:
        """Close all connections; workers end when theirs is closed."""
        ...

    def tell(self, message: ToWorker, slots: tuple[int, ...]) -> None:
        """Send a message to the workers in these slots; those that are not connected miss it."""
        ...

    def pass_on(self, message: ServiceToWorker) -> None:
        """Pass a message from a service of the Master on to a worker."""
        ...

    def reattached(self, token: int) -> None:
        """Tell all workers that the agent is attached to the Master with this token."""
        ...

    def give_place(self, slot: int, seat: Seat) -> None:
        """Send a waiting worker its place."""
        ...


class Ports(Protocol):
    """Reserved ports. See ``edl.agent.workers.ports.PortReservation``."""

    def ports(self, count: int) -> tuple[int, ...]:
        """The ports reserved for the next round; the same ones until ``use`` is called. Raises ``OSError``."""
        ...

    def use(self) -> None:
        """A round has started with these ports; reserve others for the next one."""
        ...

    def release(self) -> None:
        """Close the sockets that reserve the ports."""
        ...


class NodeCheckpoints(Protocol):
    """The part of the checkpoint manager that the agent uses."""

    @property
    def stored(self) -> tuple[Version, bool]:
        """Newest commit known to be complete in the checkpoint directory, and whether it is sharded."""
        ...

    @property
    def refused(self) -> str:
        """Why none of the existing checkpoints can be used; empty if one can, or if there is none."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a save or a read of the checkpoint directory is in progress."""
        ...

    @property
    def loading(self) -> bool:
        """Whether ``load`` is in progress."""
        ...

    async def settled(self) -> None:
        """Wait until saves and reads are finished, then look for the newest checkpoint."""
        ...

    def holdings(self) -> tuple[Holding, ...]:
        """The commits in this node's memory."""
        ...

    def holders(self) -> int:
        """The smallest number of nodes with a recent commit of this node's in memory, this node included; 0: no
        commits."""
        ...

    def enter(self, world: World) -> None:
        """Start a world that this node is in."""
        ...

    def keep_with(self, peer: KeepWith) -> None:
        """Send copies of commits to this node from now on."""
        ...

    async def look(self) -> None:
        """Look for the newest checkpoint in the directory."""
        ...

    async def load(self) -> None:
        """Load the newest usable checkpoint into memory."""
        ...

    async def write(self, version: Version, reason: str) -> None:
        """Write what this node has of a commit, if the checkpoint directory has nothing as new."""
        ...

    @property
    def saving(self) -> bool:
        """Whether this node still has to write a commit that workers have saved."""
        ...

    @property
    def unsaved(self) -> str:
        """Why the newest saved commit is not in the checkpoint directory; empty if it is or if another node writes
        it."""
        ...

    async def flush_saves(self) -> str:
        """Wait until saved commits are written; returns ``unsaved``."""
        ...

    async def save_what_is_left(self, reason: str) -> None:
        """Before the launcher exits: write the newest commit to the directory, or at least copy it to the peer."""
        ...


class SyncedFiles(Protocol):
    """The script's directories that are kept alike on all nodes. See ``edl.launch.synced_dirs``."""

    async def caught_up(self) -> None:
        """Fetch what the other nodes have, as far as they send it."""
        ...

    async def alike(self, world: World, started: int) -> None:
        """Wait until all members of a world that is about to start have the same files. ``started``: number of workers
        that start on this node; the others run on. Raises ``CheckpointError``."""
        ...


class MasterStream(Protocol):
    """An agent's connection to a Master."""

    def send(self, message: AgentMessage) -> None:
        """Queue a message; it is lost if the stream breaks."""
        ...

    async def run(self, opened: Callable[[], None], heard: Callable[[MasterMessage], Awaitable[None]]) -> str:
        """Run until the stream ends; ``opened`` is called once a Master has accepted it, ``heard`` for each message.
        Returns why it ended."""
        ...


@dataclass(frozen=True, slots=True)
class AgentDeps:
    """Everything that an agent's shell gets from its launcher."""

    clock: Clock
    processes: WorkerStarter
    warming: Awaitable[str]
    """The first call of ``processes.warm()``, which is already running."""
    workers: Workers
    worker_server: Callable[[Callable[[ev.Event], None], Callable[[ServiceFromWorker], None]], WorkerLink]
    """Creates the worker server. Arguments: the receiver of workers' events, and the receiver of their messages to
    services of the Master."""
    ports: Ports
    checkpoints: NodeCheckpoints
    secret: Callable[[Round], str]
    """The secret by which the workers of a round identify each other."""
    connect: Callable[[str, int], MasterStream]
    refuses: Callable[[str, int], Awaitable[bool]]
    register: Callable[[], Awaitable[NodeInfo]]
    """Get a new lease and register under it."""
    master_refused: Callable[[FencingToken], None]
    log: Callable[[str], None]
    hangs: Callable[[str], HangSources] | None = None
    """What is looked at to find hangs; the argument is the address of the worker server. None: hangs are not looked
    for."""
    save_timeout_s: float = 600.0
    """Most seconds that the end of the job waits until saved commits are written."""
    switches: SwitchFiles | None = None
    """The request files for a checkpoint in the checkpoint directory, if there is one."""
    health: Callable[[CheckHealth], Awaitable[HealthChecked | None]] | None = None
    """Probes this node; None: it cannot. See ``edl.agent.health_probe``."""
    synced: SyncedFiles | None = None
    """Directories whose newest files workers wait for; None: there are none."""
    run_states: Callable[[Collection[int]], Mapping[int, RunState]] | None = None
    """The states of processes; those that are gone are left out. None: nobody looks at them."""
    leaves: Callable[[], None] = lambda: None
    """Called when this node begins to leave a job that goes on without it."""
    decided: Callable[[AgentState, ev.Event | None, ev.Decision], None] = lambda before, event, decision: None
    """Observes each decision before it is carried out; the event is None for the first one."""
