"""Options for reading a data set's files, the same for scanning, local reading and remote readers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from data_service.manifest import LINE_FORMATS
from edl.errors import SettingError

SUFFIXES: Mapping[str, str] = {
    ".arrow": "ipc",
    ".arrows": "ipc",
    ".ipc": "ipc",
    ".feather": "ipc",
    ".parquet": "parquet",
    ".parq": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".text": "text",
}
"""Format by file name suffix."""
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
"""Compression by suffix, after that of a line format: such a file is read as a whole because it cannot be split."""

DELIMITERS = {"tab": "\t", "\\t": "\t", "semicolon": ";"}
"""Delimiters of CSV that have names, for command lines in which they cannot be written."""
_YES, _NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0")

ReadFunction = Callable[[str, int, int], Any]
"""``(file, begin, end)`` to a ``pyarrow.Table``, a list of dicts, or a dict of arrays or lists."""
ShardsFunction = Callable[[str], Iterable[tuple[int, int, int]]]
"""``file`` to its shards: ``(begin, end, records)``, with records -1 if unknown. The read function gets begin and end
unchanged; their meaning is up to the two functions."""


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """How to read the files. All values can be expressed in JSON, functions as ``"module:function"``. Raises
    ``SettingError``."""

    types: Mapping[str, str] = field(default_factory=dict)
    """CSV and JSON lines: name of a column's pyarrow type, such as ``float32``. Others are inferred from the first
    lines of some files, so set them if an early value looks like another type: ``3`` in a column of ``3.5``."""
    delimiter: str = ""
    """CSV: one character. Default: a tab for ``.tsv`` files, otherwise a comma."""
    quote: str = '"'
    """CSV: one character; ``""`` if quotes are ordinary characters."""
    quoted_newlines: bool = False
    """CSV: values may contain newlines. Each file is then one shard, because it cannot be split."""
    header: bool = True
    """CSV: True if each file begins with the names of its columns."""
    names: tuple[str, ...] = ()
    """CSV without header: the names of the columns."""
    read: ReadFunction | str | None = None
    """``format="user"``: the function that reads a shard."""
    shards: ShardsFunction | str | None = None
    """``format="user"``: the function that lists a file's shards. By default a file is one shard, from 0 to its size in
    bytes."""
    open_files: int = 16
    """Most files that a reader keeps open, at least 1."""

    def __post_init__(self) -> None:
        for name, value, least in (("delimiter", self.delimiter, 0), ("quote", self.quote, 0)):
            if not least <= len(value.encode()) <= 1:
                raise SettingError(name, repr(value), "must be one ASCII character, or empty")
        if self.header and self.names:
            raise SettingError(
                "names", ",".join(self.names), "is only for files without a header", "Set header=False as well"
            )
        if self.open_files < 1:
            raise SettingError("open_files", self.open_files, "must be at least 1")

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> FormatOptions:
        """Create from names and values as in ``parsed``. Raises ``SettingError``."""
        return cls(**cls.parsed(plain))

    @classmethod
    def parsed(cls, plain: Mapping[str, Any]) -> dict[str, Any]:
        """The values of some options by name, from JSON types or text: ``types=a:float32,b:int64``, ``names=a,b``,
        ``header=false``.

        Raises ``SettingError`` for unknown names and invalid values.
        """
        known = {one.name for one in fields(cls)}
        for name in plain:
            if name not in known:
                raise SettingError(name, plain[name], f"no such option; available are {', '.join(sorted(known))}")
        return {name: _parsed(name, value) for name, value in plain.items()}

    def given(self) -> dict[str, Any]:
        """The options that differ from the defaults, by name."""
        usual = FormatOptions()
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if value != getattr(usual, name)}

    def plain(self) -> dict[str, Any]:
        """The options that differ from the defaults, for JSON. Raises ``SettingError`` for a function that is not given
        by name."""
        differing = self.given()
        for name, value in differing.items():
            if callable(value):
                advice = f'Set it as text: {name}="package.module:{getattr(value, "__name__", "function")}"'
                raise SettingError(name, value, "a function cannot be sent to another process", advice)
            if isinstance(value, Mapping | tuple):
                differing[name] = dict(value) if isinstance(value, Mapping) else list(value)
        return differing

    def resolved(self) -> FormatOptions:
        """A copy in which functions given by name are imported. Raises ``SettingError`` if there is no such
        function."""
        return replace(self, read=_function("read", self.read), shards=_function("shards", self.shards))


def format_of(file: str) -> str:
    """Format by a file's name; empty if unknown."""
    name = file.lower().rpartition("/")[2]
    for packed in PACKED:
        name = name.removesuffix(packed)
    kind = SUFFIXES.get(name[name.rfind(".") :], "") if "." in name else ""
    return "" if packing_of(file) and kind not in LINE_FORMATS else kind


def packing_of(file: str) -> str:
    """pyarrow's name of a file's compression, by its suffix; empty if there is none."""
    return next((codec for suffix, codec in PACKED.items() if file.lower().endswith(suffix)), "")


def check_function_name(setting: str, given: str) -> None:
    """Raise ``SettingError`` unless the text has the form ``package.module:function``. Imports nothing."""
    module, colon, function = given.partition(":")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise SettingError(setting, repr(given), "is not the name of a function", "Write package.module:function")


def truth(name: str, value: str) -> bool:
    """A setting that is on or off, from text. Raises ``SettingError``."""
    if value.lower() not in (*_YES, *_NO):
        raise SettingError(name, value, "must be yes or no")
    return value.lower() in _YES


def _parsed(name: str, value: Any) -> Any:
    if name == "names":
        return tuple(value.split(",") if isinstance(value, str) else value)
    if not isinstance(value, str):
        return value
    match name:
        case "types":
            pairs = [part.rpartition(":") for part in value.split(",")]
            if not all(column and kind for column, _, kind in pairs):
                raise SettingError(name, value, "must be COLUMN:TYPE[,…]", "For example types=price:float32")
            return {column.strip(): kind.strip() for column, _, kind in pairs}
        case "header" | "quoted_newlines":
            return truth(name, value)
        case "open_files":
            if not value.isdecimal():
                raise SettingError(name, value, "must be a number")
            return int(value)
        case "delimiter":
            return DELIMITERS.get(value, value)
        case _:
            return value


def _function(name: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    module, _, attribute = given.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(name, given, f"cannot be imported ({error})", "Use package.module:function") from None
    if not callable(found):
        raise SettingError(name, given, "is not a function")
    return found


Options = FormatOptions
"""The name of ``FormatOptions`` in scripts."""
