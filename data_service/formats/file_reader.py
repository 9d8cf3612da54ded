"""What readers of files have in common: files kept open, columns that must agree, errors that say what to do."""

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

from data_service.filesystems import Storage, is_url
from data_service.formats.options import Options
from data_service.manifest import ShardRef
from edl.errors import DataError, EdlError, UnreachableData

T = TypeVar("T")
GONE = "Put it back, or scan again without it"
DAMAGED = "Replace it by a good copy, or take it out and scan again"
CHANGED = "It was changed after it was scanned: start the job anew, and replace files by renaming, never in place"
UNREACHED = "See to mounts, permissions and the network of this node; nothing is left out because of it"
UNLIKE = "Make the files alike, for example with python -m data_service convert, or name the columns to read"


@dataclass(frozen=True, slots=True)
class FileSplit:
    """One shard of a file, as in ``ShardRef``."""

    begin: int
    end: int
    records: int


@dataclass
class OpenFile(Generic[T]):
    """An open file, and a lock for what can be used by one thread at a time."""

    handle: T
    schema: pa.Schema
    """Of what is read from it: chosen columns, in their order."""
    stamp: tuple[int, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)


class OpenFiles(Generic[T]):
    """The files used last. One that has been written anew is opened anew."""

    def __init__(
        self, limit: int, stamp: Callable[[str], tuple[int, ...]], opener: Callable[[str], OpenFile[T]]
    ) -> None:
        self._limit = limit
        self._stamp = stamp
        self._opener = opener
        self._files: OrderedDict[str, OpenFile[T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> OpenFile[T]:
        """The file, opened if it is not. Two threads may both open one: others would have to wait too long."""
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
                self._files.popitem(last=False)  # whoever uses it still holds it; the last one closes it
        return opened

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._files.clear()

    def __len__(self) -> int:
        return len(self._files)


class FileReader(ABC, Generic[T]):
    """A ``Reader`` of files; ``T`` is what a format makes of an open file."""

    format: ClassVar[str]
    unlike: ClassVar[str] = UNLIKE
    """What to do about columns that differ."""

    def __init__(self, columns: tuple[str, ...] | None, storage: Storage, options: Options) -> None:
        self.columns = columns
        self.storage = storage
        self.options = options
        self.open_files: OpenFiles[T] = OpenFiles(options.open_files, storage.stamp, self._open)
        self._first: tuple[str, pa.Schema] | None = None
        self._first_lock = threading.Lock()

    def read(self, ref: ShardRef) -> pa.Table:
        """See ``Reader.read``."""
        with told(ref.file, shard=ref):
            opened = self.open_files.get(ref.file)
            _check_size(ref, opened.stamp)
            table = self._read(opened, ref)
            return self._conforming(table, opened.schema, ref.file)

    def pieces(self, ref: ShardRef) -> Iterator[pa.Table]:
        """The same records in tables that need little memory, however large the shard."""
        yield self.read(ref)

    def schema(self, file: str) -> pa.Schema:
        """Of the tables read from it. Raises ``DataError``."""
        with told(file):
            return self.open_files.get(file).schema

    def split(self, file: str, size_bytes: int, shard_records: int, shard_bytes: int) -> list[FileSplit]:
        """The shards of a file that is not empty. Raises ``DataError``."""
        with told(file):
            return list(self._split(file, size_bytes, shard_records, shard_bytes))

    def close(self) -> None:
        """See ``Reader.close``."""
        self.open_files.clear()

    def _open(self, file: str) -> OpenFile[T]:
        stamp = self.storage.stamp(file)
        handle, schema = self._enter(file)
        return OpenFile(handle, self._agreed(file, schema), stamp)

    def _agreed(self, file: str, schema: pa.Schema) -> pa.Schema:
        """The columns to read from it, which are those of all files."""
        if self.columns is not None:
            for name in self.columns:
                if name not in schema.names:
                    raise DataError(f"{file}: has no column {name}; there are {', '.join(schema.names)}")
            schema = pa.schema([schema.field(name) for name in self.columns])
        if len(set(schema.names)) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise DataError(f"{file}: has the column {twice} twice. Rename one")
        with self._first_lock:
            if self._first is None:
                self._first = (file, schema.remove_metadata())
            first, agreed = self._first
        difference = _difference(schema, agreed, first)
        if difference:
            raise DataError(f"{file}: {difference}. {self.unlike}")
        return agreed

    def _conforming(self, table: pa.Table, schema: pa.Schema, file: str) -> pa.Table:
        """The columns in the order of the schema."""
        if table.schema.equals(schema):
            return table
        difference = _difference(table.schema, schema, "others")
        if difference:
            raise DataError(f"{file}: {difference}. {self.unlike}")
        return pa.Table.from_arrays([table.column(name) for name in schema.names], schema=schema)

    @abstractmethod
    def _enter(self, file: str) -> tuple[T, pa.Schema]:
        """Open it; with all columns that it has."""

    @abstractmethod
    def _read(self, opened: OpenFile[T], ref: ShardRef) -> pa.Table:
        """The shard; with the columns of ``opened.schema``, in any order."""

    @abstractmethod
    def _split(self, file: str, size_bytes: int, shard_records: int, shard_bytes: int) -> Iterable[FileSplit]: ...


def grouped(batches: Iterable[int], shard_records: int, *, cut: bool) -> Iterator[FileSplit]:
    """Shards of at most ``shard_records`` from the sizes of a file's batches: small ones are joined, and large ones are
    cut if that is cheap."""
    begin = end = 0
    for size in batches:
        if end > begin and end - begin + size > shard_records:
            yield FileSplit(begin, end, end - begin)
            begin = end
        end += size
        if cut and size > shard_records:
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
    """Raises ``DataError`` for a local file that was written anew, or on, since it was listed."""
    if stamp and ref.size_bytes >= 0 and stamp[0] != ref.size_bytes:
        has = f"has {stamp[0]:,} bytes, and had {ref.size_bytes:,} when it was listed"
        raise DataError(f"{ref.file}: {has}. {CHANGED}")


def checked_range(ref: ShardRef, count: int, what: str) -> None:
    """Raises ``DataError`` if the shard is not within the file."""
    if not 0 <= ref.begin <= ref.end <= count:
        raise DataError(f"{ref.file}: has {count} {what}, shard {_name(ref)} is not within. {CHANGED}")


@contextlib.contextmanager
def told(file: str, shard: ShardRef | None = None) -> Iterator[None]:
    """Whatever goes wrong with the file comes out as a ``DataError`` that names it."""
    where = f"{file}, shard {_name(shard)}" if shard is not None else file
    try:
        yield
    except DataError as error:
        text = str(error)
        if text.startswith(where) or not text.startswith(file):
            raise
        raise DataError(where + text[len(file) :]) from error
    except FileNotFoundError:
        raise DataError(f"{where}: the file is gone. {GONE}") from None
    except (EdlError, MemoryError):
        raise
    except Exception as error:
        if not is_url(file) and not isinstance(error, OSError | EOFError | ValueError | pa.ArrowException):
            raise
        if is_out_of_reach(error, remote=is_url(file)):
            raise UnreachableData(f"{where}: cannot be reached: {short(error)}. {UNREACHED}") from error
        raise DataError(f"{where}: cannot be read: {short(error)}. {DAMAGED}") from error


def is_out_of_reach(error: BaseException, *, remote: bool = False) -> bool:
    """Whether the machine or the network is to blame, and not what is in the file: the system has given a number, or it
    is an error of a client of remote files. pyarrow calls damaged content ``OSError`` as well, without a number."""
    if isinstance(error, OSError):
        return bool(error.errno) or isinstance(error, TimeoutError | ConnectionError)
    return remote and not isinstance(error, EOFError | ValueError | pa.ArrowException)


def _name(ref: ShardRef) -> str:
    return f"{ref.index} [{ref.begin}, {ref.end})"


def short(error: BaseException) -> str:
    """An error in one line that is not too long, without the full stop at its end."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _difference(schema: pa.Schema, agreed: pa.Schema, first: str) -> str:
    """Empty if the two have the same columns; ``first`` is the file that the other ones are compared to."""
    for name in agreed.names:
        if name not in schema.names:
            return f"has no column {name}, which {first} has"
        mine, theirs = schema.field(name).type, agreed.field(name).type
        if mine != theirs:
            return f"column {name} is {mine}, in {first} it is {theirs}"
    for name in schema.names:
        if name not in agreed.names:
            return f"has a column {name}, which {first} has not"
    return ""
