"""A sharded state in the checkpoint directory: one file of each worker, written by the node that the worker is on.

    commit-0000000123.era-0000000004/
        state-00000-of-00004.safetensors        what worker 0 has committed, as it lies in memory
        part-00000-of-00004.json                size and checksums of that, written after it
        …
        DONE                                    all of them, written by the node whose part comes last

A part is the snapshot that the worker made (``edl.wire.snapshot``): a plain safetensors file whose header says which
piece of which tensor each array is. So a checkpoint is the same whether it was saved or is what launchers had when a
job failed, and it is read at any world size (``edl.checkpoint``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from edl.checkpoint.directory import manifest as text
from edl.checkpoint.directory.manifest import MARKER_FILE, Marker, Sum, folder_name
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.messages import Version

Put = Callable[[str, memoryview, bool], Sum]
_NUMBER = re.compile(r"state-(\d+)-of-")


def shard_of(name: str, shards: int) -> int:
    """Whose part a file is. Raises ``CheckpointError`` for a name that is none of a state in so many parts."""
    found = _NUMBER.match(name)
    shard = int(found[1]) if found else 0
    if shard >= shards or name != text.state_file(shard, shards):
        raise CheckpointError(f"{name} is no part of a state in {shards}")
    return shard


class Parts:
    """Writes parts. For any thread, as long as no two write the same part."""

    def __init__(
        self,
        files: Files,
        marker: Callable[[Version, int, dict[str, Sum]], Marker],
        put: Put,
        delete: Callable[[str], None],
    ) -> None:
        """``marker`` makes one in this run's name, ``put`` writes a file and adds it up, ``delete`` clears a folder."""
        self._files = files
        self._marker = marker
        self._put = put
        self._delete = delete
        self._failed: set[Version] = set()

    def write(self, version: Version, data: memoryview, shard: int, shards: int) -> None:
        """Write one part, unless this run has written it. Raises ``OSError``, and leaves then nothing of the part."""
        self._clear(version)
        folder = folder_name(version)
        name, record = text.state_file(shard, shards), text.part_file(shard, shards)
        if self._is_done(folder, version):
            return
        there = self._part(folder, version, shard, shards)
        if there is not None and not text.why_sizes_differ(there, self._sizes(folder)):
            return
        try:
            self._files.remove(f"{folder}/{record}")
            part = self._marker(version, shards, {name: self._put(f"{folder}/{name}", data, True)})
            self._files.write(f"{folder}/{record}", [text.marker_text(part)])
        except OSError:
            for file in (record, name):
                with contextlib.suppress(OSError):
                    self._files.remove(f"{folder}/{file}")
            raise

    def give_up(self, version: Version) -> None:
        """Leave nothing of a checkpoint of which one part cannot be written: it will never be complete, and would take
        the room that the next one needs."""
        self._failed.add(version)
        with contextlib.suppress(OSError):
            self._drop(version)

    def all(self, version: Version, shards: int) -> dict[str, Sum] | None:
        """Every part with its checksums; None while some are missing, nothing when the checkpoint counts already."""
        folder = folder_name(version)
        names = {entry.name for entry in self._files.entries(folder)}
        if any(text.part_file(shard, shards) not in names for shard in range(shards)):
            return None  # each part asks, of perhaps a thousand: only the last ones read what the others say
        if self._is_done(folder, version):
            return {}
        found: dict[str, Sum] = {}
        for shard in range(shards):
            part = self._part(folder, version, shard, shards)
            if part is None:
                return None
            found.update(part.files)
        return None if text.why_sizes_differ(self._marker(version, shards, found), self._sizes(folder)) else found

    def _part(self, folder: str, version: Version, shard: int, shards: int) -> Marker | None:
        """The record of a part that this run has written."""
        try:
            found = text.parse_marker(self._files.read(f"{folder}/{text.part_file(shard, shards)}"))
        except (FileNotFoundError, CheckpointError):
            return None
        ours = self._marker(version, shards, {})
        fits = (found.run, found.version, found.shards, found.format) == (ours.run, version, shards, text.PARTS_FORMAT)
        return found if fits else None

    def _sizes(self, folder: str) -> dict[str, int]:
        return {entry.name: entry.size for entry in self._files.entries(folder)}

    def _is_done(self, folder: str, version: Version) -> bool:
        """Whether the checkpoint counts. A marker that is not right goes: the parts are written anew."""
        try:
            found = text.parse_marker(self._files.read(f"{folder}/{MARKER_FILE}"))
        except FileNotFoundError:
            return False
        except CheckpointError:
            self._files.remove(f"{folder}/{MARKER_FILE}")
            return False
        ours = self._marker(version, found.shards, {})
        if found.job != ours.job:
            raise CheckpointError(
                f"{self._files.path(folder)} was written by job {found.job} and is not replaced: "
                "choose another --checkpoint-dir"
            )
        if found.version == version and not text.why_sizes_differ(found, self._sizes(folder)):
            return True
        self._files.remove(f"{folder}/{MARKER_FILE}")
        return False

    def _clear(self, now: Version) -> None:
        """Others may have written parts of a checkpoint after this node had given it up."""
        for version in sorted(self._failed - {now}):
            with contextlib.suppress(OSError):
                self._drop(version)
                self._failed.discard(version)

    def _drop(self, version: Version) -> None:
        if not self._is_done(folder_name(version), version):
            self._delete(folder_name(version))
