"""The Master's state of one data set: its shards, its clients, the position in the epoch, quarantined shards."""

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
from data_service.protocol.messages import INDEPENDENT, Answer, Open, Options, Request, encode, ranges
from edl.master.service import Caller, Effect, Note, Tell, WakeAt
from edl.types import Rank
from edl.wire.messages import World


@dataclass(slots=True)
class ClientState:
    """The state of one client: a worker of the running world, or of the world before it."""

    last: int = -1
    """Highest id heard in this round."""
    said: int = 0
    """Hash of that request: a process that takes the place of another one may use the number again."""
    answer: str = ""
    """To that request; empty while it is parked."""
    parked: Request | None = None
    """Waits for something that others have to do."""
    opened: bool = False
    conflict: str = ""
    """It holds what it cannot hold: nothing more is given to it."""
    claim: Open | None = None
    """What it opened with, until the table is there."""
    returned: dict[int, int] = field(default_factory=dict)
    """What it said at opening to have given back: how that shard failed may still be on its way."""
    records: int = 0
    """Finished by it in this epoch."""
    per_s: float = 0.0
    waited: float = 0.0
    heard_s: float = 0.0
    """Last message about its leases (independent mode)."""
    completed_s: float = 0.0
    """When it last finished a shard (independent mode)."""


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """A failed attempt to read a shard."""

    by: Caller
    reason: str
    unreached: bool = False
    """The file could not be reached: nothing is known against it."""


@dataclass(frozen=True, slots=True)
class QuarantinedShard:
    """A quarantined shard: unreadable, left out from record ``upto`` of the epoch in which that was found."""

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
    """What independent mode needs beyond the table."""

    fence: int = 0
    """Rollbacks so far."""
    history: int = 0
    """Of the parameters, that of the last rollback that named one."""
    number: int = 0
    """Acknowledgements counted so far."""
    kept: int = 0
    """Those of them that are in the store."""
    kept_s: float = -1e9
    commits: dict[str, str] = field(default_factory=dict)
    """Names with the text of the ledger then, oldest first."""
    callers: set[Caller] = field(default_factory=set)
    """Who takes part, by what is kept."""
    doers: dict[int, Caller] = field(default_factory=dict)
    """Who has last acknowledged records of a shard; of the last shards of this epoch, oldest first."""
    trainers: dict[Caller, int] = field(default_factory=dict)
    """By caller, the number of its process in the parameter servers."""
    ended: list[int] = field(default_factory=list)
    """Of those, who was lost in this epoch, oldest first: some of their last push may be in the parameters."""
    crowd: int = 0
    """The most trainers that there were at a time: as many may be lost together."""
    dirty: bool = False
    awaited: set[Caller] = field(default_factory=set)
    """After a change of the Master: whose ``Open`` is waited for before anything is given out."""
    until_s: float = 0.0
    """No longer than this."""
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    """What the last shards took."""
    check_s: float = 0.0
    """When silent workers are looked for next; 0: not."""


