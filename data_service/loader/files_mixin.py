"""The loader's file list, which can grow while the loader reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_service.file_list import FileList, files_of
from data_service.ledger import Ledger
from data_service.loader.deps import LoaderDeps
from data_service.loader.file_list_client import FileListClient
from data_service.loader.lease_client import LeaseClient
from data_service.loader.prefetcher import EpochFiles
from data_service.loader.source import EPOCH, DataSource
from data_service.loader.trainers import trainers
from data_service.loader.worker_context import RankAssignment, WorkerContext
from data_service.protocol.file_list_messages import NOW, AddFiles
from data_service.protocol.messages import DataSetOptions, Opened, ReaderList
from edl.errors import DataError, EdlError
from edl.worker.boundary import RoundOver
from edl.worker.session import note

BIG_BYTES = 256 << 10
"""A longer encoded list is stored as an array, because texts in a state are copied more often."""


class _Over(Exception):
    """The round or client of this background thread has ended."""


class FilesMixin:
    """The loader's methods for its file list."""

    _name: str
    _context: WorkerContext
    _deps: LoaderDeps
    _client: LeaseClient | None
    _ledger: Ledger | None
    _options: DataSetOptions
    _lock: threading.Lock
    _file_list: FileListClient
    _known: EpochFiles | None

    def _connect(self) -> tuple[RankAssignment, LeaseClient]:
        raise NotImplementedError

    def _settle(self) -> DataSource:
        raise NotImplementedError

    @property
    def _independent(self) -> bool:
        raise NotImplementedError

    def add(self, files: str | Sequence[str], *, when: str = NOW) -> str:
        """Add files to the data set: paths, patterns or URLs, of the same format and columns. Callable on any worker,
        inside the function that ``run`` calls.

        ``when="now"``: they join the current epoch, or the next one if all of its records are used; ``"next-epoch"``:
        the next one. Returns the outcome, which is in the store by then. Files that are already listed are not added
        again. Raises ``DataError`` if nothing is found, or a file is damaged, has other columns, is still being
        written, or has changed since it was listed; ``SettingError`` for another ``when``.
        """
        place, client = self._connect()
        names = (files,) if isinstance(files, str) else tuple(files)
        return self._file_list.add(
            client, self._settle(), names, when, self._position_now(), lambda: self._context.check(place.round)
        )

    # --- for the loader ----------------------------------------------------------------------------------------------

    def _list_files(self, client: LeaseClient, source: DataSource, check: Callable[[], None]) -> None:
        """Rank 0: register the files."""
        beginning = trainers.beginning if self._independent else None
        if beginning is not None and beginning.ledgers.get(self._name):
            self._file_list.restore(files_of(beginning.ledgers[self._name]))
        self._file_list.register(client, source, self._options, self._position_now(), check)

    def _files_state(self) -> Any:
        """The file list for ``state_dict``."""
        encoded = self._file_list.encoded()
        if len(encoded) <= BIG_BYTES:
            return encoded
        import numpy as np

        return np.frombuffer(encoded, np.uint8)

    def _restore_files(self, state: Mapping[str, Any]) -> None:
        kept = state.get("files", b"")
        self._file_list.restore(FileList.decode(kept if isinstance(kept, bytes) else kept.tobytes()))

    def _fit_ledger(self, client: LeaseClient, opened: Opened, check: Callable[[], None]) -> None:
        """Adapt the position to the Master's list."""
        ledger = self._ledger
        assert ledger is not None, "it has been made"  # noqa: S101
        if self._independent:  # the Master's position is authoritative; this one is for progress reports
            if opened.shards >= ledger.shards:
                ledger.extend(opened.shards, opened.digest)
            return
        if not self._file_list.files.knows(opened.digest):
            self._file_list.fetch(client, check)
        try:
            self._file_list.check(ledger, self._options)
        except DataError as error:
            raise DataError(f"data set {self._name}: {error}") from None

    def _grow_to(self, version: int, client: LeaseClient, known: EpochFiles, check: Callable[[], None]) -> None:
        """Extend the position: all ranks now know that the epoch has ``version`` segments."""
        ledger = self._ledger
        assert ledger is not None, "it is open"  # noqa: S101
        if known.version:
            self._known = known
        if self._independent:
            if known.shards > ledger.shards:
                ledger.extend(known.shards, known.digest)
            return
        if not version:
            return
        self._file_list.fetch(client, check, version)
        now = self._file_list.files.version(version)
        if now.digest != ledger.digest and now.shards >= ledger.shards:
            with self._lock:
                ledger.extend(now.shards, now.digest)

    def _look_at_epochs_end(self, place: RankAssignment, client: LeaseClient, ledger: Ledger) -> None:
        """``rescan="epoch"``: add new files to the epoch that is about to start."""
        source = self._settle()
        if source.rescan == EPOCH and place.rank == 0:
            self._file_list.look_again(client, source, ledger, lambda: self._context.check(place.round), epoch_end=True)

    def _hear(self, place: RankAssignment, client: LeaseClient, source: DataSource) -> None:
        """Handle unsolicited messages from the Master."""
        pool: Any = None
        if source.remote:
            from data_service.remote.client import shared_pool  # Flight takes a moment to load

            pool = shared_pool(place.rank)

        def receive(message: Any) -> None:
            if isinstance(message, ReaderList) and pool is not None:
                pool.update(message.readers, message.authority)
            elif isinstance(message, AddFiles):
                self._on_thread(place, client, lambda check: self._order(client, source, message, check))

        client.on_message = receive

    def _look_again(self, place: RankAssignment, client: LeaseClient, source: DataSource) -> None:
        """Once opened, rescan the patterns periodically if configured."""
        if source.rescan_s and place.rank == 0:
            self._on_thread(place, client, lambda check: self._watch(client, source, check))

    def _order(self, client: LeaseClient, source: DataSource, message: AddFiles, check: Callable[[], None]) -> None:
        self._file_list.ordered(client, source, message, self._position_now, check)

    def _watch(self, client: LeaseClient, source: DataSource, check: Callable[[], None]) -> None:
        while not client.ended.wait(source.rescan_s):
            self._file_list.look_again(client, source, self._position_now(), check)

    def _on_thread(
        self, place: RankAssignment, client: LeaseClient, work: Callable[[Callable[[], None]], None]
    ) -> None:
        def check() -> None:
            if client.ended.is_set() or self._context.over(place.round):
                raise _Over

        def run() -> None:
            try:
                work(check)
            except (_Over, RoundOver):
                pass  # the order is sent again to the next worker
            except EdlError as error:
                note(f"data set {self._name}: cannot add files: {error}")

        self._deps.threads.start(run, name="edl-files")

    def _position_now(self) -> Ledger | None:
        with self._lock:
            return None if self._ledger is None else self._ledger.copy()
