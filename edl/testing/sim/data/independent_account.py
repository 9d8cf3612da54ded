"""Accounting for independent workers: which records were used, counted and settled since each rollback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from data_service.leases.lease_table import DONE, QUARANTINED, LeaseTable
from data_service.leases.machine import LeaseMachine
from data_service.leases.state import DataSet as Leased
from data_service.ledger import Ledger
from data_service.loader.batching import order_of
from data_service.loader.trainers import Beginning
from data_service.protocol.messages import Ack, Done, LeasesGranted, Open, Opened, decode
from edl.arithmetic.permutation import Permutation
from edl.testing.sim.data.dataset import NAME, SimDataSet
from edl.testing.sim.data.readers import DataReader

WHOLE = 1 << 30
"""A count that exceeds the records of any shard."""
Record = tuple[int, int]
"""Epoch and number of a record."""
Shards = tuple[tuple[int, int, bool], ...]
"""Each with the number of records used, and whether these are all."""


@dataclass
class History:
    """Accounting between two rollbacks."""

    begun: set[Record] = field(default_factory=set)
    """Records that were already counted at the beginning."""
    used_by: dict[Record, list[DataReader]] = field(default_factory=dict)
    """The processes that used each record."""
    settled_for: dict[Record, DataReader] = field(default_factory=dict)
    """The process to which each record was confirmed as stored."""
    counted: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of records at the beginning of a shard that a Master has counted, by epoch and shard."""


@dataclass
class Acknowledged:
    """Records that a worker process has acknowledged, from the client's view of the Master's guarantees."""

    asked: dict[int, Ack | Open] = field(default_factory=dict)
    """Unanswered requests by their number."""
    waiting: list[tuple[int, int, Shards]] = field(default_factory=list)
    """Epoch, the Master's number (0 if not known yet) and shards that are not known to be stored."""


