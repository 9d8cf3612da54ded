"""A loader's file list, which can grow while the loader reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_service.file_list import FileList, files_of
from data_service.loader.deps import LoaderDeps
from data_service.loader.file_list_client import FileListClient
from data_service.loader.lease_client import LeaseClient
from data_service.loader.loader_position import LoaderPosition
from data_service.loader.prefetcher import EpochFiles
from data_service.loader.source import EPOCH, DataSource
from data_service.loader.worker_context import RankAssignment, WorkerContext
from data_service.protocol.file_list_messages import AddFiles
from data_service.protocol.messages import DataSetOptions, Opened, ReaderList
from edl.errors import DataError, EdlError
from edl.worker.boundary import RoundOver
from edl.worker.session import note

BIG_BYTES = 256 << 10
"""A longer encoded list is stored as an array, because texts in a state are copied more often."""
Check = Callable[[], None]
"""Raises ``RoundOver`` if the round is over."""


class _Over(Exception):
    """The round or client of this background thread has ended."""


class GrowingFiles:
    """The files of one loader: registers them, adds more, and extends the loader's position to them."""

    def __init__(
        self, name: str, position: LoaderPosition, context: WorkerContext, deps: LoaderDeps, *, independent: bool
    ) -> None:
        self.client = FileListClient(name, note, deps.threads)
        self.known: EpochFiles | None = None
        """The files of the current epoch, once the Master has granted shards."""
        self._name = name
        self._position = position
        self._context = context
        self._threads = deps.threads
        self._independent = independent

    # --- as part of a position ---------------------------------------------------------------------------------------

    def state(self) -> Any:
        """The file list for ``state_dict``: bytes, or an array if it is long."""
        encoded = self.client.encoded()
        if len(encoded) <= BIG_BYTES:
            return encoded
        import numpy as np

        return np.frombuffer(encoded, np.uint8)

    def restore(self, state: Mapping[str, Any], options: DataSetOptions) -> None:
        """Continue with the file list of a position, which has been restored. Raises ``DataError`` if the position
        belongs to other files."""
        kept = state.get("files", b"")
        self.client.restore(FileList.decode(kept if isinstance(kept, bytes) else kept.tobytes()))
        ledger = self._position.ledger
        if ledger is not None and self.client.files.segments:
            self.client.check(ledger, options)

    # --- opening -----------------------------------------------------------------------------------------------------

    def register(self, client: LeaseClient, source: DataSource, options: DataSetOptions, check: Check) -> None:
        """Rank 0: register the files."""
        beginning = client.deps.trainers.beginning if self._independent else None
        if beginning is not None and beginning.ledgers.get(self._name):
            self.client.restore(files_of(beginning.ledgers[self._name]))
        self.client.register(client, source, options, self._position.copy(), check)

    def fit_position(self, client: LeaseClient, opened: Opened, options: DataSetOptions, check: Check) -> None:
        """Adapt the position to the Master's list. Raises ``DataError`` if it belongs to other files."""
        ledger = self._position.known
        if self._independent:  # the Master's position is authoritative; this one is for progress reports
            if opened.shards >= ledger.shards:
                self._position.extend(opened.shards, opened.digest)
            return
        if not self.client.files.knows(opened.digest):
            self.client.fetch(client, check)
        try:
            self.client.check(ledger, options)
        except DataError as error:
            raise DataError(f"data set {self._name}: {error}") from None

    def listen(self, place: RankAssignment, client: LeaseClient, source: DataSource) -> None:
        """Handle unsolicited messages from the Master: the list of remote readers, and orders to add files."""
        pool: Any = None
        if source.remote:
            from data_service.remote.client import shared_pool  # Flight takes a moment to load

            pool = shared_pool(place.rank)

        def receive(message: Any) -> None:
            if isinstance(message, ReaderList) and pool is not None:
                pool.update(message.readers, message.authority)
            elif isinstance(message, AddFiles):
                self._on_thread(place, client, lambda check: self._execute(client, source, message, check))

        client.on_message = receive

    def rescan_periodically(self, place: RankAssignment, client: LeaseClient, source: DataSource) -> None:
        """Rank 0: rescan the patterns in the background if the source asks for it. A worker that outlives rounds may
        become rank 0 later, so its thread runs at any rank."""
        if source.rescan_s and (place.rank == 0 or self._context.where() is not None):
            self._on_thread(place, client, lambda check: self._rescan(place, client, source, check))

    # --- growing -----------------------------------------------------------------------------------------------------

    def add(self, client: LeaseClient, source: DataSource, files: Sequence[str], when: str, check: Check) -> str:
        """Add files by name; see ``Loader.add``."""
        return self.client.add(client, source, files, when, self._position.copy(), check)

    def grow_to(self, version: int, client: LeaseClient, known: EpochFiles, check: Check) -> None:
        """Extend the position: all ranks now know that the epoch has ``version`` segments."""
        ledger = self._position.known
        if known.version:
            self.known = known
        if self._independent:
            if known.shards > ledger.shards:
                self._position.extend(known.shards, known.digest)
            return
        if not version:
            return
        self.client.fetch(client, check, version)
        now = self.client.files.version(version)
        if now.digest != ledger.digest and now.shards >= ledger.shards:
            self._position.extend(now.shards, now.digest)

    def rescan_at_epoch_end(self, place: RankAssignment, client: LeaseClient, source: DataSource) -> None:
        """``rescan="epoch"``: add new files to the epoch that is about to start, before this worker starts it."""
        if source.rescan == EPOCH:
            ledger = self._position.ledger
            self.client.look_again(client, source, ledger, lambda: self._context.check(place.round), epoch_end=True)

    def _execute(self, client: LeaseClient, source: DataSource, order: AddFiles, check: Check) -> None:
        self.client.ordered(client, source, order, self._position.copy, check)

    def _rescan(self, place: RankAssignment, client: LeaseClient, source: DataSource, check: Check) -> None:
        while not client.ended.wait(source.rescan_s):
            if (self._context.where() or (place.round, place.rank))[1] == 0:
                self.client.look_again(client, source, self._position.copy(), check)

    def _on_thread(self, place: RankAssignment, client: LeaseClient, work: Callable[[Check], None]) -> None:
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

        self._threads.start(run, name="edl-files")
