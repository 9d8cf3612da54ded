"""The machine that leases shards of data sets to workers: the Master's service "data".

Pure: events in, effects out. ``registration``, ``grants`` and ``independent`` process messages; ``lease_table`` tracks
the shards. This file dispatches events, executes each request once, and parks those that have to wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from data_service.leases import file_additions, grants, independent, registration
from data_service.leases.chunked_values import ChunkedValues
from data_service.leases.reader_registry import ReaderRegistry
from data_service.leases.state import ClientState, DataSet, LeaseTurn
from data_service.leases.throughput import scaled
from data_service.protocol.add_request import AddRequest, parse_add_request
from data_service.protocol.file_list_messages import Grow, ListFiles
from data_service.protocol.messages import (
    STEPS,
    Ack,
    Answer,
    Commit,
    DataRefused,
    Gone,
    Lease,
    NextEpoch,
    Open,
    ReadRate,
    RegisterFiles,
    Request,
    Rollback,
    decode,
    encode,
    salvage,
)
from edl.errors import DataError, ProtocolError
from edl.master.service import (
    Answered,
    Caller,
    Effect,
    Event,
    KeyGone,
    KeyPut,
    Ordered,
    Progress,
    Said,
    TellWorker,
    Tick,
    WakeAt,
    WorldBegan,
    WorldEnded,
)
from edl.rendezvous.phrases import duration
from edl.types import Rank
from edl.wire.records import World
from edl.wire.status import ServiceShare

MOST_SETS = 1000
_SETS = "sets/"


class LeaseMachine:
    """Implements ``edl.master.service.Service``. Lease tables are mutable."""

    name = "data"

    def __init__(self, authority: str = "") -> None:
        """``authority``: of the remote readers, in a job with a secret."""
        self.sets: dict[str, DataSet] = {}
        self._values = ChunkedValues()
        self._readers = ReaderRegistry(authority)
        self._world: World | None = None
        self._ranks: Mapping[Caller, Rank] = {}
        self._same: dict[Caller, Caller] = {}
        """One object per caller: tables are full of them, and ``is`` is faster than ``==``."""
        self._taken_over = False
        self._opened = 0
        """Number of open clients after the last event."""
        self._now_s = 0.0
        self._wake_s = 0.0
        """Time of the earliest requested tick; 0: none."""

    def load(self, kept: Mapping[str, bytes], now_s: float) -> tuple[Effect, ...]:
        """Start from the state that the previous Master persisted. Called first."""
        turn = self._turn(now_s)
        for key in sorted(kept):
            if key.startswith(_SETS) and "/" not in key[len(_SETS) :] and kept[key]:
                self._load(key[len(_SETS) :], kept, turn)
        return self._effects(turn)

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Process one event. Every message is answered, including invalid ones."""
        turn = self._turn(now_s)
        if isinstance(event, Said):
            self._said(turn, event)
        elif isinstance(event, WorldBegan):
            self._began(turn, event)
        elif isinstance(event, WorldEnded):
            self._ended()
        elif isinstance(event, Tick):
            self._tick(turn)
        elif isinstance(event, Ordered):
            self._ordered(turn, event)
        elif isinstance(event, KeyPut | KeyGone):
            turn.effects += self._readers.changed(event)
        self._tell_readers(turn)
        return self._effects(turn)

    def report(self) -> tuple[Progress, ...]:
        """Progress of each data set, and the remote readers, for ``edl status``."""
        sets = (progress(data, self._now_s) for _, data in sorted(self.sets.items()) if data.manifest is not None)
        return (*sets, *self._readers.report())

    # --- events ------------------------------------------------------------------------------------------------------

    def _began(self, turn: LeaseTurn, event: WorldBegan) -> None:
        self._world, self._taken_over = event.world, event.taken_over
        self._readers.world_began()
        self._ranks = {
            Caller(member.node, slot): Rank(member.first_rank + local_rank)
            for member in event.world.members
            for local_rank, slot in enumerate(member.used)
        }
        self._same = {caller: caller for caller in (*self._ranks, *self._same) if caller in self._ranks}
        turn.world, turn.ranks, turn.taken_over = event.world, self._ranks, event.taken_over
        for data in self.sets.values():
            data.parked.clear()
            data.clients = {one: its for one, its in data.clients.items() if one in self._ranks}
            data.opened = 0
            data.lister = None
            for client in data.clients.values():
                client.last, client.answer, client.parked = -1, "", None
                client.opened, client.closed, client.conflict, client.claim = False, False, "", None
            if data.is_independent:
                independent.world_began(data, turn)
                independent.settle(data, turn)
            else:
                data.table = None

    def _ended(self) -> None:
        self._world, self._ranks = None, {}
        for data in self.sets.values():
            data.parked.clear()
            for client in data.clients.values():
                client.parked = None

    def _tick(self, turn: LeaseTurn) -> None:
        self._wake_s = 0.0
        for data in self.sets.values():
            if data.is_independent:
                independent.tick(data, turn)
                self._go_on(turn, data)
                independent.settle(data, turn)

    def _ordered(self, turn: LeaseTurn, event: Ordered) -> None:
        """Process a request from outside the world."""
        known = [name for name, data in self.sets.items() if data.files is not None]
        asked = parse_add_request(event.body, known)
        if not isinstance(asked, AddRequest):
            turn.effects.append(Answered(event.number, False, asked))
            return
        text = file_additions.order(self.sets[asked.dataset], turn, event.by, asked.files, asked.when)
        turn.effects.append(Answered(event.number, True, text))

    def _said(self, turn: LeaseTurn, event: Said) -> None:
        try:
            message = decode(event.body)
        except ProtocolError as error:
            id_, dataset = salvage(event.body)
            turn.effects.append(
                _tell(event.caller, DataRefused(id_, dataset, "malformed", f"invalid message: {error}"))
            )
            return
        if not isinstance(message, Request):
            text = f"{type(message).__name__} is an answer, not a request"
            turn.effects.append(_tell(event.caller, DataRefused(*salvage(event.body), "malformed", text)))
            return
        world = turn.world
        if world is None or event.round != world.round or event.caller not in turn.ranks:
            now = (
                "there is no world at present" if world is None else f"the current world is that of round {world.round}"
            )
            text = f"{message.dataset}: request from round {event.round}; {now}. Wait for the next round and open again"
            turn.effects.append(_tell(event.caller, DataRefused(message.id, message.dataset, "stale", text)))
            return
        if isinstance(message, Open):
            self._readers.ask_again(event.caller)
        data = self._find(message)
        if isinstance(data, DataRefused):
            turn.effects.append(_tell(event.caller, data))
            return
        caller = self._same.setdefault(event.caller, event.caller)
        client = data.clients.get(caller)
        if client is None:
            client = data.clients[caller] = ClientState()
        if isinstance(message, ReadRate):
            client.per_s, client.waited = message.records_per_s, message.waited
            client.heard_s = turn.now_s
        elif message.id > client.last:
            client.request_hash = hash(event.body)
            self._request(turn, data, caller, client, message)
        elif message.id < client.last or client.request_hash != hash(event.body):
            late = f"request {message.id} arrived after {client.last}"
            text = f"{message.dataset}: {late}, but ids must increase. Send it with a higher one"
            turn.effects.append(_tell(event.caller, DataRefused(message.id, message.dataset, "old", text, client.last)))
        elif client.answer:
            turn.effects.append(TellWorker(event.caller, client.answer))

    def _request(self, turn: LeaseTurn, data: DataSet, caller: Caller, client: ClientState, message: Request) -> None:
        client.last, client.answer, client.parked = message.id, "", None
        data.parked.pop(caller, None)
        answer = self._do(turn, data, caller, client, message)
        if answer is None:
            client.parked = message
            data.parked[caller] = None
        else:
            turn.reply(data, caller, client, answer)
            if data.parked and not isinstance(message, Lease | Ack):
                self._go_on(turn, data)
            if isinstance(message, Open | Gone):
                data.lister = None if data.lister == caller else data.lister  # earlier messages to it may be lost
                file_additions.tell_orders(data, turn)
        if data.is_independent:
            independent.settle(data, turn)

    def _go_on(self, turn: LeaseTurn, data: DataSet) -> None:
        """Answer parked requests that no longer have to wait."""
        changed = bool(data.parked)
        while changed:
            changed = False
            for caller in list(data.parked):
                client = data.clients[caller]
                answer = self._do(turn, data, caller, client, client.parked) if client.parked else None
                if answer is not None:
                    changed = True
                    turn.reply(data, caller, client, answer)

    def _do(
        self, turn: LeaseTurn, data: DataSet, caller: Caller, client: ClientState, message: Request
    ) -> Answer | str | None:
        """Execute a request. Returns the answer, or None if it has to wait."""
        if data.broken and not isinstance(message, RegisterFiles):
            return DataRefused(message.id, data.name, "ledger", data.broken)
        match message:
            case RegisterFiles():
                return registration.register(data, turn, caller, message)
            case Open():
                return registration.open_(data, turn, caller, client, message)
            case Lease():
                return grants.lease(data, turn, caller, client, message)
            case NextEpoch():
                return grants.next_epoch(data, turn, caller, client, message)
            case ListFiles():
                return file_additions.list_files(data, message)
            case Grow():
                return file_additions.grow(data, turn, message, is_open=registration.is_open(data, turn))
            case Gone():
                return independent.gone(data, turn, caller, client, message)
        if data.options.mode == STEPS:
            text = f"{data.name} is used in mode {STEPS}: its position is part of the model's state"
            return DataRefused(message.id, data.name, "mode", text)
        match message:
            case Ack():
                return independent.acks(data, turn, caller, client, message)
            case Commit():
                return independent.commit(data, turn, client, message)
            case Rollback():
                return independent.rollback(data, turn, client, message)
            case _:
                raise TypeError(f"{type(message).__name__} is not a request for the table")

    def _tell_readers(self, turn: LeaseTurn) -> None:
        """Send the list of readers to clients that need it."""
        opened = sum(data.opened for data in self.sets.values())
        if opened == self._opened and not self._readers.due:
            return
        self._opened = opened
        clients = (item for data in self.sets.values() for item in data.clients.items())
        turn.effects += self._readers.tell({caller for caller, client in clients if client.opened})

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _find(self, message: Request) -> DataSet | DataRefused:
        data = self.sets.get(message.dataset)
        if data is None:
            if not isinstance(message, RegisterFiles | Open | ListFiles):
                text = f"there is no data set {message.dataset}: rank 0 registers it, then each worker opens it"
                return DataRefused(message.id, message.dataset, "unknown", text)
            if len(self.sets) >= MOST_SETS:
                text = f"{message.dataset}: there are {MOST_SETS} data sets already"
                return DataRefused(message.id, message.dataset, "unknown", text)
            data = self.sets[message.dataset] = DataSet(message.dataset, self._values)
        return data

    def _load(self, name: str, kept: Mapping[str, bytes], turn: LeaseTurn) -> None:
        data = self.sets[name] = DataSet(name, self._values)
        try:
            registration.load_set(data, self._values.get(kept, _SETS + name))
            file_additions.load(data, kept)
            if kept.get(f"quarantine/{name}"):
                data.quarantine = grants.decode_quarantine(self._values.get(kept, f"quarantine/{name}"))
                if data.quarantine:
                    turn.effects.append(grants.flaw(data))
            if data.is_independent:
                independent.load(data, kept)
        except DataError as error:
            turn.note(f"data {name}: the state written by the previous Master is unusable: {error}")
            if data.is_independent:
                data.broken = f"{name}: its accounting in the store is unusable: {error}. Register different data"
            data.files = None

    def _turn(self, now_s: float) -> LeaseTurn:
        self._now_s = now_s
        return LeaseTurn(now_s, self._world, self._ranks, self._taken_over)

    def _effects(self, turn: LeaseTurn) -> tuple[Effect, ...]:
        """The turn's effects, without redundant timers, and with ``Keep`` before all others."""
        wakes = [effect.at_s for effect in turn.effects if isinstance(effect, WakeAt)]
        if wakes:
            earliest = min(wakes)
            turn.effects = [effect for effect in turn.effects if not isinstance(effect, WakeAt)]
            if not self._wake_s or earliest < self._wake_s:
                self._wake_s = earliest
                turn.effects.append(WakeAt(earliest))
        return tuple(turn.effects)


