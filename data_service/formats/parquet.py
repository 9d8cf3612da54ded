"""Parquet. A shard is one or more row groups, because a row group can only be decompressed as a whole."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pyarrow as pa
import pyarrow.parquet as pq

from data_service.filesystems import is_url
from data_service.formats.file_reader import FileReader, FileSplit, OpenFile, checked_range, file_errors, grouped
from data_service.manifest import ShardRef

PIECE_RECORDS = 65536


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """An open file, and the cumulative number of records before each row group, with the total last."""

    file: pq.ParquetFile
    offsets: list[int]


class ParquetReader(FileReader[ParquetFile]):
    """Reads Parquet. Other ranges are possible at the cost of decompressing whole row groups. Verifies page checksums,
    if any."""

    format = "parquet"

    def pieces(self, ref: ShardRef) -> Iterator[pa.Table]:
        """The records of a shard in tables of at most ``PIECE_RECORDS``."""
        with file_errors(ref.file, shard=ref):
            opened = self._open(ref.file)  # opened separately, so that no other thread has to wait
            checked_range(ref, opened.handle.offsets[-1], "records")
            groups, skip = _groups(opened.handle.offsets, ref)
            left = ref.end - ref.begin
            for batch in opened.handle.file.iter_batches(PIECE_RECORDS, groups, opened.schema.names):
                begin = min(skip, batch.num_rows)
                piece = batch.slice(begin, left)
                skip -= begin
                left -= piece.num_rows
                if piece.num_rows:
                    yield self._conforming(pa.Table.from_batches([piece]), opened.schema, ref.file)
                if not left:
                    return

    def _enter(self, file: str) -> tuple[ParquetFile, pa.Schema]:
        source = self.storage.open(file)
        opened = pq.ParquetFile(source, pre_buffer=is_url(file), page_checksum_verification=True)
        sizes = (opened.metadata.row_group(index).num_rows for index in range(opened.num_row_groups))
        return ParquetFile(opened, list(accumulate(sizes, initial=0))), opened.schema_arrow

    def _read(self, opened: OpenFile[ParquetFile], ref: ShardRef) -> pa.Table:
        offsets = opened.handle.offsets
        checked_range(ref, offsets[-1], "records")
        groups, skip = _groups(offsets, ref)
        with opened.lock:
            table = opened.handle.file.read_row_groups(groups, opened.schema.names)
        return table.slice(skip, ref.end - ref.begin)

    def _split(self, file: str, size_bytes: int, shard_records: int, shard_bytes: int) -> Iterable[FileSplit]:
        offsets = self.open_files.get(file).handle.offsets
        sizes = (high - low for low, high in pairwise(offsets))
        return grouped(sizes, shard_records, split=False)


def _groups(offsets: list[int], ref: ShardRef) -> tuple[list[int], int]:
    """The row groups of a shard, and the number of records of the first one that precede it."""
    first = bisect_right(offsets, ref.begin) - 1
    last = bisect_left(offsets, ref.end)
    return list(range(first, last)) if ref.end > ref.begin else [], ref.begin - offsets[first]
