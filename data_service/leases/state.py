"""The Master's state of one data set: shards, clients, position in the epoch, quarantined shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from data_service.file_list import FileList, ListVersion
from data_service.leases.chunked_values import ChunkedValues
from data_service.leases.lease_table import LeaseTable
from data_service.leases.throughput import Rate
from data_service.ledger import Ledger
from data_service.manifest import Manifest
from data_service.protocol.fields import Ranges
from data_service.protocol.messages import INDEPENDENT, Answer, DataSetOptions, Open, Request, encode, ranges
from edl.master.service import AddToHistory, Caller, Effect, TellWorker, WakeAt
from edl.types import Rank
from edl.wire.records import World


@dataclass(slots=True)
class ClientState:
    """The state of one client: a worker of the running world, or of the world before it."""

    last: int = -1
    """Highest request id received in this round."""
    request_hash: int = 0
    """Hash of that request: a process that replaces another one may reuse the id."""
    answer: str = ""
    """The answer to that request; empty while it is parked."""
    parked: Request | None = None
    """A request that waits for other workers."""
    opened: bool = False
    closed: bool = False
    """Mode "steps": its loader has been closed since it opened, and hears nothing more in this round."""
    conflict: str = ""
    """Set if it claims shards that it cannot hold: it gets no more leases."""
    claim: Open | None = None
    """Its ``Open`` message, until the table exists."""
    returned: dict[int, int] = field(default_factory=dict)
    """Shards that it reported as returned when it opened; the report of the failure may still be on its way."""
    records: int = 0
    """Records that it has finished in this epoch."""
    per_s: float = 0.0
    waited: float = 0.0
    heard_s: float = 0.0
    """Time of its last message about leases (independent mode)."""
    completed_s: float = 0.0
    """Time at which it last finished a shard (independent mode)."""


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """A failed attempt to read a shard."""

    by: Caller
    reason: str
    unreached: bool = False
    """The file was inaccessible, which says nothing about its content."""


@dataclass(frozen=True, slots=True)
class QuarantinedShard:
    """A quarantined shard: unreadable, skipped from record ``upto`` of the epoch in which that was found."""

    shard: int
    file: str
    begin: int
    end: int
    upto: int
    epoch: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AddOrder:
    """A request from outside the job to add files, which a worker has to scan first."""

    number: int
    by: str
    files: tuple[str, ...]
    when: str


@dataclass(slots=True)
class IndependentState:
    """State of independent mode, in addition to the table."""

    fence: int = 0
    """Number of rollbacks so far."""
    history: int = 0
    """History of the parameters at the last rollback that named one."""
    number: int = 0
    """Acknowledgements counted so far."""
    kept: int = 0
    """Number of those that are in the store."""
    kept_s: float = -1e9
    commits: dict[str, str] = field(default_factory=dict)
    """Named positions (encoded ledgers), oldest first."""
    callers: set[Caller] = field(default_factory=set)
    """Clients that take part, as stored."""
    continued_by: dict[int, Caller] = field(default_factory=dict)
    """Client that last acknowledged records of a shard, or was granted it since, for recently begun shards of this
    epoch, oldest first."""
    trainers: dict[Caller, int] = field(default_factory=dict)
    """The number of each caller's process in the parameter servers."""
    ended: list[int] = field(default_factory=list)
    """Numbers of trainers lost in this epoch, oldest first: parts of their last push may have been applied."""
    most_trainers: int = 0
    """The most trainers at one time; as many may be lost together."""
    dirty: bool = False
    awaited: set[Caller] = field(default_factory=set)
    """After a change of the Master: clients that must open before anything is granted."""
    until_s: float = 0.0
    """Deadline for ``awaited``."""
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    """Durations of recent shards, in seconds."""
    check_s: float = 0.0
    """Time of the next check for silent workers; 0: none."""


