"""``Files`` in an object store or anywhere else fsspec can reach: ``s3://bucket/folder``, ``gs://…``, ``memory://…``.

fsspec and the package for a protocol are only imported when such a URL is used.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from edl.adapters.files import PlainFiles
from edl.errors import SettingError
from edl.ports import FileEntry, Files

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "oss": "ossfs"}
"""Package that fsspec needs for each protocol."""
SETTING = "--checkpoint-dir"


def open_files(where: str) -> Files:
    """The ``Files`` for a path or a URL. Raises ``SettingError`` when the package for a URL is not installed."""
    protocol, separator, rest = where.partition("://")
    if not separator:
        return PlainFiles(where)
    if protocol == "file":
        return PlainFiles(rest)
    return RemoteFiles(where)


class RemoteFiles:
    """``Files`` through fsspec. Most object stores cannot rename, so a partial file may remain after a crash."""

    remote = True

    def __init__(self, url: str) -> None:
        self.where = url
        self._system, self._root = _connect(url)

    def path(self, name: str) -> str:
        """The URL of a name."""
        return f"{self.where.rstrip('/')}/{name}" if name else self.where

    def entries(self, folder: str = "") -> list[FileEntry]:
        """The direct content of a folder, sorted by name; empty when there is no such folder."""
        path = self._inside(folder)
        with _as_os_errors(self.path(folder)):
            self._system.invalidate_cache()  # other nodes write here too
            try:
                listed = self._system.ls(path, detail=True)
            except FileNotFoundError:
                return []
        if any(entry["name"].strip("/") == path.strip("/") and entry["type"] == "file" for entry in listed):
            if len(listed) == 1:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.path(folder))
            # else some stores keep an empty object of the folder's own name
            listed = [entry for entry in listed if entry["name"].strip("/") != path.strip("/")]
        found = (
            FileEntry(
                entry["name"].rstrip("/").rpartition("/")[2], int(entry["size"] or 0), entry["type"] == "directory"
            )
            for entry in listed
        )
        return sorted(found, key=lambda entry: entry.name)

    def stamp(self, name: str) -> str:
        """Empty when there is no such file, else a text that changes when the file is rewritten."""
        with _as_os_errors(self.path(name)):
            self._system.invalidate_cache()
            try:
                details = self._system.info(self._inside(name))
            except FileNotFoundError:
                return ""
        known = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "updated", "created", "size")
        return ":".join(str(details[key]) for key in known if details.get(key) is not None) or "there"

    def read(self, name: str) -> bytes:
        """The content of a small file. Raises ``FileNotFoundError``."""
        with _as_os_errors(self.path(name)):
            return bytes(self._system.cat_file(self._inside(name)))

    def forget(self, name: str) -> None:
        """Does nothing: file contents are not cached here."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from ``offset`` on; returns the bytes read, fewer only at the end of the file."""
        with _as_os_errors(self.path(name)):
            data = self._system.cat_file(self._inside(name), start=offset, end=offset + len(buffer))
        if len(data) > len(buffer):
            raise OSError(errno.EIO, f"the store sent {len(data)} bytes, {len(buffer)} were requested", self.path(name))
        buffer[: len(data)] = data
        return len(data)

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        """Write a whole file, and create its folders if the store has folders. Its stamp is unknown: it would cost
        another request."""
        path = self._inside(name)
        with _as_os_errors(self.path(name)):
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            if new:
                self._system.invalidate_cache()
                if self._system.exists(path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path(name))
            try:
                with self._system.open(path, "wb") as file:
                    for piece in pieces:
                        file.write(piece)
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    self._system.rm_file(path)
                raise
        return ""

    def sync(self, folder: str) -> None:
        """Does nothing: data that an object store has accepted is durable."""

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder; no error if it does not exist."""
        path = self._inside(name)
        with _as_os_errors(self.path(name)):
            self._system.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                if self._system.isdir(path):
                    if self._system.ls(path):
                        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), self.path(name))
                    self._system.rmdir(path)
                else:
                    self._system.rm_file(path)

    def free_bytes(self) -> int | None:
        """None: an object store does not report its free space."""
        return None

    def _inside(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


def _connect(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    needed = " ".join(["fsspec", *([PACKAGES[protocol]] if protocol in PACKAGES else [])])
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        raise SettingError(
            SETTING, url, "a URL needs the package fsspec, which is not installed", f"Run: pip install {needed}"
        ) from None
    try:
        system, root = core.url_to_fs(url)
    except ImportError as error:
        raise SettingError(
            SETTING, url, f"{protocol}:// needs a package that is not installed ({error})", f"Run: pip install {needed}"
        ) from None
    except ValueError as error:
        raise SettingError(SETTING, url, str(error), "Give a path, or a URL that fsspec knows") from None
    return system, str(root)


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """Turn the errors of client libraries into ``OSError``, so that callers of ``Files`` handle one type."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # any of a dozen libraries
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error
