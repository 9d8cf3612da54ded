"""Common to both modes: counting consumed records, and the answers to clients with and without the data set open."""

from __future__ import annotations

from data_service.leases.state import ClientState, DataSet, LeaseTurn
from data_service.manifest import RECORD_FORMATS
from data_service.protocol.messages import DataRefused, Opened
from edl.master.service import Caller


def take(data: DataSet, turn: LeaseTurn, caller: Caller, shard: int, upto: int, complete: bool) -> str:
    """Count records of a leased shard as consumed. Returns the reason if they do not count, else ""."""
    table = data.position
    if table.holders.get(shard) == caller and table.manifest.format in RECORD_FORMATS:
        records = table.manifest.count(shard)
        if upto > records or (complete and upto != records):
            ref = table.manifest.ref(shard)
            return f"shard {shard} ({ref.file}, {ref.begin} to {ref.end}) has {records} records, not {upto}"
    new, problem = table.take(caller, shard, upto, complete)
    if problem:
        return problem
    data.counts(caller, new, int(complete), turn.now_s)
    if complete:
        data.failures.pop(shard, None)
    return ""


def opened(data: DataSet, id: int, epoch: int, refused: tuple[tuple[int, str], ...] = ()) -> Opened:
    """Build the answer to ``Open``."""
    version, now = data.listed.at(epoch), data.independent
    return Opened(
        id,
        data.name,
        version.digest,
        data.known.format,
        version.shards,
        data.records(version),
        data.options,
        epoch,
        data.quarantined(),
        refused,
        now.fence,
        now.number,
        now.kept,
        tuple(data.listed.types.items()),
    )


def unopened(data: DataSet, client: ClientState, id: int) -> DataRefused:
    """The refusal for a client that has not opened the data set."""
    text = client.conflict or f"{data.name} is not open for this worker (or was rolled back): open it first"
    return DataRefused(id, data.name, "unopened", text)