def progress(data: DataSet, now_s: float) -> Progress:
    """Progress of one data set."""
    table, manifest = data.table, data.known
    shards, (per_s, shards_per_s) = len(manifest), data.rate.per_s(now_s)
    if table is None:
        return Progress(data.name, f"{data.name}: {manifest.describe()}; not opened", {"shards": float(shards)})
    ledger = table.ledger
    shards, records = ledger.shards, data.records(data.listed.at(table.epoch))
    left_out = sum(manifest.count(shard) for shard in data.quarantine) if manifest.records >= 0 else 0
    counts: dict[str, float] = {
        "epoch": table.epoch,
        "shards": shards,
        "done_shards": ledger.done_shards,
        "leased_shards": len(table.holders),
        "pending_shards": table.pending,
        "quarantined_shards": table.quarantined,
        "records": records,
        "done_records": ledger.records,
        "quarantined_records": left_out,
        "records_per_s": per_s,
    }
    parts = [f"{data.name}: epoch {table.epoch}", f"{ledger.done_shards:,} of {shards:,} shards done"]
    if table.holders:
        parts.append(f"{len(table.holders):,} leased")
    if table.quarantined:
        parts.append(f"{table.quarantined:,} quarantined")
    if per_s:
        parts.append(f"{scaled(per_s)} records/s")
    left_s = 0.0
    if records >= 0 and per_s:
        left_s = max(0, records - left_out - ledger.records) / per_s
    elif shards_per_s:
        left_s = (table.pending + len(table.holders)) / shards_per_s
    if table.finished:
        parts.append("finished")
    elif left_s:
        counts["left_s"] = left_s
        parts.append(f"{duration(left_s)} left")
    done = [client.records for client in data.clients.values() if client.opened]
    if len(done) > 1 and any(done):
        counts["slowest_share"] = min(done) / max(done)
        if min(done) < 0.8 * max(done):
            parts.append(f"slowest worker at {100 * min(done) // max(done)}% of the fastest")
    waited = [client.waited for client in data.clients.values() if client.opened]
    if any(waited):
        counts["waited"] = max(waited)
    return Progress(data.name, ", ".join(parts), counts, shares(data))


def shares(data: DataSet) -> tuple[ServiceShare, ...]:
    """Which nodes read a data set that is open, by name."""
    found: dict[str, list[int]] = {}
    for caller, client in data.clients.items():
        leased = data.table.leases.get(caller, ()) if data.table is not None else ()
        if client.opened or leased:
            row = found.setdefault(caller.node, [0, 0, 0])
            row[:] = row[0] + client.opened, row[1] + len(leased), row[2] + client.records
    return tuple(ServiceShare(node, *row) for node, row in sorted(found.items()))


def _tell(caller: Caller, answer: Answer) -> TellWorker:
    return TellWorker(caller, encode(answer))
