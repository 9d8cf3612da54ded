"""What the shells need from the outside world, as Protocols. Adapters implement them; fakes live in edl.testing.

Times are float seconds. Everything that waits is a coroutine and may be cancelled at any await.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from edl.types import NodeId, Token
from edl.wire.messages import NO_STATE, Holding, Version
from edl.wire.status import JobStatus
from edl.wire.wishes import Granted, Wish


class Clock(Protocol):
    """Monotonic time inside this process. Never compared between hosts."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key of the store as it stood when it was read."""

    key: str
    value: bytes
    create_revision: int
    """Store revision at which the key last came into being; the fencing token when the key is an election key."""
    mod_revision: int
    lease: int
    """Lease the key lives on, 0 for none."""


@dataclass(frozen=True, slots=True)
class Put:
    """Write one key; ``lease`` 0 means it stays until deleted."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete one key, or with ``prefix`` all keys that begin with it. Deleting nothing is no error."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """Condition: the key's create revision equals ``revision``; 0 means the key does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ModifiedAt:
    """Condition: the key's mod revision equals ``revision``; 0 means the key does not exist."""

    key: str
    revision: int


Operation = Put | Delete
Condition = CreatedAt | ModifiedAt


class ChangeKind(enum.Enum):
    """What happened to a watched key."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Change:
    """One watched change. ``entry.mod_revision`` is the revision of the change; the value of a DELETE is empty."""

    kind: ChangeKind
    entry: KeyValue


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under a prefix at one revision, sorted by key."""

    entries: tuple[KeyValue, ...]
    revision: int


class Store(Protocol):
    """The one shared memory of a job: etcd v3, or the memory store in tests.

    Every call raises ``StoreUnavailable`` when no endpoint answers within the store's own time limit, and
    ``StoreRefused`` when the store answers that it will not (credentials). It never retries a write by itself.
    """

    async def read(self, prefix: str) -> Snapshot:
        """All keys beginning with ``prefix``, linearizable."""
        ...

    async def write(self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()) -> int | None:
        """Apply all operations if all conditions hold.

        Returns the store revision of the transaction, or None when a condition failed (nothing was written).
        Raises ``LeaseLost`` when a put names a lease that is gone.
        """
        ...

    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Change]:
        """Changes under ``prefix`` with revision > ``after_revision``, in order, none missing.

        Reconnects by itself while the store is away and goes on from the last change seen. Raises ``StoreError``
        when it cannot know what it missed (the revision was compacted); read again then.
        """
        ...

    async def grant_lease(self, ttl_s: float) -> int:
        """A new lease; the store may grant a longer time than asked. Returns the lease id, never 0."""
        ...

    async def renew_lease(self, lease: int) -> float:
        """Keep the lease alive; returns the seconds it now has. Raises ``LeaseLost`` when it is gone for good."""
        ...

    async def revoke_lease(self, lease: int) -> None:
        """End the lease and delete its keys. A lease that is already gone is no error."""
        ...

    async def close(self) -> None:
        """Release connections; running watches end."""
        ...


@dataclass(frozen=True, slots=True)
class Guard:
    """The election key and the token under which a Master may write."""

    key: str
    token: Token

    def condition(self) -> Condition:
        """Holds exactly as long as this Master has not been replaced."""
        return CreatedAt(self.key, self.token)


class LineListener(Protocol):
    """What a line to a helper process has to say, in order for each of them; names are those of their keys, below the
    prefix of all helpers (``<service>/<name>``). Called from the event loop; returns at once."""

    def up(self, name: str) -> None:
        """The line stands (again): what was sent before may be lost."""
        ...

    def down(self, name: str, refused: bool) -> None:
        """It broke, or could not be made; ``refused``: the port refuses connections, the process is dead."""
        ...

    def heard(self, name: str, body: str) -> None:
        """The helper says something."""
        ...


class Lines(Protocol):
    """Lines from a Master to helper processes of its services. Nothing here waits."""

    def put(self, name: str, value: bytes) -> None:
        """A helper's key is there, with this value: keep a line to it. Does nothing for helpers that have none."""
        ...

    def gone(self, name: str) -> None:
        """The key is gone: nothing more is told of this helper."""
        ...

    def send(self, name: str, body: str) -> None:
        """Say something. Lost when the line is down."""
        ...

    def close(self) -> None:
        """Let go of all lines; nothing more is told."""
        ...


class Ruling(Protocol):
    """What the Master's shell is to those that work beside it while it rules."""

    def status(self) -> JobStatus:
        """The job at this moment."""
        ...

    async def wish(self, wish: Wish) -> Granted:
        """Ask for something; returns when it is in the store, or refused."""
        ...

    async def changed(self) -> None:
        """Returns when something in the status may have changed since the last call returned."""
        ...

    def explain(self, text: str) -> None:
        """What a scheduler says holds the size up: part of ``ScaleView.waiting`` from now on. Empty: nothing does."""
        ...


