"""The interfaces through which shells use the outside world, as Protocols. Adapters implement them; fakes are in
``edl.testing``.

Times are float seconds. Everything that waits is a coroutine and may be cancelled at any await.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from edl.types import FencingToken, NodeId
from edl.wire.parts import PartRange
from edl.wire.process_events import ProcessEvent
from edl.wire.records import NO_STATE, Holding, Version
from edl.wire.scale_requests import Granted, ScaleRequest
from edl.wire.status import JobStatus


class Clock(Protocol):
    """Monotonic time of this process. Values from different hosts must not be compared."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never decreases."""
        ...


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key of the store as of one read."""

    key: str
    value: bytes
    create_revision: int
    """Store revision at which the key was last created; the fencing token if the key is an election key."""
    mod_revision: int
    lease: int
    """The lease that the key is attached to; 0: no lease."""


@dataclass(frozen=True, slots=True)
class Put:
    """Write one key. With ``lease`` 0 it stays until it is deleted."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete one key, or with ``prefix`` all keys that begin with it. Deleting a missing key is not an error."""

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
    """Whether a watched key was written or deleted."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Change:
    """One watched change. ``entry.mod_revision`` is the revision of the change; a DELETE has an empty value."""

    kind: ChangeKind
    entry: KeyValue


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    """All keys under a prefix at one revision, sorted by key."""

    entries: tuple[KeyValue, ...]
    revision: int


class Store(Protocol):
    """The only shared memory of a job: etcd v3, or the memory store in tests.

    Every call raises ``StoreUnavailable`` when no endpoint answers within the store's own time limit, and
    ``StoreRefused`` when the store rejects the call (credentials). A write without an answer may take effect later.
    """

    async def read(self, prefix: str) -> PrefixSnapshot:
        """All keys that begin with ``prefix``; the read is linearizable."""
        ...

    async def write(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
    ) -> int | None:
        """Apply all operations if all conditions hold.

        Returns the store revision of the transaction, or None when a condition failed (nothing was written). Raises
        ``LeaseLost`` when a put names a lease that has expired. ``repeatable``: send it several times if need be: the
        caller's conditions let only one have an effect, and it can tell why None is returned.
        """
        ...

    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Change]:
        """Yields changes under ``prefix`` with revision > ``after_revision``, in order and without gaps.

        Reconnects automatically while the store is unreachable and continues after the last change seen. Raises
        ``StoreError`` when changes may have been missed (the revision was compacted); read again then.
        """
        ...

    async def grant_lease(self, ttl_s: float) -> int:
        """Create a lease. The store may grant a longer time than requested. Returns the lease id, never 0."""
        ...

    async def renew_lease(self, lease: int) -> float:
        """Renew a lease; returns its remaining time in seconds. Raises ``LeaseLost`` when it has expired."""
        ...

    async def revoke_lease(self, lease: int) -> None:
        """End the lease and delete its keys. A lease that has already expired is not an error."""
        ...

    async def close(self) -> None:
        """Release connections; running watches end."""
        ...


@dataclass(frozen=True, slots=True)
class Guard:
    """The election key and the fencing token under which a Master may write."""

    key: str
    token: FencingToken

    def condition(self) -> Condition:
        """The condition that holds until this Master is replaced."""
        return CreatedAt(self.key, self.token)


class HelperListener(Protocol):
    """Receives events of the connections to helper processes, in order for each of them. Names are those of their keys,
    below the prefix of all helpers (``<service>/<name>``). Called from the event loop; must return at once."""

    def up(self, name: str) -> None:
        """The connection is established (again). Messages sent before may be lost."""
        ...

    def down(self, name: str, refused: bool) -> None:
        """The connection broke or could not be made. ``refused``: the port refuses connections, so the process is
        dead."""
        ...

    def heard(self, name: str, body: str) -> None:
        """A message from the helper has arrived."""
        ...


class HelperConnections(Protocol):
    """Connections from a Master to helper processes of its services. No method blocks."""

    def put(self, name: str, value: bytes) -> None:
        """A helper's key exists with this value: keep a connection to it. Does nothing for helpers that have no
        port."""
        ...

    def gone(self, name: str) -> None:
        """The key has been deleted: report nothing more about this helper."""
        ...

    def send(self, name: str, body: str) -> None:
        """Send a message. It is lost when there is no connection."""
        ...

    def close(self) -> None:
        """Close all connections; nothing more is reported."""
        ...


class ElectedMaster(Protocol):
    """The interface of the elected Master's shell for components that run beside it."""

    def status(self) -> JobStatus:
        """The current status of the job."""
        ...

    async def submit(self, request: ScaleRequest) -> Granted:
        """Submit a request; returns when it is in the store or has been refused."""
        ...

    async def changed(self) -> None:
        """Returns when something in the status may have changed since the last call returned."""
        ...

    def explain(self, text: str) -> None:
        """Set the scheduler's reason why the size has not been reached, shown as ``ScaleView.waiting``; empty: none."""
        ...


