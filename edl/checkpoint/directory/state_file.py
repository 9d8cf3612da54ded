"""A state that is in one file, in the checkpoint directory."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection

from edl.checkpoint.directory import manifest as text
from edl.checkpoint.directory.folders import Folders
from edl.checkpoint.directory.manifest import MANIFEST_FILE, StateManifest, Sum, folder_name
from edl.checkpoint.directory.record_wait import appears
from edl.checkpoint.directory.summed_files import SummedFiles
from edl.errors import CheckpointError, EdlError
from edl.ports import Files
from edl.wire.records import Version

NAME = text.state_file(0, 1)
ATTEMPTS = 3


class StateFile:
    """Writes states that are in one file. All calls block; make them one at a time."""

    def __init__(
        self,
        files: Files,
        summed: SummedFiles,
        folders: Folders,
        manifest: Callable[[Version, int, dict[str, Sum]], StateManifest],
        write_manifest: Callable[[str, StateManifest], None],
        bad: Collection[Version],
        say: Callable[[str], None],
    ) -> None:
        """``manifest`` creates a manifest in this run's name, ``write_manifest`` writes it to a folder if this run
        still owns the directory. ``bad``: checkpoints that are known to have corrupt files."""
        self._files = files
        self._summed = summed
        self._folders = folders
        self._manifest = manifest
        self._write_manifest = write_manifest
        self._bad = bad
        self._say = say

    def write(self, version: Version, snapshot: memoryview) -> None:
        """Write a state that is in one file. Several nodes may do so at once, each with values of its own in it. The
        file of the first one stays, and whoever finds it without a manifest describes it, because its writer may have
        died. So no manifest is that of another file. Raises ``CheckpointError`` and ``OSError``."""
        folder = folder_name(version)
        for _ in range(ATTEMPTS):
            has_manifest = MANIFEST_FILE in self._folders.content(folder).sizes
            if self._stays(folder, version, snapshot):
                return
            # A manifest that appeared since is another node's: deleting it would leave a moment without a complete
            # checkpoint. The file goes first, because without a manifest it would count as another node's.
            for damaged in (NAME, MANIFEST_FILE) if has_manifest else ():
                self._files.remove(f"{folder}/{damaged}")
            if self._write(folder, version, snapshot):
                return
        raise CheckpointError(f"other nodes keep changing {self._files.path(folder)}")

    def _write(self, folder: str, version: Version, snapshot: memoryview) -> bool:
        """Write the state's file, unless there is one, and its manifest. False: look again, as another node has changed
        something."""
        file, mine = f"{folder}/{NAME}", False
        try:
            found = None if self._files.stamp(file) else self._put_new(file, snapshot)
            mine = found is not None
            found = found or self._described(folder, version)
            if found is None:
                return False
            self._write_manifest(folder, self._manifest(version, 1, {NAME: found[0]}))
            return self._follow(folder, version, *found)
        except (OSError, EdlError):
            with contextlib.suppress(OSError):
                if mine and MANIFEST_FILE not in self._folders.content(folder).sizes:
                    self._files.remove(file)  # it takes space
            with contextlib.suppress(OSError):
                self._files.remove(folder)  # fails if another node has begun
            raise

    def _put_new(self, file: str, snapshot: memoryview) -> tuple[Sum, str] | None:
        """Write the file; None if another node has been faster."""
        try:
            return self._summed.put(file, snapshot)
        except FileExistsError:
            return None

    def _described(self, folder: str, version: Version) -> tuple[Sum, str] | None:
        """Checksum and stamp of a state's file that another node has written, which may have died before it could write
        the manifest. None: it has written it, or the file could not be used and is removed."""
        file = f"{folder}/{NAME}"
        if appears(lambda: MANIFEST_FILE in self._folders.content(folder).sizes):
            return None
        sizes = self._folders.content(folder).sizes
        if MANIFEST_FILE in sizes or NAME not in sizes:
            return None
        stamp = self._files.stamp(file)
        try:
            text.check_header(self._summed.meta(file, sizes[NAME]), self._manifest(version, 1, {}), 0)
            return self._summed.sum(file, sizes[NAME]), stamp
        except FileNotFoundError:  # its writer could not write the manifest
            return None
        except CheckpointError:
            self._files.remove(file)
            return None

    def _follow(self, folder: str, version: Version, written: Sum, stamp: str) -> bool:
        """Correct the manifest if the file is no longer the one that it describes: on a file system without hard links
        two nodes may both have found none. Returns whether there is a file."""
        for _ in range(ATTEMPTS if stamp else 0):  # some file systems give a file another stamp each time
            now = self._files.stamp(f"{folder}/{NAME}")
            if not now:  # a node that could not write its manifest has removed its file
                self._files.remove(f"{folder}/{MANIFEST_FILE}")
                return False
            if now == stamp:
                break
            stamp = now
            there = self._summed.sum(f"{folder}/{NAME}", self._folders.content(folder).sizes.get(NAME, 0))
            if there != written:
                written = there
                self._write_manifest(folder, self._manifest(version, 1, {NAME: there}))
        return True

    def _stays(self, folder: str, version: Version, snapshot: memoryview) -> bool:
        """Whether this commit is already there, complete. Raises ``CheckpointError`` if it is another job's.

        This holds even for different content: a version names one state, and while it is replaced there would be none.
        """
        content = self._folders.content(folder)
        if MANIFEST_FILE not in content.sizes:
            return False
        try:
            old = text.parse_manifest(self._files.read(f"{folder}/{MANIFEST_FILE}"))
        except CheckpointError:
            return False
        if old.job != self._manifest(version, 1, {}).job:
            raise CheckpointError(
                f"{self._files.path(folder)} was written by job {old.job} and is not replaced: "
                "choose another --checkpoint-dir"
            )
        if old.version != version or text.why_sizes_differ(old, content.sizes):
            return False
        if version not in self._bad and old.files.get(NAME) == Sum(len(snapshot), zlib.crc32(snapshot)):
            return True
        if any(self._summed.sum(f"{folder}/{file}", entry.bytes) != entry for file, entry in old.files.items()):
            return False
        self._say(f"{self._files.path(folder)} already exists with different content and is kept")
        return True
