"""Adding files to a data set in use, the Master's side: a worker scans for them, and the list of files grows.

The epoch that they join is decided once, here, and is in the store before anyone is notified. From then on that epoch
includes them, whatever fails and whatever position is restored.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

from data_service.file_list import FileList, ListSegment, compare_files
from data_service.leases.state import AddOrder, DataSet, LeaseTurn, printable
from data_service.manifest import Manifest, counted
from data_service.protocol.file_list_messages import NOW, AddFiles, Grow, Grown, Listed, ListFiles
from data_service.protocol.messages import Answer, DataRefused, encode
from edl.errors import DataError
from edl.master.service import Effect, Keep, TellWorker

PART_BYTES = 512 << 10
"""Bytes of a list sent at once."""


def list_files(data: DataSet, message: ListFiles) -> Answer:
    """Answer with a part of the list."""
    if data.files is None:
        return Listed(message.id, data.name, b"", 0)
    return Listed(message.id, data.name, data.files.encoded_part(message.offset, PART_BYTES), data.files.encoded_bytes)


def grow(data: DataSet, turn: LeaseTurn, message: Grow, *, is_open: bool) -> Answer | None:
    """Add found files. ``is_open``: the position and all outstanding leases are known."""
    if data.files is None:
        return DataRefused(message.id, data.name, "unknown", f"{data.name} has not been registered: open it first")
    if data.table is not None and not is_open:
        return None  # a worker may already know that the epoch is over
    try:
        if message.error:
            raise DataError(message.error)
        found = compare_files(data.files, Manifest.decode(message.manifest))
        segment = _append(data, turn, found.fresh, message) if found.fresh.file_count else None
    except DataError as error:
        if not message.order:
            return DataRefused(message.id, data.name, "differs", f"{data.name}: {error}")
        return _settle(data, turn, message, f"nothing was added: {error}", 0)
    if segment is None:
        text = f"nothing was added: {counted(found.known, 'file')} already listed"
        return _settle(data, turn, message, text, 0)
    known = f" ({counted(found.known, 'file')} more already listed)" if found.known else ""
    text = f"{found.fresh.describe()} added{known}, from epoch {segment.epoch} on"
    return _settle(data, turn, message, text, found.fresh.file_count)


def order(data: DataSet, turn: LeaseTurn, by: str, files: tuple[str, ...], when: str) -> str:
    """Record an order to add files, from outside the job. Returns the answer."""
    data.ordered += 1
    data.orders[data.ordered] = AddOrder(data.ordered, printable(by), files, when)
    turn.effects += _keep_orders(data)
    data.lister = None
    tell_orders(data, turn)
    waits = "" if data.lister is not None else "; waiting until a worker uses the data set"
    return f"order {data.ordered} for data {data.name}: a worker will scan {counted(len(files), 'pattern')}{waits}"


def tell_orders(data: DataSet, turn: LeaseTurn) -> None:
    """Send pending orders to the lowest-ranked worker that uses the data set, unless it already has them."""
    clients = data.clients.items()
    able = [one for one, client in clients if client.opened and not client.closed and one in turn.ranks]
    lister = min(able, key=lambda caller: turn.ranks[caller], default=None)
    if lister is None or lister == data.lister or not data.orders:
        return
    data.lister = lister
    turn.effects += [
        TellWorker(lister, encode(AddFiles(data.name, one.number, one.files, one.when))) for one in data.orders.values()
    ]


def extend(data: DataSet) -> None:
    """Extend the lease table by files that have joined its epoch."""
    table = data.table
    if table is None:
        return
    version = data.listed.at(table.epoch)
    if version.digest != table.ledger.digest:
        before = table.ledger.shards
        table.extend(data.known, version)
        for shard in [one for one in data.quarantine if one >= before]:
            if shard < version.shards:
                table.quarantine(shard)


def load(data: DataSet, kept: Mapping[str, bytes]) -> None:
    """Load additions to the registered list, and pending orders. Raises ``DataError``."""
    files = data.listed
    for number in itertools.count(data.registered):
        name = _segment_name(data, number)
        if name not in kept:
            break
        files.segments += FileList.decode(data.values.get(kept, name)).segments
    files.manifest  # noqa: B018 - decodes, and so verifies, what was loaded
    if f"orders/{data.name}" in kept:
        try:
            stored = json.loads(data.values.get(kept, f"orders/{data.name}"))
            data.ordered = int(stored["last"])
            rows = [
                AddOrder(int(n), str(by), tuple(map(str, names)), str(when)) for n, by, names, when in stored["orders"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"the orders of {data.name} in the store are damaged: {error}") from None
        data.orders = {one.number: one for one in rows}


def forget(data: DataSet) -> list[Effect]:
    """Delete the additions: another list replaces this one."""
    found: list[Keep] = []
    for number in range(data.registered, len(data.listed.segments)):
        found += data.values.drop(_segment_name(data, number))
    return list(found)


def _append(data: DataSet, turn: LeaseTurn, fresh: Manifest, message: Grow) -> ListSegment:
    epoch = message.epoch if data.table is None else data.table.epoch + bool(data.table.finished)
    if message.when != NOW:
        epoch = (message.epoch if data.table is None else data.table.epoch) + 1
    segment = data.listed.append(fresh.encode(), epoch, named=message.named, decoded=fresh)
    turn.effects += data.values.put(_segment_name(data, len(data.listed.segments) - 1), segment.encode())
    extend(data)
    data.independent.dirty = data.is_independent
    return segment


def _settle(data: DataSet, turn: LeaseTurn, message: Grow, text: str, added: int) -> Grown:
    done = data.orders.pop(message.order, None)
    if done is not None:
        turn.effects += _keep_orders(data)
        turn.note(f"data {data.name}: order {message.order} ({done.by}): {text}")
    elif added:
        turn.note(f"data {data.name}: {text}")
    return Grown(message.id, data.name, printable(text), added)


def _keep_orders(data: DataSet) -> list[Keep]:
    rows = [[one.number, one.by, one.files, one.when] for one in data.orders.values()]
    return data.values.put(f"orders/{data.name}", json.dumps({"last": data.ordered, "orders": rows}).encode("ascii"))


def _segment_name(data: DataSet, number: int) -> str:
    """Key of a segment. It includes the registered list's digest, so nothing of another list is picked up."""
    base = data.listed.version(data.registered).digest[:16]
    return f"grown/{data.name}/{base}-{number}"
