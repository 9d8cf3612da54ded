"""Access to data files: local folders, and whatever fsspec or pyarrow supports (``s3://…``, ``gs://…``, ``hdfs://…``).

fsspec, and the package that it needs for a protocol, are only imported for URLs. If fsspec lacks a package for S3 or
Google Cloud Storage, pyarrow's client is used; for HDFS fsspec does that itself.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from edl.errors import DataError, EdlError, SettingError

if TYPE_CHECKING:
    import pyarrow as pa

FilePath = str | os.PathLike[str]
FilePaths = FilePath | Sequence[FilePath]
"""A path, pattern or URL, or several."""
PYARROW_CLIENTS = {"s3": "S3FileSystem", "gs": "GcsFileSystem", "gcs": "GcsFileSystem"}


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that a pattern matches."""

    path: str
    """Absolute path or URL."""
    size_bytes: int
    named: bool
    """True if matched by name or glob; False if found in a folder that was named."""


def texts_of(paths: FilePaths) -> tuple[str, ...]:
    """A path, or several, as texts."""
    several: Sequence[FilePath] = [paths] if isinstance(paths, str | os.PathLike) else paths
    return tuple(os.fspath(one) for one in several)


def is_url(path: str) -> bool:
    """True if the path is for fsspec. ``file://`` counts as local."""
    return "://" in path and not path.startswith("file://")


class RemoteFilesUnreachable(ConnectionError):
    """A client of remote files failed, for another reason than a missing file. Clients raise exceptions of all types:
    pyarrow and requests even ``OSError`` without a number, as readers do for damaged content."""


@contextlib.contextmanager
def _client_errors(*unchanged: type[Exception]) -> Iterator[None]:
    """Context for calls of a client of remote files. Turns its exceptions into ``RemoteFilesUnreachable``, except
    ``FileNotFoundError``, errors of edl, and those of the types ``unchanged``."""
    kept: tuple[type[Exception], ...] = (FileNotFoundError, EdlError, MemoryError, *unchanged)
    try:
        yield
    except kept:
        raise
    except Exception as error:
        raise RemoteFilesUnreachable(str(error) or type(error).__name__) from error


class RemoteFile:
    """A file of an fsspec client, for ``pyarrow.PythonFile``. Raises what ``_client_errors`` does."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, length: int = -1) -> bytes:
        """Read up to ``length`` bytes."""
        with _client_errors():
            return bytes(self._file.read(length))

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to another position, and return it."""
        with _client_errors():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """The position."""
        return int(self._file.tell())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """True if the file is closed."""
        return bool(self._file.closed)