class CommandKind(enum.Enum):
    """How to interpret a worker's command line."""

    SCRIPT = "script"
    """A Python file, run as ``__main__`` with its path as ``sys.argv[0]`` and its folder first on ``sys.path``."""
    MODULE = "module"
    """``-m``: a module name."""
    PROGRAM = "program"
    """``--no-python``: any executable."""
    CALL = "call"
    """A function, from ``edl.launch.api``. The target is the file that defines it (empty: none); the argument is the
    private folder that contains the pickled function."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The command that each worker of this node runs."""

    kind: CommandKind
    target: str
    arguments: tuple[str, ...] = ()


class Processes(Protocol):
    """Creates, signals and watches worker processes. One per agent."""

    async def warm(self) -> str:
        """Prepare for fast ``spawn`` calls, and return a sentence about it for the log.

        Raises ``WorkerStartError`` when the framework cannot be imported or the process dies. Called once at the start
        and again after ``ForkServerLost``.
        """
        ...

    async def spawn(
        self, environment: dict[str, str], stdout: int, stderr: int, local_rank: int = 0, cores: tuple[int, ...] = ()
    ) -> int:
        """Start one worker as leader of its own session with exactly this environment; returns its pid.

        ``local_rank`` replaces ``${local_rank}`` in the command's arguments. ``cores``: processor cores that the worker
        is bound to; empty: all that the launcher may use. The two descriptors are duplicated into the worker; the
        caller closes its own. Raises ``WorkerStartError``.
        """
        ...

    def entitle(self, until_s: float) -> None:
        """Allow workers to run until that time of the monotonic clock. Without a later call they are killed then
        (``WorkersStopped``), even if this process is frozen. Before the first call there is no limit."""
        ...

    def entitle_aside(self, until_s: float) -> None:
        """Like ``entitle``, but called from a thread other than the event loop's."""
        ...

    async def signal(self, pid: int, number: int) -> None:
        """Signal the worker's whole process group. A worker that has already ended is not an error."""
        ...

    async def dump(self, pid: int) -> None:
        """Make a worker write the stacks of its threads to its standard error; it continues to run.

        Returns when the request has been sent; if that is impossible, the log says why.
        """
        ...

    async def forward(self, pid: int, number: int) -> None:
        """Send a signal to a worker's own process only, if it handles that signal. Otherwise the signal would kill it,
        so the case is logged instead."""
        ...

    def events(self) -> AsyncIterator[ProcessEvent]:
        """Yields events of the workers in order, those of a worker after ``spawn`` has returned its pid. Only one
        consumer is allowed."""
        ...

    async def close(self) -> None:
        """SIGKILL all remaining workers and end the helper process."""
        ...


@dataclass(frozen=True, slots=True)
class Activity:
    """Resources used so far by a worker and all its child processes. May decrease when a child process ends between two
    samples."""

    cpu_s: float
    io_bytes: int
    """Bytes read from and written to files and pipes."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Whether a process runs, at one moment."""

    stopped: bool
    """A signal or a debugger has stopped it."""
    starved_s: float
    """Seconds so far in which its main thread could run and had no CPU; 0: unknown."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a folder in ``Files``. ``size`` and ``folder`` of a symbolic link are those of what it leads to."""

    name: str
    """The last part of its path."""
    size: int
    """Size in bytes; 0 for a folder."""
    folder: bool = False
    link: bool = False


