"""The job's keys in the store: the operations that write them, and the functions with which the next Master reads them.
No I/O.

The world has its own key, because it lists every node while the rest of the record changes far more often: at the end
of a job of a hundred nodes the record is written a hundred times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from edl.errors import ProtocolError
from edl.master.history import JobHistory
from edl.master.service import Keep
from edl.master.state import Record
from edl.ports import Delete, Operation, Put
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.records import World
from edl.wire.status import HistoryEntry

T = TypeVar("T")

MOST_BYTES = 1024 * 1024
MOST_OPERATIONS = 100
"""Limits of one transaction: by default etcd accepts 1.5 MB and 128 operations."""


def readable(kind: type[T], values: Mapping[str, bytes], prefix: str, log: Callable[[str], None]) -> list[T]:
    """Decode all values below a prefix. An invalid value is logged and skipped, so that it does not stop the Master."""
    found = []
    for key, value in values.items():
        if key.startswith(prefix):
            try:
                found.append(plain.loads(kind, value))
            except ProtocolError as error:
                log(f"ignoring {key}: {error}")
    return found


def record_in(values: Mapping[str, bytes], keys: JobKeys) -> Record | None:
    """The last Master's record; None: there is none. Raises ``ProtocolError`` if it is invalid."""
    if keys.record not in values:
        return None
    record = plain.loads(Record, values[keys.record])
    if keys.world not in values:
        return record
    return dataclasses.replace(record, world=plain.loads(World, values[keys.world]))


def record_operations(keys: JobKeys, before: Record | None, record: Record) -> list[Operation]:
    """The operations that turn the stored record into this one. They belong into one transaction."""
    operations: list[Operation] = []
    if record != before:
        operations.append(Put(keys.record, plain.dumps(dataclasses.replace(record, world=None))))
    if record.world != (before.world if before is not None else None):
        operations.append(Put(keys.world, plain.dumps(record.world)) if record.world else Delete(keys.world))
    if record.outcome is not None:
        operations.append(Put(keys.over, b""))
    return operations


def history_operations(keys: JobKeys, history: JobHistory, added: Sequence[HistoryEntry]) -> list[Operation]:
    """The operations that add entries to the history, and delete those that they displace."""
    new, outdated = history.change(added)
    return [
        *(Put(keys.history_entry(entry.number), plain.dumps(entry)) for entry in new),
        *(Delete(keys.history_entry(number)) for number in outdated),
    ]


def service_operations(keys: JobKeys, kept: Sequence[tuple[str, Keep]]) -> list[Operation]:
    """The operations for what services keep, in order; only the last one of several values for a name."""
    newest = {(service, one.name): index for index, (service, one) in enumerate(kept)}
    found: list[Operation] = []
    for index, (service, one) in enumerate(kept):
        if newest[service, one.name] == index:
            key = keys.service(service, one.name)
            found.append(Put(key, one.value) if one.value else Delete(key))
    return found


def transactions(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Split operations, in order, into transactions that the store accepts."""
    piece: list[Operation] = []
    size = 0
    for operation in operations:
        more = len(operation.value) if isinstance(operation, Put) else 0
        if piece and (size + more > MOST_BYTES or len(piece) >= MOST_OPERATIONS):
            yield piece
            piece, size = [], 0
        piece.append(operation)
        size += more
    if piece:
        yield piece


def whole_job(keys: JobKeys) -> list[Operation]:
    """The operations that delete a job's keys, except its outcome and those of its launchers."""
    return [*(Delete(key) for key in (keys.spec, keys.origin, keys.token, keys.run)), *left_by_masters(keys)]


def left_by_masters(keys: JobKeys) -> list[Operation]:
    """The operations that delete what Masters keep for the next Master of the same run. Another run of the job must not
    find it."""
    single = keys.record, keys.world, keys.scale, keys.goodput, keys.over, keys.last_write
    below = keys.history, keys.services, keys.companions
    return [*(Delete(key) for key in single), *(Delete(key, prefix=True) for key in below)]