class CommandKind(enum.Enum):
    """How a worker's command line is to be read."""

    SCRIPT = "script"
    """A Python file, run as ``__main__`` with ``sys.argv[0]`` its path and its folder first on ``sys.path``."""
    MODULE = "module"
    """``-m``: a module name."""
    PROGRAM = "program"
    """``--no-python``: any executable."""
    CALL = "call"
    """A function, from ``edl.launch.api``. The target is the file it is from (empty: none), the argument the private
    folder in which it lies."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What each worker of this node runs."""

    kind: CommandKind
    target: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process is gone and reaped, and so is its whole process group."""

    pid: int
    code: int
    """Exit status 0..255, or minus the signal number that ended it."""


@dataclass(frozen=True, slots=True)
class WorkerSuspended:
    """The process was stopped by a signal (SIGSTOP, SIGTSTP, a debugger)."""

    pid: int


@dataclass(frozen=True, slots=True)
class WorkerResumed:
    """The process goes on after having been stopped."""

    pid: int


@dataclass(frozen=True, slots=True)
class ForkServerLost:
    """The helper process that creates workers is gone; every worker it had dies with it. Start it again."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """All workers have been killed, or are about to be, for a reason that is none of theirs. Their ends follow."""

    reason: str


ProcessEvent = WorkerExited | WorkerSuspended | WorkerResumed | WorkersStopped | ForkServerLost


class Processes(Protocol):
    """Creates, signals and watches worker processes. One per agent."""

    async def warm(self) -> str:
        """Bring up whatever makes the next ``spawn`` fast and return a sentence about it for the log.

        Raises ``WorkerStartError`` when the framework cannot be imported or the process dies.
        Called once at the start and again after ``ForkServerLost``.
        """
        ...

    async def spawn(
        self, environment: dict[str, str], stdout: int, stderr: int, local_rank: int = 0, cores: tuple[int, ...] = ()
    ) -> int:
        """Start one worker as leader of its own session with exactly this environment; returns its pid.

        ``local_rank`` takes the place of ``${local_rank}`` in the command's arguments. ``cores``: processor cores that
        the worker is bound to; empty: all that the launcher has.
        The two descriptors are duplicated into the worker; the caller closes its own. Raises ``WorkerStartError``.
        """
        ...

    def entitle(self, until_s: float) -> None:
        """Workers may run until then, by the monotonic clock. If nothing later is said they are killed then
        (``WorkersStopped``), even if this process is frozen. Before the first call there is no limit."""
        ...

    def entitle_aside(self, until_s: float) -> None:
        """The same from a thread beside the event loop."""
        ...

    async def signal(self, pid: int, number: int) -> None:
        """Signal the worker's whole process group. A worker that has ended meanwhile is no error."""
        ...

    async def dump(self, pid: int) -> None:
        """Have a worker write the stacks of its threads to its standard error. It goes on as before.

        Returns once it has been asked to; where it cannot be, the log says why.
        """
        ...

    async def forward(self, pid: int, number: int) -> None:
        """Send a signal to a worker alone, if it has a handler for it. Any other would die; the log says so instead."""
        ...

    def events(self) -> AsyncIterator[ProcessEvent]:
        """What happens to the workers, in order. One consumer."""
        ...

    async def close(self) -> None:
        """SIGKILL whatever is left and end the helper process."""
        ...


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker and all that it has started have used so far. Goes back when one of them ends unnoticed."""

    cpu_s: float
    io_bytes: int
    """Read from and written to files and pipes."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One name in a folder of a ``Files``."""

    name: str
    """Last part of its path."""
    size: int
    """Bytes; 0 for a folder."""
    folder: bool = False


class Files(Protocol):
    """Where checkpoints lie: a folder of a file system, or a prefix of an object store.

    Names are relative paths with ``/`` between the parts; ``""`` is the place itself. Everything blocks and may be
    called from any thread. What goes wrong is an ``OSError`` with its number; whatever a client library raises that is
    none is made one.
    """

    where: str
    """The place as the user named it, for messages."""
    remote: bool
    """A request travels over a network and may cost money: look seldom."""

    def path(self, name: str) -> str:
        """The full path or URL of a name, for messages and for tools."""
        ...

    def entries(self, folder: str = "") -> Sequence[FileEntry]:
        """What lies directly in a folder, sorted by name; nothing when there is no such folder."""
        ...

    def stamp(self, name: str) -> str:
        """Empty when there is no such file, else a text that changes when it is written again or touched. One cheap
        request."""
        ...

    def read(self, name: str) -> bytes:
        """A small file. Raises ``FileNotFoundError``."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from there on; returns the bytes that came, fewer only where the file ends."""
        ...

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a whole file, and the folders above it. It is durable when this returns.

        On a file system it appears at once and complete, or not at all; an object store may keep a part of a write that
        was broken off. A write that raises has left nothing, as far as that can be done.
        """
        ...

    def forget(self, name: str) -> None:
        """Let the next reading of this file come from where it lies, as far as this host can."""
        ...

    def sync(self, folder: str) -> None:
        """Make durable what others have written into this folder, as far as this host can."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder, durably. One that is not there is no error."""
        ...

    def free_bytes(self) -> int | None:
        """Room left for this user; None where nobody knows."""
        ...


