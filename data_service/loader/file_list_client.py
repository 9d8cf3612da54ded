"""The client of a data set's list of files: registers it, fetches it, and adds files that are found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from data_service.file_list import FileList, chosen, pieces
from data_service.ledger import Ledger
from data_service.loader.lease_client import LeaseClient
from data_service.loader.source import DataSource
from data_service.manifest import Manifest, named
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW, AddFiles, Grow, Grown, Listed, ListFiles
from data_service.protocol.messages import Options, Registered
from data_service.scan import KnownFiles
from edl.errors import DataError, EdlError, SettingError

Check = Callable[[], None]
Say = Callable[[str], None]
LARGE_BYTES = 8 << 20
"""A longer list is registered segment by segment."""
ADVICE = "Put them back, or begin without that position"


class FileListClient:
    """One data set's list of files in this process, a copy of the Master's. ``say`` takes notes for the user."""

    def __init__(self, name: str, say: Say) -> None:
        self.name = name
        self.files = FileList().shared(threading.RLock())
        self._say = say
        self._encoded = b""
        self._ignored: set[str] = set()
        """New files that the person has been told of, and that nobody has asked for."""
        self._unready: dict[str, int] = {}
        """Size of new files when they were looked at last: one that still grows is left alone."""
        self._lock = threading.Lock()
        self._fetching = threading.Lock()

    # --- as part of a position ---------------------------------------------------------------------------------------

    def encoded(self) -> bytes:
        """All of it, for a position."""
        with self._lock:
            if not self._encoded and self.files.segments:
                self._encoded = self.files.encode()
            return self._encoded

    def restore(self, files: FileList) -> None:
        """The list that came with a position, unless it is known already, or more than it."""
        with self._lock:
            if files.segments and not self.files.extends(files):
                self.files, self._encoded = files.shared(threading.RLock()), b""

    def check(self, ledger: Ledger, options: Options) -> None:
        """Raises ``DataError`` unless it is a position in these files, handed out in this order."""
        if not self.files.knows(ledger.digest, ledger.shards):
            ledger.belongs(self.files.digest, len(self.files), options.seed, options.shuffle)
        ledger.belongs(ledger.digest, ledger.shards, options.seed, options.shuffle)

    # --- the Master's ------------------------------------------------------------------------------------------------

    def fetch(self, client: LeaseClient, check: Check, segments: int = 0) -> None:
        """Have at least so many segments; 0: all that the Master has. Raises ``DataError``."""
        with self._fetching:
            if segments and len(self.files.segments) >= segments:
                return
            have = self.encoded()
            told = _rest(client, check, len(have))
            files = FileList.decode(told) if told else FileList()
            with self._lock:
                self.files.segments += files.segments
                self._encoded = have + told
        if len(self.files.segments) < segments:
            raise DataError(f"data set {self.name}: the Master lists {len(self.files.segments)} parts, not {segments}")

    def register(
        self, client: LeaseClient, source: DataSource, options: Options, ledger: Ledger | None, check: Check
    ) -> None:
        """Rank 0: list the files, beginning with those that the position knows. Raises ``DataError``."""
        told = FileList.decode(_rest(client, check, 0))
        base = self.files if self.files.segments and not told.extends(self.files) else told
        known = base if base.segments else None
        try:
            found = self._look(source, known, check)
        except DataError:
            if ledger is not None or not told.segments:
                raise
            known, found = None, self._look(source, None, check)  # nothing depends on what was registered
        if known is None:
            known = FileList()
            for part in pieces(found):
                known.append(part.encode(), 0, decoded=part)
            found = chosen(found, ())
        with self._lock:
            self.files, self._encoded = known.shared(threading.RLock()), b""
        self._send(client, options, check)
        if not found.file_count:
            return
        if told.segments and not source.rescan:
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
        """Have the Master list these, too."""
        epoch = 0 if ledger is None else ledger.epoch + (ledger.done_shards == ledger.shards > 0)
        answer = Grown(0, self.name, "", 0)
        for part in pieces(found):
            message = Grow(0, self.name, part.encode(), epoch, when, by_name, order)
            answer = client.wait(client.ask(message), check, Grown)
        return answer

    # --- looking -----------------------------------------------------------------------------------------------------

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
        """List these as well. Returns what has come of it. Raises ``DataError``, ``SettingError``."""
        if when not in (NOW, NEXT_EPOCH):
            raise SettingError("when", when, f"must be {NOW} or {NEXT_EPOCH}")
        self.fetch(client, check)
        known = KnownFiles(self.files.sizes(), _like(self.files))
        found = source.scan(check, self._say, tuple(files), known, self.files.manifest.format)
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
        """Somebody outside has asked for more files; on a thread of its own, which nobody waits for."""
        try:
            self.add(client, source, message.files, message.when, ledger(), check, message.order)
        except EdlError as error:
            client.ask(Grow(0, self.name, order=message.order, error=str(error)))

    def look_again(
        self, client: LeaseClient, source: DataSource, ledger: Ledger | None, check: Check, *, epoch_end: bool = False
    ) -> None:
        """The data set's own patterns: list what is new. A file that cannot be read yet is looked at again the next
        time; but for an epoch's end only those are taken that have not grown since the last look."""
        self.fetch(client, check)
        try:
            found = self._look(source, self.files, check, quiet=True)
        except DataError as error:
            self._tell_once(str(error))
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
        """Files of the data set's own patterns that are not known. Raises ``DataError`` that names those that have been
        changed or are missing. ``quiet``: new ones that cannot be read are left for the next time."""
        say: Say = (lambda text: None) if quiet else self._say
        if known is None:
            return source.scan(check, say)
        held = KnownFiles(known.sizes(), _like(known))
        if quiet:
            held.unready = lambda path, error: self._tell_once(str(error))
        found = source.scan(check, say, known=held, format=known.manifest.format)
        gone = [path for path in known.own_paths() if path not in held.seen]
        if gone:
            raise DataError(f"data set {self.name}: {named('of the list are gone', gone)}. {ADVICE}")
        return found

    def _send(self, client: LeaseClient, options: Options, check: Check) -> None:
        encoded, segments = self.encoded(), self.files.segments
        if len(encoded) <= LARGE_BYTES:
            client.wait(client.register(encoded, options), check, Registered)
            return
        client.wait(client.register(segments[0].encode(), options), check, Registered)
        for one in segments[1:]:
            client.wait(client.ask(Grow(0, self.name, one.blob, one.epoch, NOW, one.named)), check, Grown)

    def _mention(self, found: Manifest) -> None:
        paths = [path for path, _ in found.paths_and_sizes() if path not in self._ignored]
        self._ignored.update(paths)
        if paths:
            more = named("new since the data set was listed", paths)
            self._say(f"data set {self.name}: {more}; add them with edl data add, data.add() or rescan=…")

    def _tell_once(self, text: str) -> None:
        if text not in self._ignored:
            self._ignored.add(text)
            self._say(f"data set {self.name}: {text}. It is looked at again")


def _rest(client: LeaseClient, check: Check, have: int) -> bytes:
    """What follows in the Master's list."""
    parts: list[bytes] = []
    while True:
        answer = client.wait(client.ask(ListFiles(0, client.dataset, have)), check, Listed)
        parts.append(answer.data)
        have += len(answer.data)
        if have >= answer.total or not answer.data:
            return b"".join(parts)


def _like(files: FileList) -> str:
    """A file that has records."""
    return files.manifest.ref(0).file if len(files) else ""


def _again(files: FileList, known: KnownFiles) -> Manifest:
    """Files that were named although they are listed: so that they are counted, and nothing else happens."""
    numbers = [number for number, (path, _) in enumerate(files.manifest.paths_and_sizes()) if path in known.seen]
    return chosen(files.manifest, numbers)
