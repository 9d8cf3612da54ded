"""What the shells need from the outside world, as Protocols. Adapters implement them; fakes live in edl.testing.

Times are float seconds. Everything that waits is a coroutine and may be cancelled at any await.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edl.types import Token


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


class CommandKind(enum.Enum):
    """How a worker's command line is to be read."""

    SCRIPT = "script"
    """A Python file, run as ``__main__`` with ``sys.argv[0]`` its path and its folder first on ``sys.path``."""
    MODULE = "module"
    """``-m``: a module name."""
    PROGRAM = "program"
    """``--no-python``: any executable."""


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
class NurseryLost:
    """The helper process that creates workers is gone; every worker it had dies with it. Start it again."""

    reason: str


ProcessEvent = WorkerExited | WorkerSuspended | WorkerResumed | NurseryLost


class Processes(Protocol):
    """Creates, signals and watches worker processes. One per agent."""

    async def warm(self) -> str:
        """Bring up whatever makes the next ``spawn`` fast and return a sentence about it for the log.

        Raises ``WorkerStartError`` when the framework cannot be imported or the process dies.
        Called once at the start and again after ``NurseryLost``.
        """
        ...

    async def spawn(self, environment: dict[str, str], stdout: int, stderr: int) -> int:
        """Start one worker as leader of its own session with exactly this environment; returns its pid.

        The two descriptors are duplicated into the worker; the caller closes its own. Raises ``WorkerStartError``.
        """
        ...

    async def signal(self, pid: int, number: int) -> None:
        """Signal the worker's whole process group. A worker that has ended meanwhile is no error."""
        ...

    def events(self) -> AsyncIterator[ProcessEvent]:
        """What happens to the workers, in order. One consumer."""
        ...

    async def close(self) -> None:
        """SIGKILL whatever is left and end the helper process."""
        ...
