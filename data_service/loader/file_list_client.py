"""The client of a data set's file list: registers and fetches it, and adds files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from data_service.file_list import FileList, chosen, pieces
from data_service.ledger import Ledger
from data_service.loader.lease_client import LeaseClient
from data_service.loader.source import DataSource
from data_service.manifest import Manifest, named
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW, AddFiles, Grow, Grown, Listed, ListFiles
from data_service.protocol.messages import DataSetOptions, FilesRegistered
from data_service.scan import KnownFiles
from edl.errors import DataError, EdlError, SettingError
from edl.threads import Threads

Check = Callable[[], None]
Say = Callable[[str], None]
LARGE_BYTES = 8 << 20
"""A longer list is registered segment by segment."""
ADVICE = "Restore them, or start without that position"


class FileListClient:
    """A process's copy of the Master's file list of one data set. ``say`` receives notes for the user."""

    def __init__(self, name: str, say: Say, threads: Threads) -> None:
        self.name = name
        self.files = FileList().shared(threading.RLock())
        self._say = say
        self._encoded = b""
        self._ignored: set[str] = set()
        """New files, and reasons not to scan, that have been reported to the user."""
        self._unready: dict[str, int] = {}
        """Size of new files at the last scan; a file that is still growing is skipped."""
        self._lock = threading.Lock()
        self._fetching = threads.lock()

    # --- as part of a position ---------------------------------------------------------------------------------------

    def encoded(self) -> bytes:
        """The encoded list, for a position."""
        with self._lock:
            if not self._encoded and self.files.segments:
                self._encoded = self.files.encode()
            return self._encoded

    def restore(self, files: FileList) -> None:
        """Take over the list of a position, unless the present one is an extension of it."""
        with self._lock:
            if files.segments and not self.files.extends(files):
                self.files, self._encoded = files.shared(threading.RLock()), b""

    def check(self, ledger: Ledger, options: DataSetOptions) -> None:
        """Raise ``DataError`` unless the ledger is a position in these files and this order."""
        if not self.files.knows(ledger.digest, ledger.shards):
            ledger.belongs(self.files.digest, len(self.files), options.seed, options.shuffle)
        ledger.belongs(ledger.digest, ledger.shards, options.seed, options.shuffle)

    # --- fetching and registering ------------------------------------------------------------------------------------

    def fetch(self, client: LeaseClient, check: Check, segments: int = 0) -> None:
        """Fetch the Master's list up to at least ``segments`` segments; 0: all of it. Raises ``DataError``."""
        with self._fetching:
            if segments and len(self.files.segments) >= segments:
                return
            have = self.encoded()
            listed = _rest(client, check, len(have))
            files = FileList.decode(listed) if listed else FileList()
            with self._lock:
                self.files.segments += files.segments
                self._encoded = have + listed
        if len(self.files.segments) < segments:
            raise DataError(f"data set {self.name}: the Master lists {len(self.files.segments)} parts, not {segments}")

    def register(
        self, client: LeaseClient, source: DataSource, options: DataSetOptions, ledger: Ledger | None, check: Check
    ) -> None:
        """Rank 0: register the files, starting with those that the position knows. Raises ``DataError``."""
        listed = FileList.decode(_rest(client, check, 0))
        base = self.files if self.files.segments and not listed.extends(self.files) else listed
        known = base if base.segments else None
        try:
            found = self._look(source, known, check)
        except DataError:
            if ledger is not None or not listed.segments:
                raise
            known, found = None, self._look(source, None, check)  # no position depends on the registered list
        if known is None:
            known, types = FileList(), source.types_of(found, check)
            for part in pieces(found):
                known.append(part.encode(), 0, decoded=part, types={} if known.segments else types)
            found = chosen(found, ())
        with self._lock:
            self.files, self._encoded = known.shared(threading.RLock()), b""
        self._send(client, options, check)
        if not found.file_count:
            return
        if listed.segments and not source.rescan:
            self._mention(found)
            return
        self.grow(client, check, found, ledger, source.when)

    def grow(
        self,
        client: LeaseClient,
        check: Check,
        found: Manifest,
        ledger: Ledger | None,
        when: str,
        *,
        by_name: bool = False,
        order: int = 0,
    ) -> Grown:
        """Send new files to the Master."""
        epoch = 0 if ledger is None else ledger.epoch + (ledger.done_shards == ledger.shards > 0)
        answer = Grown(0, self.name, "", 0)
        for part in pieces(found):
            message = Grow(0, self.name, part.encode(), epoch, when, by_name, order)
            answer = client.wait(client.ask(message), check, Grown)
        return answer

    # --- scanning ----------------------------------------------------------------------------------------------------

    def add(
        self,
        client: LeaseClient,
        source: DataSource,
        files: Sequence[str],
        when: str,
        ledger: Ledger | None,
        check: Check,
        order: int = 0,
    ) -> str:
        """Scan and add files. Returns the outcome as text. Raises ``DataError`` and ``SettingError``."""
        if when not in (NOW, NEXT_EPOCH):
            raise SettingError("when", when, f"must be {NOW} or {NEXT_EPOCH}")
        self.fetch(client, check)
        known = KnownFiles(self.files.sizes(), _like(self.files))
        found = source.typed(self.files.types).scan(check, self._say, tuple(files), known, self.files.manifest.format)
        if not found.file_count:
            found = _again(self.files, known)
        return self.grow(client, check, found, ledger, when, by_name=True, order=order).text

    def ordered(
        self,
        client: LeaseClient,
        source: DataSource,
        message: AddFiles,
        ledger: Callable[[], Ledger | None],
        check: Check,
    ) -> None:
        """Execute an order to add files, on a background thread."""
        try:
            self.add(client, source, message.files, message.when, ledger(), check, message.order)
        except EdlError as error:
            client.ask(Grow(0, self.name, order=message.order, error=str(error)))

    def look_again(
        self, client: LeaseClient, source: DataSource, ledger: Ledger | None, check: Check, *, epoch_end: bool = False
    ) -> None:
        """Scan the data set's own patterns again and add new files. Files that cannot be read yet are retried later.
        Except at an epoch's end, only files are added that have not grown since the last scan."""
        self.fetch(client, check)
        try:
            found = self._look(source, self.files, check, quiet=True)
        except DataError as error:
            self._say_once(str(error))
            return
        if not epoch_end:
            found = self._settled(found)
        if found.file_count:
            self.grow(client, check, found, ledger, NEXT_EPOCH if epoch_end else source.when)

    def _settled(self, found: Manifest) -> Manifest:
        now = dict(found.paths_and_sizes())
        same = [number for number, (path, size) in enumerate(now.items()) if self._unready.get(path) == size]
        self._unready = now
        return chosen(found, same)

    def _look(self, source: DataSource, known: FileList | None, check: Check, *, quiet: bool = False) -> Manifest:
        """Scan the data set's own patterns for files that are not in ``known``. Raises ``DataError`` that names changed
        or missing files. ``quiet``: skip new files that cannot be read yet."""
        say: Say = (lambda text: None) if quiet else self._say
        if known is None:
            return source.scan(check, say)
        held = KnownFiles(known.sizes(), _like(known))
        if quiet:
            held.unready = lambda path, error: self._say_once(str(error), path)
        found = source.typed(known.types).scan(check, say, known=held, format=known.manifest.format)
        gone = [path for path in known.own_paths() if path not in held.seen]
        if gone:
            raise DataError(f"data set {self.name}: {named('listed but missing', gone)}. {ADVICE}")
        return found

    def _send(self, client: LeaseClient, options: DataSetOptions, check: Check) -> None:
        encoded, segments = self.encoded(), self.files.segments
        if len(encoded) <= LARGE_BYTES:
            client.wait(client.register(encoded, options), check, FilesRegistered)
            return
        client.wait(client.register(segments[0].encode(), options), check, FilesRegistered)
        for one in segments[1:]:
            client.wait(client.ask(Grow(0, self.name, one.blob, one.epoch, NOW, one.named)), check, Grown)

    def _mention(self, found: Manifest) -> None:
        paths = [path for path, _ in found.paths_and_sizes() if path not in self._ignored]
        self._ignored.update(paths)
        if paths:
            more = named("new since the data set was listed", paths)
            self._say(f"data set {self.name}: {more}; add them with edl data add, data.add() or rescan=…")

    def _say_once(self, text: str, about: str = "") -> None:
        """``about``: a file whose reason may change each time, such as its size."""
        if (about or text) not in self._ignored:
            self._ignored.add(about or text)
            self._say(f"data set {self.name}: {text}. It will be retried")


def _rest(client: LeaseClient, check: Check, have: int) -> bytes:
    """The rest of the Master's list, from an offset."""
    parts: list[bytes] = []
    while True:
        answer = client.wait(client.ask(ListFiles(0, client.dataset, have)), check, Listed)
        parts.append(answer.data)
        have += len(answer.data)
        if have >= answer.total or not answer.data:
            return b"".join(parts)


def _like(files: FileList) -> str:
    """A file that has records, as a template; "" if there is none."""
    return files.manifest.ref(0).file if len(files) else ""


def _again(files: FileList, known: KnownFiles) -> Manifest:
    """The listed ones of the files that were named again, so that they are counted."""
    numbers = [number for number, (path, _) in enumerate(files.manifest.paths_and_sizes()) if path in known.seen]
    return chosen(files.manifest, numbers)
