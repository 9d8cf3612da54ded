"""The parts of a commit in the memory of launchers, read through the own launcher by a worker of another world."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from edl.checkpoint.reading.saved_parts import ByteRange, SavedParts
from edl.errors import CheckpointError
from edl.wire import snapshot
from edl.wire.local import Seat
from edl.wire.parts import PartHeader, PartRange, decode_headers
from edl.wire.snapshot import SnapshotHeader
from edl.worker.link import Link
from edl.worker.session import PeersLost
from edl.worker.state import headers_stream

_requests = itertools.count(1)


class MemoryParts(SavedParts):
    """The commit from which this worker's world begins."""

    def __init__(self, link: Link, seat: Seat, job: str) -> None:
        """Waits for the headers, which have been requested. Raises ``RoundOver``, and ``PeersLost`` when no node
        delivered one of them."""
        super().__init__(f"commit {seat.restore_commit} (era {seat.restore_era})", seat.shards)
        self._link = link
        self._seat = seat
        self._job = job
        self._headers: dict[int, PartHeader] = {}
        found = link.piece(headers_stream(seat), decode_headers)
        if isinstance(found, str):
            raise self._lost(found)
        memory, headers = found
        memory.close()
        self._headers = {one.shard: one for one in headers}

    def _header(self, shard: int) -> SnapshotHeader:
        header = self._headers.get(shard)
        if header is None:
            raise CheckpointError(f"{self.what} came without the header of shard {shard}")
        parsed = snapshot.parse_header(header.header, header.size, job=self._job)
        meta, seat = parsed.meta, self._seat
        found, wanted = (meta.era, meta.commit, meta.shard), (seat.restore_era, seat.restore_commit, shard)
        if found != wanted:
            raise CheckpointError(f"{self._name(shard)}: received era, commit and shard {found} instead of {wanted}")
        return parsed

    def _distance(self, shard: int) -> int:
        # Of equally near copies each worker reads another one.
        return self._headers[shard].distance * self.shards + (shard - self._seat.rank) % self.shards

    def _read(self, reads: Mapping[int, Sequence[ByteRange]]) -> None:
        stream = f"ranges-{next(_requests)}"
        ranges = [PartRange(shard, one.start, one.size) for shard in reads for one in reads[shard]]
        self._link.ask_ranges(stream, self._seat.restore_era, self._seat.restore_commit, ranges)
        found = self._link.piece(stream, len)
        if isinstance(found, str):
            raise self._lost(found)
        memory, _ = found
        try:
            at = 0
            for one in itertools.chain.from_iterable(reads.values()):
                one.take(memory.view[at : at + one.size])
                at += one.size
        finally:
            memory.close()

    def _lost(self, why: str) -> PeersLost:
        return PeersLost(f"{self.what} could not be fetched for rank {self._seat.rank}: {why}")
