"""Common base of file readers: caching of open files, checking that columns agree, errors with advice."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Generic, TypeVar

import pyarrow as pa

from data_service.filesystems import Storage
from data_service.formats.options import FormatOptions
from data_service.manifest import ShardRef
from edl.errors import DataError, EdlError, UnreachableData

T = TypeVar("T")
GONE = "Restore it, or scan again without it"
DAMAGED = "Replace it by an intact copy, or remove it and scan again"
CHANGED = "It was changed after the scan. Restart the job; replace files by renaming, never in place"
UNREACHED = "Check the mounts, permissions and network of this node; no data is skipped because of it"
UNLIKE = "Give the files the same columns, for example with python -m data_service convert, or select columns"


@dataclass(frozen=True, slots=True)
class FileSplit:
    """The range of one shard, as in ``ShardRef``."""

    begin: int
    end: int
    records: int


@dataclass
class OpenFile(Generic[T]):
    """An open file, and a lock for handles that are not thread-safe."""

    handle: T
    schema: pa.Schema
    """Schema of what is read: the selected columns in order."""
    stamp: tuple[int, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)


class OpenFiles(Generic[T]):
    """A cache of the most recently used files. A file that has been rewritten is reopened."""

    def __init__(
        self, limit: int, stamp: Callable[[str], tuple[int, ...]], opener: Callable[[str], OpenFile[T]]
    ) -> None:
        self._limit = limit
        self._stamp = stamp
        self._opener = opener
        self._files: OrderedDict[str, OpenFile[T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> OpenFile[T]:
        """The open file. Two threads may open the same file at once, rather than wait for each other."""
        stamp = self._stamp(path)
        with self._lock:
            found = self._files.get(path)
            if found is not None and found.stamp == stamp:
                self._files.move_to_end(path)
                return found
        opened = self._opener(path)
        with self._lock:
            self._files[path] = opened
            self._files.move_to_end(path)
            while len(self._files) > self._limit:
                self._files.popitem(last=False)  # users still hold a reference; the last one closes it
        return opened

    def clear(self) -> None:
        """Close all cached files."""
        with self._lock:
            self._files.clear()

    def __len__(self) -> int:
        return len(self._files)


class FileReader(ABC, Generic[T]):
    """A ``FormatReader`` of files. ``T``: what the format keeps for an open file."""

    format: ClassVar[str]
    unlike: ClassVar[str] = UNLIKE
    """Advice for files whose columns differ."""

    def __init__(self, columns: tuple[str, ...] | None, storage: Storage, options: FormatOptions) -> None:
        self.columns = columns
        self.storage = storage
        self.options = options
        self.open_files: OpenFiles[T] = OpenFiles(options.open_files, storage.stamp, self._open)
        self._first: tuple[str, pa.Schema] | None = None
        self._first_lock = threading.Lock()

    def read(self, ref: ShardRef) -> pa.Table:
        """Read exactly the records of a shard; see ``FormatReader.read``."""
        with file_errors(ref.file, shard=ref):
            opened = self.open_files.get(ref.file)
            _check_size(ref, opened.stamp)
            table = self._read(opened, ref)
            return self._conforming(table, opened.schema, ref.file)

    def pieces(self, ref: ShardRef) -> Iterator[pa.Table]:
        """Read the same records as a sequence of tables that need little memory, however large the shard."""
        yield self.read(ref)

    def schema(self, file: str) -> pa.Schema:
        """Schema of the tables read from a file. Raises ``DataError``."""
        with file_errors(file):
            return self.open_files.get(file).schema

    def split(self, file: str, size_bytes: int, shard_records: int, shard_bytes: int) -> list[FileSplit]:
        """The shards of a non-empty file. Raises ``DataError``."""
        with file_errors(file):
            return list(self._split(file, size_bytes, shard_records, shard_bytes))

    def close(self) -> None:
        """Close open files; see ``FormatReader.close``."""
        self.open_files.clear()

    def _open(self, file: str) -> OpenFile[T]:
        stamp = self.storage.stamp(file)
        handle, schema = self._enter(file)
        return OpenFile(handle, self._agreed(file, schema), stamp)

    def _agreed(self, file: str, schema: pa.Schema) -> pa.Schema:
        """The columns to read from a file, which are the same for all files. Raises ``DataError``."""
        if self.columns is not None:
            for name in self.columns:
                if name not in schema.names:
                    raise DataError(f"{file}: has no column {name}; available are {', '.join(schema.names)}")
            schema = pa.schema([schema.field(name) for name in self.columns])
        if len(set(schema.names)) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise DataError(f"{file}: has two columns named {twice}. Rename one")
        with self._first_lock:
            if self._first is None:
                self._first = (file, schema.remove_metadata())
            first, agreed = self._first
        difference = _difference(schema, agreed, first)
        if difference:
            raise DataError(f"{file}: {difference}. {self.unlike}")
        return agreed

    def _conforming(self, table: pa.Table, schema: pa.Schema, file: str) -> pa.Table:
        """Put the columns into the order of the schema. Raises ``DataError`` if they differ."""
        if table.schema.equals(schema):
            return table
        difference = _difference(table.schema, schema, "others")
        if difference:
            raise DataError(f"{file}: {difference}. {self.unlike}")
        return pa.Table.from_arrays([table.column(name) for name in schema.names], schema=schema)

    @abstractmethod
    def _enter(self, file: str) -> tuple[T, pa.Schema]:
        """Open a file; also return the schema of all its columns."""

    @abstractmethod
    def _read(self, opened: OpenFile[T], ref: ShardRef) -> pa.Table:
        """Read the shard with the columns of ``opened.schema``, in any order."""

    @abstractmethod
    def _split(self, file: str, size_bytes: int, shard_records: int, shard_bytes: int) -> Iterable[FileSplit]: ...


def grouped(batches: Iterable[int], shard_records: int, *, split: bool) -> Iterator[FileSplit]:
    """Split a file into shards of at most ``shard_records``, given its batch sizes: small batches are joined; with
    ``split``, large ones are divided."""
    begin = end = 0
    for size in batches:
        if end > begin and end - begin + size > shard_records:
            yield FileSplit(begin, end, end - begin)
            begin = end
        end += size
        if split and size > shard_records:
            yield from _equal_parts(begin, end, shard_records)
            begin = end
    if end > begin:
        yield FileSplit(begin, end, end - begin)


def _equal_parts(begin: int, end: int, most: int) -> Iterator[FileSplit]:
    parts = -(-(end - begin) // most)
    edges = [begin + (end - begin) * part // parts for part in range(parts + 1)]
    for low, high in pairwise(edges):
        yield FileSplit(low, high, high - low)


def _check_size(ref: ShardRef, stamp: tuple[int, ...]) -> None:
    """Raise ``DataError`` for a local file whose size has changed since it was listed."""
    if stamp and ref.size_bytes >= 0 and stamp[0] != ref.size_bytes:
        has = f"has {stamp[0]:,} bytes, but had {ref.size_bytes:,} when it was listed"
        raise DataError(f"{ref.file}: {has}. {CHANGED}")


def checked_range(ref: ShardRef, count: int, what: str) -> None:
    """Raise ``DataError`` if the shard is not within the file."""
    if not 0 <= ref.begin <= ref.end <= count:
        raise DataError(f"{ref.file}: has {count} {what}, which does not include shard {_name(ref)}. {CHANGED}")


@contextlib.contextmanager
def file_errors(file: str, shard: ShardRef | None = None) -> Iterator[None]:
    """Context that turns any problem with the file into a ``DataError`` that names it."""
    where = f"{file}, shard {_name(shard)}" if shard is not None else file
    try:
        yield
    except DataError as error:
        text = str(error)
        if text.startswith(where) or not text.startswith(file):
            raise
        raise DataError(where + text[len(file) :]) from error
    except FileNotFoundError:
        raise DataError(f"{where}: the file is missing. {GONE}") from None
    except (EdlError, MemoryError):
        raise
    except Exception as error:
        if not isinstance(error, OSError | EOFError | ValueError | pa.ArrowException):
            raise
        if is_out_of_reach(error):
            raise UnreachableData(f"{where}: cannot be reached: {short(error)}. {UNREACHED}") from error
        raise DataError(f"{where}: cannot be read: {short(error)}. {DAMAGED}") from error


def is_out_of_reach(error: BaseException) -> bool:
    """True if the machine or network is at fault, not the file's content: the error has an errno, or comes from a
    client of remote files (``RemoteFilesUnreachable``). pyarrow also raises ``OSError`` for damaged content, but
    without an errno."""
    return isinstance(error, OSError) and (bool(error.errno) or isinstance(error, TimeoutError | ConnectionError))


def _name(ref: ShardRef) -> str:
    return f"{ref.index} [{ref.begin}, {ref.end})"


def short(error: BaseException) -> str:
    """An error as one line of at most 300 characters, without a final full stop."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _difference(schema: pa.Schema, agreed: pa.Schema, first: str) -> str:
    """The first difference between two schemas as text; empty if they agree. ``first``: the file compared with."""
    for name in agreed.names:
        if name not in schema.names:
            return f"has no column {name}, which {first} has"
        mine, theirs = schema.field(name).type, agreed.field(name).type
        if mine != theirs:
            return f"column {name} is {mine}, but {theirs} in {first}"
    for name in schema.names:
        if name not in agreed.names:
            return f"has a column {name}, which {first} does not have"
    return ""
