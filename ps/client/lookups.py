"""Rows of several tables for a script's layers: in one request to each pserver, each distinct key once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ps.client.dedup import DistinctKeys

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]
Wanted = tuple[str, Keys]
"""A table, and keys of any shape."""


class Puller(Protocol):
    """The method of ``ps.client.client.PsClient`` used here."""

    def pull_distinct(
        self, wanted: Mapping[str, NDArray[Any]], *, insert: bool = True
    ) -> dict[str, tuple[DistinctKeys, Rows]]:
        """Pull the rows of the distinct keys of several tables."""
        ...


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows of some keys, each distinct key once."""

    keys: Keys
    """The distinct keys."""
    rows: Rows
    """Their rows, ``(distinct, dim)``."""
    index: NDArray[np.int32]
    """For each wanted key, in the shape of these, its row."""

    def spread(self) -> Rows:
        """A row for each wanted key, in new memory: ``(*shape, dim)``."""
        return np.take(self.rows, self.index, axis=0)


def lookup(client: Puller, wanted: Sequence[Wanted], *, insert: bool) -> list[FoundRows]:
    """Pull rows of several tables. A table may occur several times; its entries do not share memory then."""
    together: dict[str, list[int]] = {}
    for at, (table, _) in enumerate(wanted):
        together.setdefault(table, []).append(at)
    flat = {table: [wanted[at][1].reshape(-1) for at in places] for table, places in together.items()}
    keys = {table: some[0] if len(some) == 1 else np.concatenate(some) for table, some in flat.items()}
    pulled = client.pull_distinct(keys, insert=insert)
    found: dict[int, FoundRows] = {}
    for table, places in together.items():
        united, rows = pulled[table]
        index = np.arange(len(united.keys), dtype=np.int32) if united.inverse is None else united.inverse
        if len(places) == 1:
            found[places[0]] = FoundRows(united.keys, rows, index.reshape(wanted[places[0]][1].shape))
            continue
        ends = np.cumsum([wanted[at][1].size for at in places])[:-1]
        for at, part in zip(places, np.split(index, ends), strict=True):
            found[at] = _own(FoundRows(united.keys, rows, part.reshape(wanted[at][1].shape)))
    return [found[at] for at in range(len(wanted))]


def _own(one: FoundRows) -> FoundRows:
    """Only the rows of these keys: others must not get a gradient of zero here."""
    used, index = np.unique(one.index, return_inverse=True)
    return FoundRows(one.keys[used], one.rows[used], index.astype(np.int32).reshape(one.index.shape))