class IndependentAccount:
    """The accounting of one job. ``redone``: another worker may repeat the push of a lost one, so that both use the
    same records."""

    def __init__(self, data: SimDataSet, leased: Callable[[], Leased | None], redone: bool) -> None:
        self._data, self._leased, self._redone = data, leased, redone
        self.fail: Callable[[str], None] = lambda text: None
        self.positions: list[Beginning] = []
        """Named positions."""
        self.beginning: Beginning | None = None
        """Where workers begin since the last rollback."""
        self._beginnings: dict[int, Beginning] = {}
        """Where each history begins, by number."""
        self._histories: dict[int, History] = {0: History()}
        self._acks: dict[int, Acknowledged] = {}
        self._current: tuple[LeaseMachine | None, int] = (None, 0)
        """The Master's machine and the number of its history at the last event."""
        self._table: LeaseTable | None = None
        """The machine's table at the last event."""
        self._orders: dict[tuple[int, int], list[Record]] = {}
        """Records of a shard in the order in which an epoch reads them."""

    # --- workers ------------------------------------------------------------------------------------------------------

    def opened(self, reader: DataReader) -> None:
        """A worker process starts to read."""
        self._acks[id(reader)] = Acknowledged()
        registry = reader.deps.trainers
        registry.on_opening(lambda: setattr(registry, "beginning", self.beginning))
        reader.transport.said = lambda text: self._said(reader, text)
        reader.transport.heard = lambda text: self._heard(reader, text)

    def used(self, reader: DataReader, epoch: int, records: tuple[int, ...]) -> None:
        """A worker has used records."""
        for number in records:
            self._history(reader).used_by.setdefault((epoch, number), []).append(reader)

    def named(self, name: str, ledger: str) -> None:
        """A worker has named a position."""
        self.positions.append(Beginning(name, 0, {NAME: ledger}))

    def roll_back(self, position: Beginning) -> None:
        """Let workers that open from now on begin at this position."""
        number = 1 + (self.beginning.history if self.beginning is not None else 0)
        self.beginning = self._beginnings[number] = Beginning(position.name, number, position.ledgers)

    def _history(self, reader: DataReader) -> History:
        beginning = reader.deps.trainers.beginning
        return self._histories.setdefault(0 if beginning is None else beginning.history, History())

    def _said(self, reader: DataReader, text: str) -> None:
        if not text.startswith("{") or '"id":"x"' in text:
            return
        message, acks = decode(text) if len(text) > 2 else None, self._acks[id(reader)]
        if isinstance(message, Ack):
            acks.asked[message.id] = message
            acks.waiting.append((message.epoch, 0, message.shards))
        elif isinstance(message, Open):
            acks.asked[message.id] = message
            self._repeated(reader, message)

    def _repeated(self, reader: DataReader, message: Open) -> None:
        """A worker that opens again must repeat what it has acknowledged and no Master is known to have stored."""
        said = {shard: upto for shard, upto, _ in message.acks}
        for epoch, _, shards in self._acks[id(reader)].waiting:
            for shard, upto, _ in shards if epoch == message.epoch else ():
                if said.get(shard, -1) < upto:
                    self.fail(f"{reader.worker} forgets {upto} records of shard {shard}, which may not be stored")

    def _heard(self, reader: DataReader, text: str) -> None:
        message, acks = decode(text), self._acks[id(reader)]
        if not isinstance(message, Opened | Done | LeasesGranted):
            return
        asked = acks.asked.pop(message.id, None)
        gone = {shard for shard, _ in message.refused}
        left = []
        for epoch, number, shards in acks.waiting:
            answered = isinstance(asked, Open) or (isinstance(asked, Ack) and asked.shards == shards)
            kept = tuple(one for one in shards if one[0] not in gone) if answered else shards
            renumbered = answered and (isinstance(asked, Open) or not number)
            left.append((epoch, message.number if renumbered else number, kept))
        acks.waiting = []
        for epoch, number, shards in left:
            if number and number <= message.kept:
                self._settled(reader, epoch, shards)
            elif shards:
                acks.waiting.append((epoch, number, shards))

    def _settled(self, reader: DataReader, epoch: int, shards: Shards) -> None:
        """A worker's records are counted and stored, and were not refused: it may forget them."""
        history = self._history(reader)
        for shard, upto, _ in shards:
            for record in self._first(epoch, shard, upto):
                mine = reader in history.used_by.get(record, ())
                other = history.settled_for.get(record)
                if mine and not self._redone and other is not None and other is not reader:
                    self.fail(f"{other.worker} and {reader.worker} have both had {record} confirmed")
                if mine:
                    history.settled_for[record] = reader

    def _first(self, epoch: int, shard: int, upto: int) -> list[Record]:
        """The first ``upto`` records of a shard in reading order."""
        leased = self._leased()
        if leased is None or leased.files is None or shard >= len(leased.known):
            return []
        order = self._orders.get((epoch, shard))
        if order is None:
            records = self._data.records(leased.known.ref(shard))
            rows = list(range(len(records)))
            if self._data.shuffle and records:
                permutation = Permutation(len(records), order_of(self._data.seed, epoch, shard))
                rows = [int(row) for row in permutation.array(0, len(records))]
            order = self._orders[epoch, shard] = [(epoch, records[row]) for row in rows]
        return order[:upto]

    # --- the Master ---------------------------------------------------------------------------------------------------

    def stepped(self, machine: LeaseMachine, data: Leased, table: LeaseTable) -> None:
        """Check the Master's machine after an event."""
        number = data.independent.history
        if (machine, number) == self._current and self._table is not None and table is not self._table:
            self._ended(self._table)
        history = self._histories.setdefault(number, History())
        begins = self._current[0] is machine and self._current[1] < number
        self._current, self._table = (machine, number), table
        self._count(table.ledger, history, begins=begins)

    def _ended(self, table: LeaseTable) -> None:
        """Check that a Master has ended an epoch only when all its shards are done."""
        left = [one for one in range(table.ledger.shards) if table.state(one) not in (DONE, QUARANTINED)]
        if left:
            self.fail(f"epoch {table.epoch} has ended without the shards {left}")

    def _count(self, ledger: Ledger, history: History, *, begins: bool) -> None:
        """Check the records that a Master counts. ``begins``: at the beginning of a history."""
        for shard in range(ledger.shards):
            place, upto = (ledger.epoch, shard), WHOLE if ledger.is_done(shard) else ledger.count(shard)
            before = history.counted.get(place, 0)
            if upto <= before:
                continue
            history.counted[place] = upto
            for record in self._first(*place, upto)[before:]:
                if begins:
                    history.begun.add(record)
                elif record not in history.used_by and record not in history.begun:
                    self.fail(f"{record} is counted, and no worker has used it")

    # --- the end ------------------------------------------------------------------------------------------------------

    def whole(self, leased: Leased) -> Counter[Record]:
        """Records that workers used in the last history, and those before its beginning."""
        number = leased.independent.history
        unknown = [one for one, history in self._histories.items() if one > number and history.used_by]
        if unknown:
            self.fail(f"workers used records of histories {unknown}, and the Master counts those of history {number}")
        history = self._histories[number]
        found = Counter(history.used_by.keys() | history.begun)
        # When the last workers have ended, no worker opens again, and a rollback that comes then begins no history.
        beginning = self._beginnings.get(number)
        if beginning is not None:
            for epoch in range(Ledger.decode(beginning.ledgers[NAME]).epoch):
                for shard in range(leased.listed.at(epoch).shards):
                    found.update(self._first(epoch, shard, WHOLE))
        return found