class DataSet:
    """The complete state of one data set. Mutable."""

    def __init__(self, name: str, values: ChunkedValues) -> None:
        self.name = name
        self.values = values
        self.files: FileList | None = None
        self.blob = b""
        """Hash of the registered encoded list."""
        self.registered = 0
        """Number of segments that were registered together; each later one has its own key in the store."""
        self.orders: dict[int, AddOrder] = {}
        """Pending orders to add files, by number."""
        self.ordered = 0
        """Number of the last order."""
        self.lister: Caller | None = None
        """The worker that has been sent the orders."""
        self._records: tuple[int, int] = (-1, -1)
        self.previous: Manifest | None = None
        """The previously registered manifest, to describe the difference."""
        self.options = DataSetOptions()
        self.broken = ""
        """Why the data set cannot be used: its accounting in the store is damaged."""
        self.clients: dict[Caller, ClientState] = {}
        self.opened = 0
        """Number of open clients."""
        self.parked: dict[Caller, None] = {}
        """Clients whose request is parked, in order."""
        self.table: LeaseTable | None = None
        self.failures: dict[int, list[ReadAttempt]] = {}
        self.quarantine: dict[int, QuarantinedShard] = {}
        self.independent = IndependentState()
        self.rate = Rate()

    @property
    def is_independent(self) -> bool:
        """True if the data set is used in independent mode."""
        return self.options.mode == INDEPENDENT

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, including shards of future epochs; None before registration."""
        return None if self.files is None else self.files.manifest

    @property
    def listed(self) -> FileList:
        """The registered file list. Raises ``LookupError`` if there is none."""
        if self.files is None:
            raise LookupError(f"{self.name} has not been registered")
        return self.files

    @property
    def known(self) -> Manifest:
        """The registered manifest. Raises ``LookupError`` if there is none."""
        return self.listed.manifest

    def records(self, version: ListVersion) -> int:
        """Number of records in a version of the list; -1 if unknown before reading."""
        manifest = self.known
        if version.shards == len(manifest) or manifest.records < 0:
            return manifest.records
        if self._records[0] != version.shards:
            self._records = (version.shards, sum(map(manifest.count, range(version.shards))))
        return self._records[1]

    def fit(self, ledger: Ledger) -> Ledger:
        """Extend a position to the list as its epoch sees it now; files that have joined since are not consumed. Raises
        ``DataError`` if the position belongs to other files or another order."""
        files = self.listed
        if not files.knows(ledger.digest, ledger.shards):
            ledger.belongs(files.digest, len(files), self.options.seed, self.options.shuffle)
        ledger.belongs(ledger.digest, ledger.shards, self.options.seed, self.options.shuffle)
        version = files.at(ledger.epoch)
        if version.shards >= ledger.shards:
            ledger.extend(version.shards, version.digest)
        return ledger

    def fresh(self, epoch: int) -> Ledger:
        """A position at the start of an epoch, with nothing consumed."""
        version, options = self.listed.at(epoch), self.options
        return Ledger(version.digest, version.shards, seed=options.seed, shuffle=options.shuffle, epoch=epoch)

    @property
    def position(self) -> LeaseTable:
        """The lease table. Raises ``LookupError`` if there is none."""
        if self.table is None:
            raise LookupError(f"{self.name} has no position")
        return self.table

    def set_open(self, client: ClientState, is_open: bool) -> None:
        """Mark a client as open or closed."""
        self.opened += is_open - client.opened
        client.opened = is_open

    def others(self, than: Caller) -> Collection[Caller]:
        """All open clients except this one."""
        return [caller for caller, client in self.clients.items() if client.opened and caller != than]

    def quarantined(self) -> Ranges:
        """Numbers of the quarantined shards, as ranges."""
        return ranges(self.quarantine)

    def begin(self, ledger: Ledger) -> LeaseTable:
        """Replace the lease table by one for this position."""
        self.table = LeaseTable(self.known, ledger, self.quarantine)
        self.independent.continued_by.clear()
        for client in self.clients.values():
            client.records = 0
        return self.table

    def counts(self, caller: Caller, records: int, shards: int, now_s: float) -> None:
        """Count records and shards finished by a client."""
        self.clients[caller].records += records
        self.rate.add(now_s, records, shards)


@dataclass(slots=True)
class LeaseTurn:
    """The input and the effects of one step of the lease machine."""

    now_s: float
    world: World | None
    ranks: Mapping[Caller, Rank]
    """Ranks in the world; empty without a world."""
    taken_over: bool = False
    """The world was already running when this Master took over."""
    effects: list[Effect] = field(default_factory=list)

    def reply(self, data: DataSet, caller: Caller, client: ClientState, answer: Answer | str) -> None:
        """Answer the last request of a client."""
        client.answer = answer if isinstance(answer, str) else encode(answer)
        client.parked = None
        data.parked.pop(caller, None)
        self.effects.append(TellWorker(caller, client.answer))

    def note(self, text: str) -> None:
        """Add a line to the job's history."""
        self.effects.append(AddToHistory(printable(text)))

    def wake(self, at_s: float) -> None:
        """Request a ``Tick`` at that time."""
        self.effects.append(WakeAt(at_s))


def printable(text: str) -> str:
    """Replace lone surrogates, such as those of file names that are not UTF-8, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode("utf-8")


RANK_0 = Rank(0)
