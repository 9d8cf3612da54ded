"""One node's copy of the synchronised directories: what is on its disk, and which versions these files are."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from edl.errors import CheckpointError
from edl.sync_dir.cut import LostNode, incomplete
from edl.sync_dir.index import FileIndex, FileRecord, folders_above
from edl.sync_dir.settling import FileStamp, TreeScan, changed_files, settle
from edl.sync_dir.tree import LocalChange, SyncedTree, stamp_of
from edl.types import NodeId

OLDER = "was there before the job and differs from the job's"
INCOMPLETE = "appeared after the last known files of a lost node, and may lack some of that node"


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes after a number."""

    head: int
    """Number of the newest change."""
    records: list[FileRecord]
    until_ns: int
    """All that was finished here until then is among the changes up to ``head``; by the clock of the files' times."""


@dataclass(frozen=True, slots=True)
class LentVersion:
    """A file that is being sent to another node."""

    descriptor: int
    stamp: FileStamp

    @property
    def size(self) -> int:
        """Its size in bytes when it was opened."""
        return self.stamp.size

    def unchanged(self) -> bool:
        """Whether the content is still the one that was opened."""
        return self.stamp.same_file(stamp_of(os.fstat(self.descriptor)))


class NodeReplica:
    """Thread-safe. Methods block on the disk and raise its ``OSError``."""

    def __init__(self, node: NodeId, tree: SyncedTree) -> None:
        self._node = node
        self._tree = tree
        self._disk = threading.RLock()
        """Held while the files or the knowledge of them change together. Taken before ``_index_lock``."""
        self._index_lock = threading.RLock()
        """Held while a moment of another node is entered, so that nobody gets a part of it."""
        self._index = FileIndex(node)
        self._known: dict[str, FileStamp] = {}
        """Files as they are in the index."""
        self._until_ns = 0
        """All that was finished here until then is in the index."""
        self._before = TreeScan()
        self._strangers: set[str] = set()
        """Files that were here before the launcher, until workers start."""

    def open(self) -> None:
        """Enter the files that are here already. Raises ``CheckpointError`` if there are too many files."""
        with self._disk:
            self._before = self._tree.scan(first=True)
            self._look(old=True)
            self._strangers = set(self._known)

    def look(self) -> bool:
        """Scan once and enter what has changed here; returns whether files are about to count as written. Raises
        ``CheckpointError`` if there are too many files."""
        with self._disk:
            return self._look(old=False)

    def _look(self, *, old: bool) -> bool:
        now = self._tree.scan()
        in_use = {path for path in changed_files(self._known, now) if self._tree.in_use(path, now.files[path])}
        moment = settle(self._known, self._before, now, in_use)
        with self._index_lock:
            self._until_ns = moment.until_ns
            for change in moment.changes:
                stamp = change.stamp
                if stamp is None:
                    del self._known[change.path]
                    self._index.removed(change.path)
                    continue
                self._known[change.path] = stamp
                if old:
                    self._index.found(change.path, stamp.size, stamp.mtime_ns, stamp.mode)
                else:
                    self._index.wrote(change.path, stamp.size, stamp.mtime_ns, stamp.mode, now.ended_ns)
        self._strangers.difference_update(change.path for change in moment.changes if not old)
        self._before = now
        return moment.more

    def begin(self, number: int) -> None:
        """All that workers of rounds before ``number`` wrote has been entered."""
        with self._index_lock:
            self._index.begin(number)

    def adopt(self) -> None:
        """The workers start: what is here are the job's files."""
        with self._disk, self._index_lock:
            self._index.adopt()
            self._strangers.clear()

    def set_aside(self, lost: LostNode, ahead_ns: Mapping[NodeId, int]) -> None:
        """Rename the folders that may lack files of a lost node, here and, once they ask, on the other nodes. Raises
        ``OSError``. See ``edl.sync_dir.cut.incomplete``."""
        with self._disk, self._index_lock:
            for folder in incomplete(self._index.records(), lost, ahead_ns):
                self._move_aside(folder, self._inside(folder))
                self._index.set_aside(folder)

    # --- for other nodes ---------------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """Number of the newest change."""
        return self._index.head

    def since(self, number: int) -> Changes:
        """The changes after ``number``."""
        with self._index_lock:
            return Changes(self._index.head, self._index.since(number), self._until_ns)

    def total(self) -> tuple[int, int]:
        """Number of files, and their size in bytes."""
        with self._index_lock:
            return self._index.total()

    @contextlib.contextmanager
    def opened(self, record: FileRecord) -> Iterator[LentVersion | None]:
        """A file in this version; None if it is not here any more. Raises ``CheckpointError`` if it cannot be
        opened."""
        with self._disk, self._index_lock:
            here, stamp = self._index.get(record.path), self._known.get(record.path)
        if here is None or here.version != record.version or stamp is None:
            yield None
            return
        try:
            descriptor = os.open(self._tree.locate(record.path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise CheckpointError(
                f"node {self._node} cannot read it: {error.strerror}. Let the user of its launcher read the file, or "
                "move the file out of the directory"
            ) from error
        try:
            file = LentVersion(descriptor, stamp)
            yield file if file.unchanged() else None
        finally:
            os.close(descriptor)

    # --- from other nodes --------------------------------------------------------------------------------------------

    def missing(self, records: Sequence[FileRecord], skipped: Collection[int] = ()) -> list[FileRecord]:
        """Those of another node's records whose content is needed here. ``skipped``: directories that are the same ones
        on that node."""
        with self._index_lock:
            wanted = self._wanted(records, skipped)
            aside = {path for record in wanted for path in self._older_in(record)}
            return [one for one in wanted if self._lacks(one, aside)]

    def _wanted(self, records: Sequence[FileRecord], skipped: Collection[int]) -> list[FileRecord]:
        return [one for one in _outside(records, skipped) if self._index.wants(one)]

    def _older_in(self, record: FileRecord) -> list[str]:
        """Files here that a record sets aside."""
        if not record.folder:
            return []
        return [one.path for one in self._index.older_in(record) if one.path in self._known]

    def _lacks(self, record: FileRecord, aside: Collection[str]) -> bool:
        """``aside``: files here that are set aside together with that."""
        here = self._index.get(record.path) if record.path not in aside else None
        return not record.removed and not (here and here.same_content(record))

    def enter(
        self, records: Sequence[FileRecord], staged: Mapping[FileRecord, str], skipped: Collection[int] = ()
    ) -> str:
        """Enter a moment of another node: give the staged files their names, and remove what is removed there.

        Returns an empty text, or why nothing was entered: content is missing, or a file has changed here meanwhile, and
        that change counts first. Raises ``CheckpointError`` for a path that leads out of the directories.
        """
        with self._disk, self._index_lock:
            wanted = self._wanted(records, skipped)
            files, asides = [one for one in wanted if not one.folder], [one for one in wanted if one.folder]
            gone = {path for one in asides for path in self._older_in(one)}
            absent = next((one.path for one in wanted if self._lacks(one, gone) and one not in staged), "")
            if absent:
                return f"{self._tree.locate(absent)} is being written on that node"
            make_room = _that_make_room(files)
            were_folders = {folder for one in make_room for folder in folders_above(one.path)}
            replaced = {one.path for one in files if one.removed or one.path not in were_folders}
            try:
                for one in asides:
                    self._tree.locate(one.folder)
                for path in (*gone, *replaced):
                    self._tree.check(path, self._known.get(path))
            except LocalChange as change:
                return f"{self._tree.locate(str(change))} is being changed here, or is no regular file"
            for one in asides:
                self._move_aside(one.folder, self._older_in(one))
                self._index.learn(one)
            for one in (*make_room, *(one for one in files if one not in make_room)):
                self._put(one, staged.get(one, ""))
                self._index.learn(one)
            for one in _outside(records, skipped):
                self._index.learn(one)  # also of an older version, the counter counts
            return ""

    def _inside(self, folder: str) -> list[str]:
        return [path for path in self._known if path.startswith(f"{folder}/")]

    def _move_aside(self, folder: str, paths: Sequence[str]) -> None:
        """Rename a folder; if it holds other files besides these ones, only these."""
        whole = len(paths) == len(self._inside(folder))
        for name, moved in [(folder, paths)] if paths and whole else [(path, [path]) for path in paths]:
            self._tree.move_aside(name, INCOMPLETE)
            for path in moved:
                del self._known[path]

    def _put(self, record: FileRecord, staged: str) -> None:
        path, here = record.path, self._index.get(record.path)
        if here is not None and here.same_content(record):
            if not record.removed and here.mode != record.mode:
                self._known[path] = self._tree.set_mode(record)
            return
        if path in self._strangers and here and (here.size, here.mtime_ns) != (record.size, record.mtime_ns):
            self._tree.move_aside(path, OLDER)
        elif record.removed:
            self._tree.remove(path)
        self._strangers.discard(path)
        if record.removed:
            self._known.pop(path, None)
        else:
            self._known[path] = self._tree.put(record, staged)


def _that_make_room(records: Sequence[FileRecord]) -> list[FileRecord]:
    """The removals that must come first: of a file whose name a folder takes, and of the files of a folder whose name a
    file takes."""
    written = {one.path for one in records if not one.removed}
    folders = {folder for path in written for folder in folders_above(path)}
    return [
        one
        for one in records
        if one.removed and (one.path in folders or not written.isdisjoint(folders_above(one.path)))
    ]


def _outside(records: Sequence[FileRecord], skipped: Collection[int]) -> list[FileRecord]:
    return [one for one in records if int(one.path.partition("/")[0] or 0) not in skipped] if skipped else list(records)
