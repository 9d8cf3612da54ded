"""Registering a data set, opening it, and building the lease table from the workers' positions."""

from __future__ import annotations

import hashlib

from data_service.file_list import FileList
from data_service.leases import file_additions, independent
from data_service.leases.consumption import opened
from data_service.leases.state import RANK_0, ClientState, DataSet, LeaseTurn
from data_service.ledger import Ledger
from data_service.manifest import Manifest
from data_service.protocol.messages import (
    INDEPENDENT,
    Answer,
    DataRefused,
    DataSetOptions,
    FilesRegistered,
    Open,
    RegisterFiles,
    shards_of,
)
from edl.errors import DataError, ProtocolError
from edl.master.service import Caller, Effect
from edl.wire import json_messages


def register(data: DataSet, turn: LeaseTurn, caller: Caller, message: RegisterFiles) -> Answer:
    """Register the shards of a data set."""
    if turn.ranks[caller] != RANK_0 and message.options.mode != INDEPENDENT:
        text = f"only rank 0 registers data; {data.name} was sent by rank {turn.ranks[caller]}"
        return DataRefused(message.id, data.name, "rank", text)
    blob = hashlib.blake2b(message.manifest, digest_size=16).digest()
    if data.files is None or data.blob != blob or message.options != data.options:
        try:
            files = FileList.decode(message.manifest)
            manifest = files.manifest
        except (DataError, LookupError) as error:
            return DataRefused(message.id, data.name, "malformed", f"{data.name}: {error}")
        if message.options != data.options or data.files is None or not data.files.extends(files):
            difference = _difference(data, manifest, message.options)
            if difference and _in_use(data):
                text = f"{data.name} is in use and was registered differently: {difference}"
                return DataRefused(message.id, data.name, "differs", f"{text}. Use another name for other data")
            _replace(data, turn, files, message, difference)
    data.blob = blob
    return FilesRegistered(message.id, data.name, data.listed.digest, len(data.listed), data.known.records)


def open_(data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, message: Open) -> Answer | None:
    """A worker opens the data set."""
    manifest = data.manifest
    if manifest is None:
        return None
    problem = _unfit(data, manifest, turn, caller, message)
    if problem:
        return problem
    if message.digest and not data.listed.knows(message.digest):
        return None  # a long list arrives in parts, and is complete once rank 0 has opened
    data.set_open(client, True)
    client.conflict, client.closed = "", False
    if data.is_independent:
        return independent.open_(data, turn, caller, client, message)
    if message.rank == RANK_0 and data.table is None:
        try:
            _begin(data, turn, message)
        except DataError as error:
            data.set_open(client, False)
            return DataRefused(message.id, data.name, "ledger", f"{data.name}: {error}{_was(data)}")
    client.claim = message
    if data.table is not None:
        claim(data, turn, caller, client)
        if client.conflict:
            data.set_open(client, False)
            return DataRefused(message.id, data.name, "ledger", client.conflict)
    return opened(data, message.id, data.table.epoch if data.table else message.epoch)


def is_open(data: DataSet, turn: LeaseTurn) -> bool:
    """True if shards can be granted: the position is known, and, after a change of the Master, all outstanding
    leases."""
    if data.table is None:
        return False
    if data.is_independent:
        return not data.independent.awaited
    return not turn.taken_over or data.table.finished or data.opened == len(turn.ranks)


def claim(data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState) -> None:
    """Mode "steps": apply a worker's statement of what it holds, once the table exists."""
    message, table = client.claim, data.table
    client.claim, client.returned = None, {}
    if message is None or table is None or message.epoch != table.epoch:
        if table is not None:
            table.release(caller, turn.now_s)
        return
    # With a million shards, nearly all are done in rank 0's position and need no processing.
    granted = set(table.undone(shards_of(message.granted)))
    client.returned = dict(message.returned)
    table.release(caller, turn.now_s, but=granted)
    for shard in granted:
        problem = table.hold(caller, shard, turn.now_s)
        if problem and shard not in data.quarantine:
            client.conflict = f"{data.name}: rank {message.rank} claims a lease on a shard, but {problem}"
    for shard in table.undone(shards_of(message.finished)):
        if table.holders.get(shard) == caller:
            table.take(caller, shard, max(table.ledger.count(shard), table.manifest.count(shard)), True)
    for shard, upto in client.returned.items():
        table.raise_count(shard, upto)


