"""Recipes: what a conversion does to each table. Columns can be left out, filled and packed side by side."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from data_service.formats.arrays import filled, from_numpy, to_numpy
from data_service.formats.lines import column_types
from data_service.scan import SHARD_RECORDS
from edl.errors import DataError, SettingError, UnsupportedData

FILE_BYTES = 256 << 20
COMPRESSIONS = ("none", "lz4", "zstd")


@dataclass(frozen=True, slots=True)
class Pack:
    """Columns packed into one of fixed-size lists, which is read as a two-dimensional array."""

    name: str
    columns: tuple[str, ...]
    """Names or globs of the columns."""
    type: str = ""
    """Name of the pyarrow type to convert to; default: the common type of all columns."""

    @classmethod
    def of(cls, text: str) -> Pack:
        """Parse a pack in the form ``NAME[:TYPE]=COLUMN[,…]``. Raises ``SettingError``."""
        head, _, columns = text.partition("=")
        name, _, kind = head.partition(":")
        if not name or not all(columns.split(",")):
            advice = "For example dense:float32=I1,I2 or cat=C*"
            raise SettingError("--pack", text, "must be NAME[:TYPE]=COLUMN[,…]", advice)
        if kind:
            column_types({name: kind})
        return cls(name, tuple(columns.split(",")), kind)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the output: equal inputs and recipes give equal bytes."""

    columns: tuple[str, ...] | None = None
    """Columns to keep besides packed ones; default: all."""
    packs: tuple[Pack, ...] = ()
    fill: Mapping[str, Any] = field(default_factory=dict)
    """Replacement for nulls, by name or glob of a column."""
    compression: str = "none"
    """``none``, the only one that can be memory-mapped without copying; ``lz4``; ``zstd``."""
    shard_records: int = SHARD_RECORDS
    """Records per batch, which becomes a shard when the files are read; at least 1."""
    file_bytes: int = FILE_BYTES
    """Approximate input bytes per output file; at least 1."""
    seed: int | None = None
    """If set, shuffles the records within each file."""

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            raise SettingError("--compression", self.compression, f"must be one of {', '.join(COMPRESSIONS)}")
        for name, value in (("shard_records", self.shard_records), ("file_bytes", self.file_bytes)):
            if value < 1:
                raise SettingError(name, value, "must be at least 1")

    def needed(self, names: list[str] | None) -> list[str] | None:
        """The columns to read, out of ``names``; ``None`` for all, or if ``names`` is None and globs are used."""
        if self.columns is None:
            return None
        packed = [one for pack in self.packs for one in pack.columns]
        if names is None:
            plain = not any(_is_glob(one) for one in packed)
            return list(dict.fromkeys([*self.columns, *packed])) if plain else None
        return list(dict.fromkeys([*self.columns, *(one for pack in self.packs for one in _chosen(pack, names))]))

    def applied(self, table: pa.Table, file: str) -> pa.Table:
        """Apply to a table: kept columns in order, then packed ones. Raises ``DataError`` and ``SettingError``."""
        packed = {pack.name: _chosen(pack, table.column_names) for pack in self.packs}
        gone = {name for names in packed.values() for name in names}
        kept = self.columns if self.columns is not None else [one for one in table.column_names if one not in gone]
        for name in kept:
            if name not in table.column_names:
                text = f"no such column; available are {', '.join(table.column_names)}"
                raise SettingError("--columns", name, text)
        columns = {name: self._whole(name, table.column(name), file) for name in kept}
        for pack in self.packs:
            if pack.name in columns:
                raise SettingError("--pack", pack.name, "is also the name of a kept column", "Use another name")
            parts = {name: self._whole(name, table.column(name), file) for name in packed[pack.name]}
            columns[pack.name] = _packed(pack, parts, file)
        return pa.table(columns)

    def _whole(self, name: str, column: pa.ChunkedArray, file: str) -> pa.ChunkedArray:
        """Fill nulls and decode dictionaries, which would have to be the same in all batches of a file."""
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        value = next((value for pattern, value in self.fill.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if value is None:
            return column
        try:
            return filled(name, column, value)
        except UnsupportedData as error:
            raise UnsupportedData(f"{file}: {error}") from None


def parsed_fill(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``COLUMN=VALUE``; values are numbers if possible, else text. Raises ``SettingError``."""
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise SettingError("--fill", text, "must be COLUMN=VALUE", "For example I*=0")
        found[name] = value
        for kind in (int, float):
            try:
                found[name] = kind(value)
                break
            except ValueError:
                continue
    return found


def _packed(pack: Pack, parts: dict[str, pa.ChunkedArray], file: str) -> pa.Array:
    kinds = {name: part.type for name, part in parts.items()}
    first = next(iter(kinds))
    kind = column_types({pack.name: pack.type})[pack.name] if pack.type else kinds[first]
    for name, part in parts.items():
        if part.type != kind and not pack.type:
            text = f"{first} is {kinds[first]} and {name} is {part.type}"
            raise SettingError("--pack", pack.name, text, f"Name a type: {pack.name}:float32=…")
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise SettingError("--pack", pack.name, f"{name} is {kind}; only numbers can be packed")
        if part.null_count and not pa.types.is_floating(part.type):
            advice = f"Give a replacement: --fill {name}=0"
            raise DataError(f"{file}: column {name} of --pack {pack.name} has {part.null_count} nulls. {advice}")
        if part.type != kind:
            try:
                parts[name] = part.cast(kind)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(f"{file}: column {name} cannot be converted to {kind}: {error}") from None
    arrays = list(to_numpy(pa.table(parts)).values())
    block = np.empty((len(arrays[0]), len(arrays)), kind.to_pandas_dtype())
    for index, array in enumerate(arrays):
        block[:, index] = array
    return from_numpy(block)


def _chosen(pack: Pack, names: list[str]) -> list[str]:
    found: list[str] = []
    for pattern in pack.columns:
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)] if _is_glob(pattern) else [pattern]
        if not matching or matching[0] not in names:
            raise SettingError("--pack", f"{pack.name}={pattern}", f"no such column; available are {', '.join(names)}")
        found += matching
    if len(set(found)) < len(found):
        raise SettingError("--pack", f"{pack.name}={','.join(pack.columns)}", "names a column twice")
    return found


def _is_glob(text: str) -> bool:
    return any(one in text for one in "*?[")
