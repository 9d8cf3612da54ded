"""Named arrays, such as a network's parameters, stored as rows of a dense table: blocks of at most 1024 numbers.

The arrays are concatenated in the given order and divided into blocks; the last block is padded with zeros. Blocks are
distributed over pservers like any other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError, SettingError
from ps.spec import DenseParameter, Optimizer, TableSpec

DIM = 1024
Array = NDArray[np.float32]


class Rowed(Protocol):
    """The methods of ``ps.client.client.PsClient`` used here."""

    def pull(self, table: str, keys: Any, out: Array | None = None, *, insert: bool = True) -> Array:
        """Pull the rows of keys, in order, into ``out`` if given. ``insert``: keys without a row get one."""
        ...

    def first(self, table: str, keys: Any, values: Any) -> None:
        """Set the weights of keys that have no row yet."""
        ...


class DenseLayout:
    """The layout of named arrays in the rows of a dense table."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dim: int = DIM) -> None:
        """``shapes``: must have the same names in the same order in all trainers. Raises ``SettingError`` for a bad
        ``dim`` or if there are no numbers at all."""
        if not 1 <= dim <= DIM:
            raise SettingError("dim", dim, f"must be from 1 to {DIM}")
        self.shapes = {name: tuple(int(one) for one in shape) for name, shape in shapes.items()}
        self.size = sum(math.prod(shape) for shape in self.shapes.values())
        """Number of elements in all arrays."""
        if not self.size:
            raise SettingError("shapes", dict(self.shapes), "at least one array must have an element")
        self.dim = min(dim, self.size)
        self.rows = -(-self.size // self.dim)
        self.keys = np.arange(self.rows, dtype=np.int64)

    def spec(self, table: str, optimizer: Optimizer) -> TableSpec:
        """The table definition for these arrays."""
        parameters = tuple(DenseParameter(name, shape) for name, shape in self.shapes.items())
        return TableSpec(table, self.dim, optimizer, dense=True, rows=self.rows, parameters=parameters)

    def pack(self, arrays: Mapping[str, Any], out: Array | None = None) -> Array:
        """Pack arrays into rows, float32 ``(rows, dim)``. None counts as zeros. Raises ``PsError`` for unknown names or
        other shapes."""
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
                    raise PsError(f"dense parameter {name} has shape {given.shape}, but was declared with {shape}")
                flat[at : at + size] = given.reshape(-1)
            at += size
        flat[at:] = 0
        return rows

    def unpack(self, rows: Array) -> dict[str, Array]:
        """Views into the rows, by array name."""
        flat, at, found = rows.reshape(-1), 0, {}
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            found[name] = flat[at : at + size].reshape(shape)
            at += size
        return found


def first(client: Rowed, table: str, blocks: DenseLayout, arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Set initial values; for each block the first trainer wins. Returns the resulting values, the same for all
    trainers."""
    client.first(table, blocks.keys, blocks.pack(arrays))
    return pull_dense(client, table, blocks)


def pull_dense(client: Rowed, table: str, blocks: DenseLayout) -> dict[str, Array]:
    """Pull the current values by array name."""
    return blocks.unpack(client.pull(table, blocks.keys, insert=False))


def part(blocks: DenseLayout, grads: Mapping[str, Any]) -> tuple[NDArray[np.int64], Array]:
    """Keys and packed gradients, as ``PsClient.push`` takes them."""
    return blocks.keys, blocks.pack(grads)