class DataSet:
    """The whole state of one data set. Changed in place."""

    def __init__(self, name: str, values: ChunkedValues) -> None:
        self.name = name
        self.values = values
        self.files: FileList | None = None
        self.blob = b""
        """Hash of the encoded list that was registered."""
        self.registered = 0
        """Segments of the list that were registered at once; each later one has a key of its own in the store."""
        self.orders: dict[int, AddOrder] = {}
        """By number: files that are to be added."""
        self.ordered = 0
        """Number of the last order."""
        self.lister: Caller | None = None
        """Who has been told of the orders."""
        self._records: tuple[int, int] = (-1, -1)
        self.previous: Manifest | None = None
        """Of the one that was registered before it, to tell the difference."""
        self.options = Options()
        self.broken = ""
        """Why nothing can be told about it: its accounting in the store is damaged."""
        self.clients: dict[Caller, ClientState] = {}
        self.opened = 0
        """Clients that take part now."""
        self.parked: dict[Caller, None] = {}
        """Clients whose request waits, in order."""
        self.table: LeaseTable | None = None
        self.failures: dict[int, list[ReadAttempt]] = {}
        self.quarantine: dict[int, QuarantinedShard] = {}
        self.independent = IndependentState()
        self.rate = Rate()

    @property
    def is_independent(self) -> bool:
        """Independent mode."""
        return self.options.mode == INDEPENDENT

    @property
    def manifest(self) -> Manifest | None:
        """All of its shards, also those of epochs to come; None before it has been registered."""
        return None if self.files is None else self.files.manifest

    @property
    def listed(self) -> FileList:
        """Its files, where it is clear that it has been registered."""
        if self.files is None:
            raise LookupError(f"{self.name} has not been registered")
        return self.files

    @property
    def known(self) -> Manifest:
        """Its shards, where it is clear that it has been registered."""
        return self.listed.manifest

    def records(self, version: ListVersion) -> int:
        """Of the list as it is, or was; -1 when that is not known before they are read."""
        manifest = self.known
        if version.shards == len(manifest) or manifest.records < 0:
            return manifest.records
        if self._records[0] != version.shards:
            self._records = (version.shards, sum(map(manifest.count, range(version.shards))))
        return self._records[1]

    def fit(self, ledger: Ledger) -> Ledger:
        """A position that somebody brings, as one in the list that its epoch has now: files that have joined the epoch
        since are not consumed. Raises ``DataError`` when it is one in other files, or in another order."""
        files = self.listed
        if not files.knows(ledger.digest, ledger.shards):
            ledger.belongs(files.digest, len(files), self.options.seed, self.options.shuffle)
        ledger.belongs(ledger.digest, ledger.shards, self.options.seed, self.options.shuffle)
        version = files.at(ledger.epoch)
        if version.shards >= ledger.shards:
            ledger.extend(version.shards, version.digest)
        return ledger

    def fresh(self, epoch: int) -> Ledger:
        """Nothing of this epoch is consumed."""
        version, options = self.listed.at(epoch), self.options
        return Ledger(version.digest, version.shards, seed=options.seed, shuffle=options.shuffle, epoch=epoch)

    @property
    def position(self) -> LeaseTable:
        """Its table, where it is clear that there is one."""
        if self.table is None:
            raise LookupError(f"{self.name} has no position")
        return self.table

    def set_open(self, client: ClientState, is_open: bool) -> None:
        """It takes part from now on, or no more."""
        self.opened += is_open - client.opened
        client.opened = is_open

    def others(self, than: Caller) -> Collection[Caller]:
        """Clients that take part now, but one."""
        return [caller for caller, client in self.clients.items() if client.opened and caller != than]

    def quarantined(self) -> Ranges:
        """As ranges."""
        return ranges(self.quarantine)

    def begin(self, ledger: Ledger) -> LeaseTable:
        """Its table is this position from now on."""
        self.table = LeaseTable(self.known, ledger, self.quarantine)
        self.independent.doers.clear()
        for client in self.clients.values():
            client.records = 0
        return self.table

    def counts(self, caller: Caller, records: int, shards: int, now_s: float) -> None:
        """So much more is done by this client."""
        self.clients[caller].records += records
        self.rate.add(now_s, records, shards)


@dataclass(slots=True)
class LeaseTurn:
    """The input and the effects of one step of the lease machine."""

    now_s: float
    world: World | None
    ranks: Mapping[Caller, Rank]
    """Of the world; empty when there is none."""
    taken_over: bool = False
    """The world was running when this Master came."""
    effects: list[Effect] = field(default_factory=list)

    def reply(self, data: DataSet, caller: Caller, client: ClientState, answer: Answer | str) -> None:
        """To the last request of a client."""
        client.answer = answer if isinstance(answer, str) else encode(answer)
        client.parked = None
        data.parked.pop(caller, None)
        self.effects.append(Tell(caller, client.answer))

    def note(self, text: str) -> None:
        """A line of the job's history."""
        self.effects.append(Note(printable(text)))

    def wake(self, at_s: float) -> None:
        """Ask for a ``Tick``."""
        self.effects.append(WakeAt(at_s))


def printable(text: str) -> str:
    """Without half characters, such as those of file names that are not UTF-8: nobody could send them on."""
    return text.encode("utf-8", "replace").decode("utf-8")


RANK_0 = Rank(0)
