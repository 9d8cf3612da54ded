"""What a worker trains on that has nothing left while others have: something that it had before, or that they have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from data_service.formats import Reader
from data_service.loader.batching import Columns, Cursor, micro_batches, order_of, take
from data_service.loader.prefetcher import ReadyStep
from data_service.loader.replay import Piece
from data_service.manifest import ShardRef


class StandIn:
    """The records of the worker's last step; read again when they are needed, since a script may write into its
    batches."""

    def __init__(self, seed: int, shuffle: bool) -> None:
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._pieces: tuple[Piece, ...] = ()
        self._count = 0
        self._read: tuple[Columns, int] | None = None
        self.pattern = ""
        """Where a record can be found, for workers that have never had one."""

    def remember(self, epoch: int, step: ReadyStep) -> None:
        """The worker gets this one."""
        self._epoch, self._pieces, self._count, self._read = epoch, step.pieces, step.offer.samples, None

    def spare(self, total: int) -> int:
        """Samples that it can repeat in a step of this size; 0 if it has had none."""
        return min(self._count, total)

    def pattern_of(self, steps: Sequence[ReadyStep]) -> str:
        """What to tell the others; empty if they know one already."""
        return "" if self.pattern or not steps else json.dumps(astuple(steps[0].pieces[0].ref))

    def make(
        self, samples: int, sizes: Sequence[int], reader: Reader, columns: Callable[[Any], Columns]
    ) -> list[tuple[Columns, int]]:
        """Micro-batches of this many samples; with 0 they have some all the same, which do not count."""
        total = sum(sizes)
        if self._read is None:
            self._read = self._read_again(total, reader, columns)
        found, count = self._read
        parts = micro_batches(found, min(count, total), sizes)
        return [({name: array.copy() for name, array in part.items()}, some if samples else 0) for part, some in parts]

    def _read_again(self, total: int, reader: Reader, columns: Callable[[Any], Columns]) -> tuple[Columns, int]:
        pieces = self._pieces or (Piece(ShardRef(*json.loads(self.pattern)), 0, total),)
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