class Files(Protocol):
    """Where checkpoints are stored: a folder of a file system, or a prefix of an object store.

    Names are relative paths with ``/`` between the parts; ``""`` is the location itself. Every call blocks and may be
    made from any thread. Failures are raised as ``OSError`` with an errno; other exceptions of a client library are
    converted to it.
    """

    where: str
    """The location as the user wrote it, for messages."""
    remote: bool
    """Requests travel over a network and may cost money, so they should be rare."""

    def path(self, name: str) -> str:
        """The full path or URL of a name, for messages and tools."""
        ...

    def entries(self, folder: str = "") -> Sequence[FileEntry]:
        """The direct entries of a folder, sorted by name; empty when the folder does not exist."""
        ...

    def stamp(self, name: str) -> str:
        """Empty when the file does not exist, else a text that changes when it is rewritten or touched. Costs one cheap
        request."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a small file. Raises ``FileNotFoundError``."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from that offset on; returns the number of bytes read, fewer only at the end of the file."""
        ...

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        """Write a whole file, and create its parent folders. It is durable when this returns.

        On a file system it appears atomically and complete, or not at all; an object store may keep part of an
        interrupted write. A write that raises leaves nothing behind, as far as possible. ``new``: a file that is there
        already, or that another process has written meanwhile, stays as it is; raises ``FileExistsError``. Returns the
        ``stamp`` of what was written; empty if unknown.
        """
        ...

    def forget(self, name: str) -> None:
        """Drop cached data of this file, as far as this host can, so that the next read comes from the storage."""
        ...

    def sync(self, folder: str) -> None:
        """Make durable what other processes have written into this folder, as far as this host can."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder, durably. A missing one is not an error."""
        ...

    def free_bytes(self) -> int | None:
        """Free space for this user in bytes; None where it is unknown."""
        ...


# --- the state of a job -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Label:
    """Describes a snapshot that one node sends to another; sent before its bytes."""

    owner: NodeId
    """The node that made the commit."""
    holding: Holding
    size: int
    owed: Version = NO_STATE
    """A commit that the owner's workers asked to save and that is not written yet. If the owner is lost, a node that
    has the copy writes it."""


class Lent(Protocol):
    """A snapshot in memory that does not change until ``release``."""

    @property
    def label(self) -> Label:
        """Describes the snapshot."""
        ...

    @property
    def crc32(self) -> int:
        """The checksum of its bytes. The first access may take as long as reading all of it."""
        ...

    @property
    def descriptor(self) -> int:
        """The file descriptor whose content begins with the snapshot."""
        ...

    @property
    def view(self) -> memoryview:
        """The bytes of the snapshot, read-only."""
        ...

    def release(self) -> None:
        """Allow the memory to be reused. A second call does nothing."""
        ...


class Arrival(Protocol):
    """Memory for a snapshot that is being received. It is not visible to others before ``accept``."""

    @property
    def view(self) -> memoryview:
        """A buffer of exactly the size given in the label."""
        ...

    def accept(self, crc32: int | None = None) -> None:
        """Called when all bytes have arrived and are those that were sent. ``crc32``: their checksum, if it is known.

        Raises ``CheckpointError`` when they are not the snapshot that the label describes; it is discarded then.
        """
        ...

    def discard(self) -> None:
        """Give up the transfer. After ``accept``, or a second time, it does nothing."""
        ...


class SnapshotPool(Protocol):
    """The snapshots that a node holds in memory, and those it accepts. Called from any thread."""

    def borrow(self, version: Version, shard: int) -> Lent | None:
        """One shard of a commit, or None when this node does not have it."""
        ...

    def arriving(self, label: Label) -> Arrival | None:
        """Memory for a copy of another node's commit; None if this node already has exactly that commit.

        Raises ``CheckpointError`` with the reason if it cannot be accepted.
        """
        ...


Piece = tuple[PartRange, memoryview]
"""A range of a shard, and the memory for it."""