class Storage:
    """Finds and opens files. Thread-safe; keeps no files open."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        self._clients: dict[str, Any] = {}

    def find(self, pattern: str) -> Iterator[FoundFile]:
        """Find the files of one pattern: a file, a folder with everything below it, or a glob (``*``, ``?``, ``[…]``,
        ``**``).

        Yields files one by one, unordered, so that ten million need no memory. In folders, names that begin with a dot
        or an underscore are skipped. Raises ``DataError`` if a name without wildcards does not exist.
        """
        return self._find_remote(pattern) if is_url(pattern) else _find_local(pattern.removeprefix("file://"))

    def open(self, path: str, *, mapped: bool = False) -> pa.NativeFile:
        """Open a file for random access. ``mapped``: memory-map a local file. Raises ``OSError``."""
        import pyarrow as pa

        if is_url(path):
            system, inside = self._connect(path)
            with _client_errors():
                return pa.PythonFile(RemoteFile(system.open(inside, "rb")), mode="r")
        return pa.memory_map(path) if mapped else pa.OSFile(path)

    def read(self, path: str, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)``; fewer at the end of the file. Raises ``OSError``."""
        if end <= begin:
            return b""
        if is_url(path):
            system, inside = self._connect(path)
            end = min(end, self.size(path))
            with _client_errors():
                return bytes(system.cat_file(inside, start=begin, end=end)) if begin < end else b""
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            parts: list[bytes] = []
            while begin < end and (part := file.read(end - begin)):
                parts.append(part)
                begin += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, path: str) -> int:
        """File size in bytes. Raises ``OSError``."""
        if is_url(path):
            system, inside = self._connect(path)
            with _client_errors():
                return int(system.size(inside))
        return os.stat(path).st_size

    def stamp(self, path: str) -> tuple[int, ...]:
        """A value that changes when a local file is rewritten. Constant for remote files, which would be slow to
        check."""
        if is_url(path):
            return ()
        status = os.stat(path)
        return (status.st_size, status.st_mtime_ns, status.st_ino)

    def _find_remote(self, pattern: str) -> Iterator[FoundFile]:
        system, inside = self._connect(pattern)
        system.invalidate_cache()
        if re.search(r"[*\[]", pattern) or ("?" in pattern and not pattern.startswith("http")):
            for name, entry in system.glob(inside, detail=True).items():
                if entry["type"] == "file":
                    yield FoundFile(system.unstrip_protocol(name), int(entry["size"] or 0), named=True)
            return
        try:
            entry = system.info(inside)
        except FileNotFoundError:
            raise _not_there(pattern) from None
        if entry["type"] == "file":
            yield FoundFile(pattern, int(entry["size"] or 0), named=True)
            return
        for folder, folders, names in system.walk(inside, detail=True):
            for name in [name for name in folders if _hidden(name)]:
                del folders[name]
            for name, entry in names.items():
                if name and not _hidden(name):
                    path = system.unstrip_protocol(f"{folder.rstrip('/')}/{name}")
                    yield FoundFile(path, int(entry["size"] or 0), named=False)

    def _connect(self, url: str) -> tuple[Any, str]:
        protocol = url.partition("://")[0]
        try:
            core = importlib.import_module("fsspec.core")
        except ImportError:
            advice = "Run: pip install 'edl[remote]'"
            raise SettingError("files", url, "a URL needs the package fsspec, which is not installed", advice) from None
        try:
            with _client_errors(ImportError, ValueError):
                system, inside = core.url_to_fs(url, **self._options)
        except ImportError as error:
            if protocol in PYARROW_CLIENTS:
                if protocol not in self._clients:
                    with _client_errors():
                        self._clients[protocol] = self._pyarrow_client(protocol)
                return self._clients[protocol], url.partition("://")[2]
            raise SettingError("files", url, f"{protocol}:// needs a package that is not installed ({error})") from None
        except ValueError as error:
            raise SettingError("files", url, str(error), "Use a path, or a URL that fsspec supports") from None
        return system, str(inside)

    def _pyarrow_client(self, protocol: str) -> Any:
        from pyarrow import fs

        module = importlib.import_module("fsspec.implementations.arrow")
        client = module.ArrowFSWrapper(getattr(fs, PYARROW_CLIENTS[protocol])(**self._options))
        client.cat_file = partial(client.cat_file, seekable=True)  # otherwise it cannot read the first part of a file
        return client


def _find_local(pattern: str) -> Iterator[FoundFile]:
    path = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(path):
        yield from _below(path, ())
    elif os.path.exists(path):
        yield FoundFile(path, os.stat(path).st_size, named=True)
    elif not re.search(r"[*?\[]", pattern):
        raise _not_there(path)
    else:
        yield from _matching("/", path.strip("/").split("/"))


def _below(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[FoundFile]:
    """All files below a folder. Symbolic-link loops are not followed."""
    with _while_it_exists():
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        for entry in _entries(folder):
            if _hidden(entry.name):
                continue
            if entry.is_dir():
                yield from _below(entry.path, (*above, here))
            else:
                yield from _file(entry, named=False)


def _matching(folder: str, parts: list[str]) -> Iterator[FoundFile]:
    """Files below a folder that match the parts of a glob, one part per level."""
    part, *rest = parts
    if not re.search(r"[*?\[]", part):
        path = os.path.join(folder, part)
        if rest and os.path.isdir(path):
            yield from _matching(path, rest)
        elif not rest and os.path.isfile(path):
            with _while_it_exists():
                yield FoundFile(path, os.stat(path).st_size, named=True)
        return
    if part == "**" and rest:
        yield from _matching(folder, rest)  # "**" matches no folder, or this one and more
    matches = re.compile(fnmatch.translate("*" if part == "**" else part)).match
    for entry in _entries(folder):
        if not matches(entry.name) or (entry.name.startswith(".") and not part.startswith(".")):
            continue
        if part == "**" and entry.is_dir(follow_symlinks=False):
            yield from _matching(entry.path, parts)
        elif rest and part != "**" and entry.is_dir():
            yield from _matching(entry.path, rest)
        elif not rest:
            yield from _file(entry, named=True)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    with _while_it_exists(), os.scandir(folder) as entries:
        yield from entries


def _file(entry: os.DirEntry[str], *, named: bool) -> Iterator[FoundFile]:
    with _while_it_exists():
        if entry.is_file():
            yield FoundFile(entry.path, entry.stat().st_size, named=named)


def _while_it_exists() -> contextlib.AbstractContextManager[None]:
    """Ignore files that others rename or delete during the scan."""
    return contextlib.suppress(FileNotFoundError)


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _not_there(path: str) -> DataError:
    return DataError(f"{path}: no such file or folder. Check the path; every node must see it under the same name")
