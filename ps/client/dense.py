"""Named arrays, such as the parameters of a network, as rows of a dense table: blocks of at most 1024 numbers.

One after another in the order given, in one long row that is cut into blocks; the last block ends in zeros. Blocks
spread over pservers like any other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError, SettingError
from ps.spec import Optimizer, TableSpec

DIM = 1024
Array = NDArray[np.float32]


class Rowed(Protocol):
    """What is used of ``ps.client.client.Client``."""

    def pull(self, table: str, keys: Any, out: Array | None = None, *, insert: bool = True) -> Array:
        """Rows."""
        ...

    def first(self, table: str, keys: Any, values: Any) -> None:
        """Weights of rows that nobody has written yet."""
        ...


class Blocks:
    """Where each array lies."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dim: int = DIM) -> None:
        """``shapes``: the same names in the same order in all trainers."""
        if not 1 <= dim <= DIM:
            raise SettingError("dim", dim, f"must be from 1 to {DIM}")
        self.shapes = {name: tuple(int(one) for one in shape) for name, shape in shapes.items()}
        self.size = sum(math.prod(shape) for shape in self.shapes.values())
        """Numbers in all arrays."""
        if not self.size:
            raise SettingError("shapes", dict(self.shapes), "there must be a number in them")
        self.dim = min(dim, self.size)
        self.rows = -(-self.size // self.dim)
        self.keys = np.arange(self.rows, dtype=np.int64)

    def spec(self, table: str, optimizer: Optimizer) -> TableSpec:
        """The table that holds them."""
        return TableSpec(table, self.dim, optimizer, dense=True, rows=self.rows)

    def pack(self, arrays: Mapping[str, Any], out: Array | None = None) -> Array:
        """Rows, float32 ``(rows, dim)``. An array that is None counts as zeros. Raises ``PsError``."""
        if set(arrays) - set(self.shapes):
            raise PsError(f"dense parameters: {sorted(set(arrays) - set(self.shapes))} are not among those declared")
        rows = np.empty((self.rows, self.dim), np.float32) if out is None else out
        flat, at = rows.reshape(-1), 0
        for name, shape in self.shapes.items():
            value, size = arrays.get(name), math.prod(shape)
            if value is None:
                flat[at : at + size] = 0
            else:
                given = np.asarray(value)
                if given.shape != shape:
                    raise PsError(f"dense parameter {name} has the shape {given.shape}, declared was {shape}")
                flat[at : at + size] = given.reshape(-1)
            at += size
        flat[at:] = 0
        return rows

    def unpack(self, rows: Array) -> dict[str, Array]:
        """Views of rows, by name."""
        flat, at, found = rows.reshape(-1), 0, {}
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            found[name] = flat[at : at + size].reshape(shape)
            at += size
        return found


def first(client: Rowed, table: str, blocks: Blocks, arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Give first values; whoever is first decides, block by block. What they are then, the same for all."""
    client.first(table, blocks.keys, blocks.pack(arrays))
    return pull_dense(client, table, blocks)


def pull_dense(client: Rowed, table: str, blocks: Blocks) -> dict[str, Array]:
    """The present values."""
    return blocks.unpack(client.pull(table, blocks.keys, insert=False))


def part(blocks: Blocks, grads: Mapping[str, Any]) -> tuple[NDArray[np.int64], Array]:
    """Keys and gradients, for ``Client.push``."""
    return blocks.keys, blocks.pack(grads)