def _begin(data: DataSet, turn: LeaseTurn, message: Open) -> None:
    """Take the round's position from rank 0."""
    data.begin(data.fit(Ledger.decode(message.ledger)) if message.ledger else data.fresh(message.epoch))
    for caller, client in data.clients.items():
        if client.claim is not None:
            claim(data, turn, caller, client)


def _unfit(data: DataSet, manifest: Manifest, turn: LeaseTurn, caller: Caller, message: Open) -> DataRefused | None:
    rank = turn.ranks[caller]
    if message.rank != rank:
        text = f"{data.name}: this worker has rank {rank} in this round, not {message.rank}"
        return DataRefused(message.id, data.name, "rank", text)
    if message.digest and not data.listed.knows(message.digest) and (message.rank == RANK_0 or data.table is not None):
        text = (
            f"{data.name} has digest {manifest.digest[:12]} ({manifest.describe()}), not {message.digest[:12]}"
            f"{_was(data)}. All ranks must use the same files"
        )
        return DataRefused(message.id, data.name, "differs", text)
    numbers = [end - 1 for _, end in (*message.granted[-1:], *message.finished[-1:])]
    numbers += [shard for shard, _ in message.returned] + [shard for shard, _, _ in message.acks]
    shards = data.listed.at(message.epoch).shards if data.table is None else data.table.ledger.shards
    if numbers and max(numbers) >= max(shards, data.listed.at(message.epoch).shards):
        text = f"{data.name}: there is no shard {max(numbers)}; there are {shards}"
        return DataRefused(message.id, data.name, "malformed", text)
    return None


def _difference(data: DataSet, manifest: Manifest, options: DataSetOptions) -> str:
    """Difference between the registered and the offered data; empty if nothing was registered."""
    if data.manifest is None:
        return ""
    found = [data.manifest.difference(manifest)]
    for name in ("seed", "shuffle", "mode", "failures"):
        before, now = getattr(data.options, name), getattr(options, name)
        if before != now:
            found.append(f"{name}={now} instead of {before}")
    return "; ".join(part for part in found if part)


def _in_use(data: DataSet) -> bool:
    if data.is_independent and data.table is not None and (data.table.ledger.records or data.table.ledger.epoch):
        return True
    return any(client.opened for client in data.clients.values())


def _was(data: DataSet) -> str:
    """Difference from the previously registered data, if known, as text."""
    if data.previous is None or data.manifest is None:
        return ""
    return f" ({data.previous.difference(data.manifest)})"


def _replace(data: DataSet, turn: LeaseTurn, files: FileList, message: RegisterFiles, difference: str) -> None:
    manifest = files.manifest
    if data.files is not None:
        turn.effects += file_additions.forget(data)
    if data.manifest is None or data.manifest.digest != manifest.digest:
        data.previous, data.quarantine, data.failures = data.manifest, {}, {}
        turn.effects += data.values.drop(f"quarantine/{data.name}")  # it may be of data that could not be read back
    if data.manifest is None:
        turn.note(f"data {data.name} registered: {manifest.describe()}, {manifest.format}")
    else:
        turn.note(f"data {data.name} registered again: {difference}")
    data.files, data.options, data.table, data.broken = files, message.options, None, ""
    data.registered = len(files.segments)
    turn.effects += keep_set(data, message.manifest)
    if data.is_independent:
        independent.begin(data, turn)


def keep_set(data: DataSet, encoded: bytes) -> list[Effect]:
    """The writes that store the manifest and the options."""
    return list(data.values.put(f"sets/{data.name}", json_messages.encode(data.options) + b"\n" + encoded))


def load_set(data: DataSet, value: bytes) -> None:
    """The inverse of ``keep_set``. Raises ``DataError``."""
    head, _, encoded = value.partition(b"\n")
    try:
        data.options = json_messages.decode(DataSetOptions, head)
    except ProtocolError as error:
        raise DataError(f"the options of {data.name} in the store are damaged: {error}") from None
    data.files = FileList.decode(encoded)
    data.registered = len(data.files.segments)
    data.blob = hashlib.blake2b(encoded, digest_size=16).digest()
