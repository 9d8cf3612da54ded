"""Padding batches for a worker that has run out of data while others still have some."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from data_service.formats import FormatReader
from data_service.loader.batching import Columns, Cursor, micro_batches, order_of, take
from data_service.loader.prefetcher import ReadyStep
from data_service.loader.replay import RecordRange
from data_service.manifest import ShardRef


class Padding:
    """Repeats the records of the worker's last step. They are read again, since a script may write into its
    batches. A worker that never had a step repeats one that another worker names."""

    def __init__(self, seed: int, shuffle: bool) -> None:
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._pieces: tuple[RecordRange, ...] = ()
        self._count = 0
        self._read: tuple[Columns, int] | None = None
        self.pattern = ""
        """A shard to pad from, for workers that have never had a step (JSON of a ``ShardRef``)."""

    def remember(self, epoch: int, step: ReadyStep) -> None:
        """Note the step that the script receives."""
        self._epoch, self._pieces, self._count, self._read = epoch, step.pieces, step.offer.samples, None

    def spare(self, total: int) -> int:
        """Samples available as padding for a step of ``total`` samples; 0 before the first step."""
        return min(self._count, total)

    def pattern_of(self, steps: Sequence[ReadyStep]) -> str:
        """The pattern to send to other workers; empty if they have one."""
        return "" if self.pattern or not steps else json.dumps(astuple(steps[0].pieces[0].ref))

    def make(
        self, samples: int, sizes: Sequence[int], reader: FormatReader, columns: Callable[[Any], Columns]
    ) -> list[tuple[Columns, int]]:
        """Padding micro-batches that count ``samples`` samples. With 0 they hold samples that do not count."""
        total = sum(sizes)
        if self._read is None:
            self._read = self._read_again(total, reader, columns)
        found, count = self._read
        parts = micro_batches(found, min(count, total), sizes)
        return [({name: array.copy() for name, array in part.items()}, some if samples else 0) for part, some in parts]

    def _read_again(self, total: int, reader: FormatReader, columns: Callable[[Any], Columns]) -> tuple[Columns, int]:
        pieces = self._pieces or (RecordRange(ShardRef(*json.loads(self.pattern)), 0, total),)
        cursors = []
        for piece in pieces:
            table = reader.read(piece.ref)
            records = int(table.num_rows)
            order = order_of(self._seed, self._epoch, piece.ref.index) if self._shuffle else None
            cursor = Cursor(piece.ref.index, columns(table), records, piece.begin, order)
            cursor.records = min(records, piece.upto)
            cursors.append(cursor)
        count = sum(cursor.left for cursor in cursors)
        return take(cursors, count, False, 0, 0)[0], count
