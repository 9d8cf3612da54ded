"""A sharded state in the checkpoint directory: one file per worker, written by the worker's node.

    commit-0000000123.era-0000000004/
        state-00000-of-00004.safetensors        the state of worker 0, byte for byte as in memory
        part-00000-of-00004.json                its size and checksums, written after it
        …
        DONE                                    the manifest of all parts, written by the node that finishes last

A part is the snapshot that the worker made (``edl.wire.snapshot``): a plain safetensors file whose header says which
piece of which tensor each array is. So a checkpoint has the same format whether workers saved it or launchers wrote it
from memory when a job failed, and it can be read at any world size (``edl.checkpoint``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from edl.checkpoint.directory import manifest as text
from edl.checkpoint.directory.manifest import MANIFEST_FILE, StateManifest, Sum, folder_name
from edl.checkpoint.directory.record_wait import appears
from edl.checkpoint.directory.summed_files import SummedFiles
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.records import Version

_NUMBER = re.compile(r"state-(\d+)-of-")


def shard_of(name: str, shards: int) -> int:
    """The part that a file name stands for. Raises ``CheckpointError`` for any other name."""
    found = _NUMBER.match(name)
    shard = int(found[1]) if found else 0
    if shard >= shards or name != text.state_file(shard, shards):
        raise CheckpointError(f"{name} is not a part of a state in {shards} parts")
    return shard


class ShardFiles:
    """Writes parts. Safe for threads, as long as no two write the same part."""

    def __init__(
        self,
        files: Files,
        summed: SummedFiles,
        manifest: Callable[[Version, int, dict[str, Sum]], StateManifest],
        delete: Callable[[str], None],
    ) -> None:
        """``manifest`` creates a manifest in this run's name, ``delete`` deletes a folder."""
        self._files = files
        self._summed = summed
        self._manifest = manifest
        self._delete = delete
        self._failed: set[Version] = set()

    def write(self, version: Version, data: memoryview, shard: int, shards: int) -> None:
        """Write one part, unless this run has already written it. If it raises ``OSError``, nothing of the part is
        left."""
        self._clear(version)
        folder = folder_name(version)
        while not (self._is_done(folder, version, rewrites=True) or self._is_recorded(folder, version, shard, shards)):
            if self._write(version, data, shard, shards):
                return

    def _write(self, version: Version, data: memoryview, shard: int, shards: int) -> bool:
        """Write a part and its record; returns whether that file is there with that record."""
        folder = folder_name(version)
        file, record = (f"{folder}/{name(shard, shards)}" for name in (text.state_file, text.part_file))
        mine = False
        try:
            self._files.remove(record)  # of another file
            try:
                written, stamp = self._summed.put(file, data, of_part=True)
            except FileExistsError:
                # Workers of another node may hold this part too, with other values beside the tensors.
                return self._is_written(folder, version, shard, shards)
            mine = True
            part = self._manifest(version, shards, {text.state_file(shard, shards): written})
            # If this node was stopped for a while, another one has taken it for dead and replaced its file.
            if self._is_there(file, stamp, written):
                self._files.write(record, [text.manifest_text(part)])
                if self._is_there(file, stamp, written):
                    return True
                self._files.remove(record)
            return False
        except OSError:
            for name in (record, file) if mine else ():  # else it may be another node's
                with contextlib.suppress(OSError):
                    self._files.remove(name)
            raise

    def _is_there(self, file: str, stamp: str, written: Sum) -> bool:
        """Whether a file that was written is still the one of that name, as far as is known. Some file systems change
        the stamp when they close a file; then its content decides."""
        if not stamp or self._files.stamp(file) == stamp:
            return True
        with contextlib.suppress(FileNotFoundError):
            return self._summed.sum(file, written.bytes) == written
        return False

    def _is_recorded(self, folder: str, version: Version, shard: int, shards: int) -> bool:
        """Whether a part is there with its record."""
        there = self._part(folder, version, shard, shards)
        return there is not None and not text.why_sizes_differ(there, self._sizes(folder))

    def _is_written(self, folder: str, version: Version, shard: int, shards: int) -> bool:
        """Whether another node, whose file of this part is there, writes the record too. Removes the file of one that
        does not: it has died."""
        file = f"{folder}/{text.state_file(shard, shards)}"
        found = self._files.stamp(file)
        if appears(lambda: self._is_recorded(folder, version, shard, shards) or self._is_done(folder, version)):
            return True
        if self._files.stamp(file) == found:
            self._files.remove(file)
        return False

    def give_up(self, version: Version) -> None:
        """Delete a checkpoint of which one part cannot be written: it will never be complete, and would take the space
        that the next one needs."""
        self._failed.add(version)
        with contextlib.suppress(OSError):
            self._drop(version)

    def all(self, version: Version, shards: int) -> dict[str, Sum] | None:
        """All parts with their checksums; None while some are missing, empty when the checkpoint is already
        complete."""
        folder = folder_name(version)
        names = {entry.name for entry in self._files.entries(folder)}
        if any(text.part_file(shard, shards) not in names for shard in range(shards)):
            return None  # called for each of perhaps a thousand parts: only the last calls read all records
        if self._is_done(folder, version):
            return {}
        found: dict[str, Sum] = {}
        for shard in range(shards):
            part = self._part(folder, version, shard, shards)
            if part is None:
                return None
            found.update(part.files)
        return None if text.why_sizes_differ(self._manifest(version, shards, found), self._sizes(folder)) else found

    def _part(self, folder: str, version: Version, shard: int, shards: int) -> StateManifest | None:
        """The record of a part that this run has written; None without one."""
        try:
            found = text.parse_manifest(self._files.read(f"{folder}/{text.part_file(shard, shards)}"))
        except (FileNotFoundError, CheckpointError):
            return None
        ours = self._manifest(version, shards, {})
        fits = (found.run, found.version, found.shards, found.format) == (ours.run, version, shards, text.PARTS_FORMAT)
        return found if fits else None

    def _sizes(self, folder: str) -> dict[str, int]:
        return {entry.name: entry.size for entry in self._files.entries(folder)}

    def _is_done(self, folder: str, version: Version, *, rewrites: bool = False) -> bool:
        """Whether the checkpoint is complete, as far as this node sees its files. ``rewrites``: a manifest that does
        not match is deleted, because the parts are written again."""
        try:
            found = text.parse_manifest(self._files.read(f"{folder}/{MANIFEST_FILE}"))
        except FileNotFoundError:
            return False
        except CheckpointError:
            found = None
        if found is not None:
            ours = self._manifest(version, found.shards, {})
            if found.job != ours.job:
                raise CheckpointError(
                    f"{self._files.path(folder)} was written by job {found.job} and is not replaced: "
                    "choose another --checkpoint-dir"
                )
            if found.version == version and not text.why_sizes_differ(found, self._sizes(folder)):
                return True
        if rewrites:
            self._files.remove(f"{folder}/{MANIFEST_FILE}")
        return False

    def _clear(self, now: Version) -> None:
        """Delete given-up checkpoints again: other nodes may have written parts after this node gave up."""
        for version in sorted(self._failed - {now}):
            with contextlib.suppress(OSError):
                self._drop(version)
                self._failed.discard(version)

    def _drop(self, version: Version) -> None:
        if not self._is_done(folder_name(version), version):
            self._delete(folder_name(version))
