"""Dependencies of an agent's shell: workers, checkpoints, ports, and its connection to the Master."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from edl.agent.machine import events as ev
from edl.agent.machine.state import AgentState
from edl.agent.switch_watch import SwitchFiles
from edl.agent.workers.hang import Watched
from edl.ports import Activity, Clock
from edl.types import FencingToken, Round
from edl.wire.local import Seat, ToWorker
from edl.wire.messages import (
    AgentMessage,
    Holding,
    KeepWith,
    MasterMessage,
    NodeInfo,
    ServiceFromWorker,
    ServiceToWorker,
    Version,
    World,
)
from edl.wire.process_events import ProcessEvent


class WorkerStarter(Protocol):
    """The process that starts workers, as the agent's shell uses it: a part of ``edl.ports.Processes``."""

    async def warm(self) -> str:
        """Bring it up; returns a sentence for the log. Raises ``WorkerStartError``."""
        ...

    def events(self) -> AsyncIterator[ProcessEvent]:
        """Events of the workers, in order. One consumer."""
        ...

    def entitle(self, until_s: float) -> None:
        """Workers may run until then, by the monotonic clock."""
        ...


class Workers(Protocol):
    """The worker processes of this node. See ``edl.agent.workers.workers.WorkerGroup``."""

    def meet_at(self, worker_server: str) -> None:
        """Workers find their agent at this address."""
        ...

    def warn_by(self, warn: Callable[[str], None]) -> None:
        """``warn`` gets why the workers' output is not kept, and an empty text once it is again."""
        ...

    async def start(self, world: World, slots: tuple[int, ...]) -> list[ev.WorkerEnded]:
        """Start workers of a world in these slots; returns an end for each that could not be created."""
        ...

    async def start_ahead(self, born: Round, slots: tuple[int, ...], uses: tuple[int, ...]) -> list[ev.WorkerEnded]:
        """Start workers that wait for their world; returns an end for each that could not be created."""
        ...

    def seat(self, world: World, slot: int, secret: str) -> Seat:
        """The place that a living worker has in a world."""
        ...

    async def signal(self, number: int, slots: tuple[int, ...]) -> None:
        """Signal the process groups of these workers, or of all if none is named."""
        ...

    async def forward(self, number: int) -> None:
        """Pass a signal on to each worker that handles it."""
        ...

    async def dump_stacks(self) -> None:
        """Have every worker write the stacks of its threads; returns when they have."""
        ...

    def watched(self) -> dict[int, Watched]:
        """The workers that have a process, by slot."""
        ...

    def place(self, pid: int) -> tuple[Round, int] | None:
        """The round a process was born in, and its slot."""
        ...

    async def ended(self, pid: int, code: int) -> ev.WorkerEnded | None:
        """Forget a process that has ended, and describe its end; None for one that is not known."""
        ...

    async def done(self, limit_s: float) -> None:
        """Wait until the workers' output lies in files, for ``limit_s`` at most."""
        ...


class WorkerLink(Protocol):
    """Connections to the workers whose scripts use edl. See ``edl.agent.worker_server.WorkerServer``."""

    address: str
    progress: dict[int, int]
    """Newest commit of each slot."""
    newest: tuple[int, float] | None
    """The highest commit of those, and when it was made by the event loop's clock."""

    def open(self) -> None:
        """Accept connections from now on."""
        ...

    def close(self) -> None:
        """Close every connection; workers end when theirs is closed."""
        ...

    def tell(self, message: ToWorker, slots: tuple[int, ...]) -> None:
        """Send to the workers of these slots; one that is not connected misses it."""
        ...

    def pass_on(self, message: ServiceToWorker) -> None:
        """Send a message of one of the Master's services to a worker."""
        ...

    def reattached(self, token: int) -> None:
        """Announce a new connection to the Master."""
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
        """A round has started with these; the next one gets others."""
        ...

    def release(self) -> None:
        """Give them back."""
        ...


class NodeCheckpoints(Protocol):
    """The node's checkpoint manager, as its agent sees it."""

    @property
    def stored(self) -> tuple[Version, bool]:
        """Newest commit known to lie complete in the checkpoint directory, and whether it lies in shards."""
        ...

    @property
    def refused(self) -> str:
        """Why none of the checkpoints that lie there can be used; empty when one can, or none lies there."""
        ...

    @property
    def busy(self) -> bool:
        """Whether something that workers have written is still being looked at."""
        ...

    async def settled(self) -> None:
        """Until that is over."""
        ...

    def holdings(self) -> tuple[Holding, ...]:
        """The commits in this node's memory."""
        ...

    def enter(self, world: World) -> None:
        """A world begins in which this node has a part."""
        ...

    def keep_with(self, peer: KeepWith) -> None:
        """Where copies of commits go from now on."""
        ...

    async def look(self) -> None:
        """See what lies in the checkpoint directory."""
        ...

    async def load(self) -> None:
        """Read the newest usable commit from there."""
        ...

    async def write(self, version: Version, reason: str) -> None:
        """See what lies in the checkpoint directory, if there is one, and write what is here of a commit if that is
        newer."""
        ...

    @property
    def saving(self) -> bool:
        """Whether something that workers have saved has yet to be written by this node."""
        ...

    @property
    def unsaved(self) -> str:
        """Why the newest commit that workers have saved is not in the checkpoint directory, if this node writes."""
        ...

    async def flush_saves(self) -> str:
        """Wait until what workers have saved is written; returns ``unsaved``."""
        ...

    async def save_what_is_left(self, reason: str) -> None:
        """Before the launcher ends: bring the newest commit where it survives."""
        ...


class MasterStream(Protocol):
    """An agent's connection to a Master."""

    def send(self, message: AgentMessage) -> None:
        """Send if the stream still stands."""
        ...

    async def run(self, opened: Callable[[], None], heard: Callable[[MasterMessage], Awaitable[None]]) -> str:
        """Stay until the stream ends; ``opened`` is called once a Master has taken it. Returns why it ended."""
        ...


@dataclass(frozen=True, slots=True)
class AgentDeps:
    """Dependencies of an agent on its launcher."""

    clock: Clock
    processes: WorkerStarter
    warming: Awaitable[str]
    """The first ``processes.warm()``, begun before everything else."""
    workers: Workers
    worker_server: Callable[[Callable[[ev.Event], None], Callable[[ServiceFromWorker], None]], WorkerLink]
    """Makes the connections to workers, from where their events go and where messages to the Master's services go."""
    ports: Ports
    checkpoints: NodeCheckpoints
    secret: Callable[[Round], str]
    """By which the workers of a round know one another."""
    connect: Callable[[str, int], MasterStream]
    refuses: Callable[[str, int], Awaitable[bool]]
    register: Callable[[], Awaitable[NodeInfo]]
    """Get a new lease and register under it."""
    master_refused: Callable[[FencingToken], None]
    log: Callable[[str], None]
    activity: Callable[[Collection[int]], Mapping[int, Activity]]
    """Resources used by workers so far. Blocks."""
    save_timeout_s: float = 600.0
    """How long the end of the job waits for what was saved to be written."""
    switches: SwitchFiles | None = None
    """The request files for a checkpoint in the checkpoint directory, if there is one."""
    decided: Callable[[AgentState, ev.Event | None, ev.Decision], None] = lambda before, event, decision: None
    """Observes each decision before it is carried out; no event: the first one."""