# --- the state of a job -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Label:
    """What one node says to another about a snapshot before its bytes."""

    owner: NodeId
    """The node whose commit it is."""
    holding: Holding
    size: int
    crc32: int
    owed: Version = NO_STATE
    """Commit that the owner's workers saved and that is not written yet: if the owner is lost, whoever has the copy
    writes it."""


class Lent(Protocol):
    """A snapshot in memory that stays as it is until ``release``."""

    @property
    def label(self) -> Label:
        """What it is. The first time this may take as long as reading all of it."""
        ...

    @property
    def descriptor(self) -> int:
        """The file that begins with it."""
        ...

    def release(self) -> None:
        """It may go. Doing it twice does nothing."""
        ...


class Arrival(Protocol):
    """Memory for a snapshot on its way. Nobody sees it before ``accept``."""

    @property
    def view(self) -> memoryview:
        """Exactly as long as the label says."""
        ...

    def accept(self) -> None:
        """All bytes are there and have the checksum of the label.

        Raises ``CheckpointError`` when they are not the snapshot the label speaks of; it is discarded then.
        """
        ...

    def discard(self) -> None:
        """Nothing will come of it. After ``accept``, or a second time, it does nothing."""
        ...


class SnapshotPool(Protocol):
    """What a node has and takes. Called from any thread."""

    def lend(self, version: Version, shard: int) -> Lent | None:
        """A part of a commit, or None when it is not here."""
        ...

    def arriving(self, label: Label) -> Arrival | None:
        """Memory for a copy of another node's commit; None when this very one is here already.

        Raises ``CheckpointError`` when it cannot be taken, saying why.
        """
        ...


class Copies(Protocol):
    """Snapshots from one node's memory to another's. ``put`` and ``get`` block, for their own time limits at most."""

    def start(self, snapshot_pool: SnapshotPool, host: str, port: int = 0) -> int:
        """Serve other nodes from now on; returns the port. Raises ``PortInUse``."""
        ...

    def put(self, host: str, port: int, lent: Lent) -> None:
        """Give a copy to the node there. Returns when that node has it complete. Raises ``CheckpointError``."""
        ...

    def get(
        self, host: str, port: int, version: Version, shard: int, arriving: Callable[[Label], Arrival | None]
    ) -> None:
        """Have the node there send a part of a commit. ``arriving`` finds the memory, as in ``SnapshotPool``.

        Returns when it has been accepted. Raises ``CheckpointError``.
        """
        ...

    def stop(self) -> None:
        """End every transfer in both directions and serve no more."""
        ...


class CheckpointStorage(Protocol):
    """The checkpoint directory. Every call blocks; they come from several threads."""

    def write(self, version: Version, snapshot: memoryview, shard: int, shards: int) -> str:
        """Write a snapshot so that it counts only once it is complete; returns where it lies, empty while other parts
        of it are missing. Raises ``CheckpointError``."""
        ...

    def complete(self, version: Version, shards: int) -> str | None:
        """Make a checkpoint count whose parts are all there. Returns where it lies; empty if it counted before, None
        while parts are missing. Raises ``CheckpointError``."""
        ...

    def newest(self) -> tuple[Version, bool] | None:
        """The newest one that is marked as complete, and whether workers have to read it themselves: it lies in shards.

        Raises ``CheckpointError`` when the directory cannot be read.
        """
        ...

    def load(self, allocate: Callable[[int], memoryview]) -> tuple[Version, bool]:
        """Check every byte of the newest usable one, and read it into memory that ``allocate`` gives, or leave it to
        the workers if it lies in shards; returns which it was, and that.

        Each call of ``allocate`` makes the one before void. Raises ``CheckpointError`` that names all refused ones.
        """
        ...

    def accept(self, version: Version, size: int, crc32: int) -> str:
        """A worker has written the whole state into the folder of this version: compare its bytes and mark it as
        complete; returns where it lies. Raises ``CheckpointError``."""
        ...

    def verify(self, version: Version) -> None:
        """Read all of a checkpoint and compare its checksums. Raises ``CheckpointError``."""
        ...