class Copies(Protocol):
    """Copies snapshots from one node's memory to another's. ``put`` and ``get`` block, at most for their own time
    limits."""

    def start(self, snapshot_pool: SnapshotPool, host: str, port: int = 0) -> int:
        """Start to serve other nodes; returns the port. Raises ``PortInUse``."""
        ...

    def put(self, host: str, port: int, lent: Lent, *, urgent: bool = False) -> None:
        """Send a copy to that node. Returns when the node has all of it. ``urgent``: that node receives it at normal
        priority, not behind its own training. Raises ``CheckpointError``."""
        ...

    def get(
        self, host: str, port: int, version: Version, shard: int, arriving: Callable[[Label], Arrival | None]
    ) -> None:
        """Fetch one shard of a commit from that node. ``arriving`` provides the memory, as in ``SnapshotPool``.

        Returns when it has been accepted. Raises ``CheckpointError``.
        """
        ...

    def header(self, host: str, port: int, version: Version, shard: int) -> tuple[bytes, int]:
        """The header of a shard that the node holds, and the size of the shard in bytes. Raises ``CheckpointError``."""
        ...

    def read(self, host: str, port: int, version: Version, shard: int, pieces: Sequence[Piece]) -> None:
        """Read ranges of a shard that the node holds. Raises ``CheckpointError``; the
        memory may then hold anything."""
        ...

    def stop(self) -> None:
        """End all transfers in both directions and stop serving."""
        ...


class CheckpointStorage(Protocol):
    """The checkpoint directory. Every call blocks; calls come from several threads."""

    def write(self, version: Version, snapshot: memoryview, shard: int, shards: int) -> str:
        """Write a snapshot so that it counts only when it is complete. Returns its location, or empty while other
        shards of the checkpoint are missing. Raises ``CheckpointError``."""
        ...

    def complete(self, version: Version, shards: int) -> str | None:
        """Make a checkpoint valid if all its shards are present. Returns its location; empty if it was valid before,
        None while shards are missing. Raises ``CheckpointError``."""
        ...

    def newest(self) -> tuple[Version, bool] | None:
        """The newest checkpoint that is marked as complete, and whether workers have to read it themselves because it
        is sharded.

        Raises ``CheckpointError`` when the directory cannot be read.
        """
        ...

    def load(self, allocate: Callable[[int], memoryview]) -> tuple[Version, bool]:
        """Verify every byte of the newest usable checkpoint and read it into memory from ``allocate``, or leave that to
        the workers if it is sharded; returns its version and whether it is sharded.

        Each call of ``allocate`` invalidates the buffer of the previous one. Raises ``CheckpointError`` that names all
        rejected checkpoints.
        """
        ...

    def accept(self, version: Version, size: int, crc32: int) -> str:
        """A worker has written the whole state into the folder of this version: verify its bytes and mark it as
        complete; returns its location. Raises ``CheckpointError``."""
        ...

    def verify(self, version: Version) -> None:
        """Read a whole checkpoint and compare its checksums. Raises ``CheckpointError``."""
        ...


# --- synchronised directories -----------------------------------------------------------------------------------------


class LentFile(Protocol):
    """A file that is being sent."""

    @property
    def descriptor(self) -> int:
        """Open for reading, at offset 0."""
        ...

    @property
    def size(self) -> int:
        """Size in bytes when it was opened."""
        ...

    def unchanged(self) -> bool:
        """Whether its content is still the one that was opened."""
        ...


class FileSource(Protocol):
    """What a node serves of its synchronised directories. Called from several threads."""

    def report(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The answer to a request for changes: a short frame, and the changes. Raises ``ProtocolError``."""
        ...

    def lend(self, request: Mapping[str, Any]) -> AbstractContextManager[LentFile | None]:
        """The requested file in that version; None if it is gone. Raises ``ProtocolError`` and ``CheckpointError``."""
        ...


class FileCopies(Protocol):
    """Requests to the ``FileSource`` of another node. Calls block, and raise ``CheckpointError`` when they fail."""

    def changes(self, host: str, port: int, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Ask for changes; returns what ``FileSource.report`` has returned there."""
        ...

    def fetch(
        self, host: str, port: int, request: Mapping[str, Any], descriptor: int, arrived: Callable[[int], None]
    ) -> bool:
        """Write a file of another node to a descriptor; ``arrived`` is called with the number of bytes of each piece.
        Returns False if that node has it no longer in this version. Raises also ``OSError``, if it cannot be written
        here."""
        ...
