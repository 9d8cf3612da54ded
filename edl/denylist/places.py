"""Where the denylist is kept: in an etcd that outlives jobs, in a directory, or in an object store."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol
from urllib.parse import quote

from edl.errors import DenylistError, ProtocolError
from edl.ports import Delete, Files, Put, Store
from edl.rendezvous.phrases import count
from edl.wire import plain
from edl.wire.denylist import DenylistEntry

PREFIX = "/edl-denylist/"
"""Prefix of the keys in an etcd. It belongs to no job."""
SUFFIX = ".json"
"""Suffix of the files."""
Blocking = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a call that may block in a thread, and returns its result."""


class DenylistPlace(Protocol):
    """Where the denylist is kept. Calls raise ``StoreError`` or ``DenylistError``."""

    where: str
    """Names it in messages."""
    look_s: float
    """Seconds between two reads by a job: requests to an object store cost money."""
    left_out: str
    """Which entries could not be read by the last ``entries``, and why, as a sentence; empty: all could."""

    async def entries(self) -> Sequence[DenylistEntry]:
        """All entries, expired ones included, sorted by name. Those that cannot be read are left out (``left_out``)."""
        ...

    async def put(self, entry: DenylistEntry) -> None:
        """Add an entry, or replace the one with its name."""
        ...

    async def remove(self, name: str) -> None:
        """Remove an entry (``DenylistEntry.name``). A missing one is not an error."""
        ...


class StoreDenylist:
    """In an etcd, under a prefix of its own."""

    look_s = 5.0
    left_out = ""

    def __init__(self, store: Store, where: str) -> None:
        self.where = where
        self._store = store

    async def entries(self) -> list[DenylistEntry]:
        """See ``DenylistPlace``."""
        found = await self._store.read(PREFIX)
        return _readable(one.value for one in found.entries)

    async def put(self, entry: DenylistEntry) -> None:
        """See ``DenylistPlace``."""
        await self._store.write([Put(PREFIX + _key(entry.name), plain.dumps(entry))])

    async def remove(self, name: str) -> None:
        """See ``DenylistPlace``."""
        await self._store.write([Delete(PREFIX + _key(name))])


class FilesDenylist:
    """In a directory or an object store: one file for each entry."""

    def __init__(self, files: Files, blocking: Blocking) -> None:
        self.where = files.where
        self.look_s = 60.0 if files.remote else 5.0
        self.left_out = ""
        self._files = files
        self._blocking = blocking

    async def entries(self) -> list[DenylistEntry]:
        """See ``DenylistPlace``."""
        texts, closed = await self._call(self._read)
        self.left_out = _closed_text(self.where, closed) if closed else ""
        return _readable(texts)

    async def put(self, entry: DenylistEntry) -> None:
        """See ``DenylistPlace``."""
        await self._call(lambda: self._files.write(_key(entry.name) + SUFFIX, [plain.dumps(entry)]))

    async def remove(self, name: str) -> None:
        """See ``DenylistPlace``."""
        await self._call(lambda: self._files.remove(_key(name) + SUFFIX))

    def _read(self) -> tuple[list[bytes], list[str]]:
        """The texts of all entries, and the names of those that this user may not read."""
        found, closed = [], []
        for entry in self._files.entries():
            if entry.name.endswith(SUFFIX) and not entry.folder:
                try:
                    found.append(self._files.read(entry.name))
                except FileNotFoundError:
                    continue  # removed meanwhile
                except PermissionError:
                    closed.append(entry.name)
        return found, closed

    async def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return await self._blocking(call)
        except OSError as error:
            what = error.strerror or error
            raise DenylistError(f"the denylist in {self.where} cannot be used: {what}") from error


def _closed_text(where: str, names: Sequence[str]) -> str:
    one = len(names) == 1
    what = f"{count(len(names), 'file')} of the denylist in {where} {'does' if one else 'do'} not count"
    why = f"this user may not read {'it' if one else 'them'} ({names[0]}: Permission denied)"
    return f"{what}, because {why}: run chmod a+r there"


def _key(name: str) -> str:
    """The name of an entry as one file name; hosts and devices may have any."""
    return quote(name, safe="")


def _readable(texts: Iterable[bytes]) -> list[DenylistEntry]:
    """The entries among these values, sorted by name. Others are left out: those of a newer edl, and foreign files."""
    found = []
    for text in texts:
        with contextlib.suppress(ProtocolError):
            found.append(plain.loads(DenylistEntry, text))
    return sorted(found, key=lambda one: one.name)
