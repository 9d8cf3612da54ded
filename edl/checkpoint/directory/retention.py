"""Deletes surplus checkpoints, and older ones when the disk has no room for the next."""

from __future__ import annotations

from collections.abc import Callable, Collection

from edl.checkpoint.directory.deletions import Deletions
from edl.checkpoint.directory.disk_space import DiskSpace
from edl.checkpoint.directory.failures import why
from edl.checkpoint.directory.folders import Folders
from edl.checkpoint.directory.manifest import OWNER_FILE, Retention, StateManifest, folder_name
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.records import Version

Inspect = Callable[[Version], "StateManifest | None"]


class Pruning:
    """Deletes this job's checkpoints and never those of others. All calls block; call them one at a time."""

    def __init__(
        self,
        files: Files,
        folders: Folders,
        room: DiskSpace,
        job: str,
        retention: Retention,
        inspect: Inspect,
        bad: dict[Version, str],
        say: Callable[[str], None],
    ) -> None:
        """``inspect`` returns the manifest of a complete checkpoint (``FileCheckpointStorage._inspect``). ``bad`` is
        the storage's table of checkpoints with corrupt files: they do not count as kept, and leave the table when
        deleted."""
        self._files = files
        self._folders = folders
        self._room = room
        self._job = job
        self._retention = retention
        self._inspect = inspect
        self._bad = bad
        self._say = say
        self._deletions = Deletions(files, folders.delete, say)
        self._ours: dict[Version, bool] = {}
        """Complete checkpoints seen so far, and whether this job wrote them; avoids reading their manifests again."""
        self._written: list[Version] = []
        """The last two checkpoints that this run wrote."""

    def wrote(self, version: Version) -> None:
        """Note a new complete checkpoint and delete the surplus. Failures are only logged: the checkpoint itself is
        safe."""
        self._ours.pop(version, None)
        self._written = [*(old for old in self._written if old != version), version][-2:]
        try:
            self._prune()
        except OSError as error:
            self._say(f"cannot delete old checkpoints in {self._files.where}: {why(error)}")

    def drop_surplus(self) -> bool:
        """Delete all but a safe minimum to free space; returns whether anything was deleted. Raises ``OSError``."""
        complete, _ = self._present()
        return self.delete(self._room.deletable(self._retention, complete))

    def delete(self, versions: Collection[Version]) -> bool:
        """Delete checkpoints, and log those that cannot be deleted; returns whether any was deleted."""
        folders = {folder_name(version): version for version in versions}
        for version in versions:
            self._ours.pop(version, None)  # looked at again if it is still there, since it may be half deleted
        deleted = self._deletions.delete(folders)
        for folder in deleted:
            self._bad.pop(folders[folder], None)
        return bool(deleted)

    def _prune(self) -> None:
        complete, unfinished = self._present()
        surplus = self._retention.surplus(complete, self._written)
        self.delete([*surplus, *self._retention.overtaken(unfinished, complete)])
        for entry in self._files.entries():  # not at the start of a run, when many launchers may write that file
            if entry.name.startswith(f"{OWNER_FILE}.") and not entry.folder:
                self._files.remove(entry.name)

    def _present(self) -> tuple[list[Version], list[Version]]:
        """This job's checkpoints that are in the directory now: the complete ones, and the unfinished or corrupt
        ones."""
        there = self._folders.versions()
        for gone in self._ours.keys() - set(there):
            del self._ours[gone]
        complete: list[Version] = []
        unfinished: list[Version] = []
        for version in there:
            if version not in self._ours:
                self._classify(version, unfinished)
            if self._ours.get(version):
                (unfinished if version in self._bad else complete).append(version)
        return complete, unfinished

    def _classify(self, version: Version, unfinished: list[Version]) -> None:
        """Classify a folder that is not known yet. If its job is unknown, it is left alone, like a foreign one."""
        try:
            found = self._inspect(version)
        except CheckpointError:
            if self._folders.job_of(version) == self._job:
                unfinished.append(version)
            return
        if found is None:
            unfinished.append(version)
        else:
            self._ours[version] = found.job == self._job
