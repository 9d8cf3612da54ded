"""The files of a data set as an append-only list of segments, each with the epoch that it joins.

Epoch ``e`` consists of the segments whose ``epoch`` is at most ``e``. Epochs of segments never decrease, so the shards
of any epoch are a prefix of the list, and a shard keeps its number. Digests are chained: the digest of a longer list
depends on that of the shorter one, so a position can be checked against the list it was taken in.

A list is stored and sent as bytes that are only appended to: any received part is a prefix of the final encoding.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from data_service.manifest import Manifest, ManifestBuilder, named
from edl.errors import DataError

_MAGIC = b"edl-files-1 "
SEGMENT_FILES = 200_000
"""Most files that are scanned, encoded and sent at once."""


@dataclass(frozen=True, slots=True)
class ListSegment:
    """Files that were added together."""

    epoch: int
    """The first epoch that the files belong to."""
    named: bool
    """True if added by name (``edl data add``, ``Data.add``): the data set's own patterns may not match them."""
    shards: int
    """Shards of the list up to and including this segment."""
    digest: str
    """Digest of the list up to and including this segment."""
    blob: bytes
    """``Manifest.encode()`` of the segment's files."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Types of columns that the files do not declare, by pyarrow's names (``FormatOptions.types``)."""

    def head(self) -> bytes:
        """Encode the header: one line of JSON."""
        head = {"epoch": self.epoch, "named": int(self.named), "shards": self.shards, "digest": self.digest}
        if self.types:
            head["types"] = dict(self.types)
        return b"".join([_MAGIC, json.dumps({**head, "bytes": len(self.blob)}).encode("ascii"), b"\n"])

    def encode(self) -> bytes:
        """Encode the header and the manifest."""
        return self.head() + self.blob


@dataclass(frozen=True, slots=True)
class ListVersion:
    """A prefix of a list."""

    shards: int
    digest: str
    number: int = 0
    """Number of segments."""


class FileList:
    """An append-only list of segments and their shards.

    It grows by ``append``, or by adding another list's segments to ``segments``. A list may grow by a file a minute for
    weeks, so no operation traverses all of it for one more segment: derived data are computed on demand, from new
    segments only.
    """

    __slots__ = ("_counts", "_ends", "_heads", "_lock", "_parts", "_sizes", "segments")

    def __init__(self, segments: Sequence[ListSegment] = ()) -> None:
        self.segments = list(segments)
        self._lock: AbstractContextManager[Any] = nullcontext()
        self._parts: list[Manifest] = []
        """Parts of the decoded manifest; joined on demand."""
        self._counts: list[int] = []
        """Number of files in each decoded segment."""
        self._heads: list[bytes] = []
        """Encoded headers of the first segments."""
        self._ends: list[int] = []
        """End offsets of those segments in ``encode()``."""
        self._sizes: dict[str, int] | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> FileList:
        """A list of one segment, which is in all epochs."""
        return cls._of(manifest.encode(), manifest)

    @classmethod
    def _of(cls, encoded: bytes, manifest: Manifest) -> FileList:
        files = cls()
        files.append(encoded, 0, decoded=manifest)
        return files

    def shared(self, lock: AbstractContextManager[Any]) -> FileList:
        """Set the lock that is held during changes, for use by several threads; it must be reentrant. Returns the
        list."""
        self._lock = lock
        return self

    def __len__(self) -> int:
        """Number of shards in the whole list."""
        return self.segments[-1].shards if self.segments else 0

    @property
    def digest(self) -> str:
        """Digest of the whole list."""
        return self.segments[-1].digest if self.segments else ""

    @property
    def types(self) -> Mapping[str, str]:
        """Types of columns that the files do not declare, as found when the data set was first listed. They hold for
        all files, so that all workers read the same types."""
        return self.segments[0].types if self.segments else {}

    @property
    def manifest(self) -> Manifest:
        """The manifest of the whole list. Raises ``DataError`` if a segment is damaged, ``LookupError`` if there are
        none."""
        with self._lock:
            self._look()
            if not self._parts:
                raise LookupError("a list of no files")
            if len(self._parts) > 1:
                first, *others = self._parts
                self._parts = [first.joined(others, self.segments[len(self._counts) - 1].digest)]
            return self._parts[0]

    def append(
        self,
        blob: bytes,
        epoch: int,
        *,
        named: bool = False,
        decoded: Manifest | None = None,
        types: Mapping[str, str] | None = None,
    ) -> ListSegment:
        """Append files; they join no epoch earlier than the files before them. Raises ``DataError`` for another
        format."""
        part = decoded or Manifest.decode(blob)
        with self._lock:
            self._look()
            before = self.segments[-1] if self.segments else None
            if before is not None:
                epoch = max(epoch, before.epoch)
                if part.format != self._parts[0].format:
                    raise DataError(f"files of format {part.format} cannot join ones of format {self._parts[0].format}")
            segment = ListSegment(epoch, named, *_after(before, part), blob, types or {})
            self.segments.append(segment)
            self._take(part)
        return segment

    def at(self, epoch: int) -> ListVersion:
        """The version of the list in an epoch. The first segment is in all epochs."""
        return self.version(bisect_right(self.segments, epoch, 1, key=lambda one: one.epoch))

    def version(self, number: int) -> ListVersion:
        """The version with this many segments."""
        segment = self.segments[number - 1]
        return ListVersion(segment.shards, segment.digest, number)

    def knows(self, digest: str, shards: int | None = None) -> bool:
        """True if this is the digest of the list or of an earlier version. ``shards``: also require this number of
        shards. Searches newest first."""
        return any(one.digest == digest and shards in (None, one.shards) for one in reversed(self.segments))

    def extends(self, other: FileList) -> bool:
        """True if this list equals the other one or is an extension of it."""
        return not other.segments or self.knows(other.digest, len(other))

    def sizes(self) -> dict[str, int]:
        """Sizes of all files by path, computed on demand; takes 100 bytes per file."""
        with self._lock:
            self._look()
            if self._sizes is None:
                self._sizes = dict(self.manifest.paths_and_sizes()) if self.segments else {}
            return self._sizes

    def own_paths(self) -> Iterator[str]:
        """Files found by the data set's own patterns, not added by name."""
        if not self.segments:
            return
        files = iter(self.manifest.paths_and_sizes())
        for segment, count in zip(self.segments, self._counts, strict=False):
            yield from (path for path, _ in itertools.islice(files, count) if not segment.named)

    def encode(self) -> bytes:
        """Encode the whole list; the encoding of a longer list starts with it."""
        with self._lock:
            self._encode_heads()
            segments = zip(self._heads, self.segments, strict=False)
            return b"".join(part for head, segment in segments for part in (head, segment.blob))

    @property
    def encoded_bytes(self) -> int:
        """Length of ``encode()`` in bytes, without encoding the list."""
        with self._lock:
            self._encode_heads()
            return self._ends[-1] if self._ends else 0

    def encoded_part(self, begin: int, size: int) -> bytes:
        """``encode()[begin : begin + size]``, without building the rest."""
        found: list[memoryview] = []
        with self._lock:
            end = min(begin + size, self.encoded_bytes)
            number = bisect_right(self._ends, begin)
            at = self._ends[number - 1] if number else 0
            while at < end:
                for part in (self._heads[number], self.segments[number].blob):
                    found.append(memoryview(part)[max(0, begin - at) : max(0, end - at)])
                    at += len(part)
                number += 1
        return b"".join(found)

    @classmethod
    def decode(cls, data: bytes) -> FileList:
        """Decode a list, or an encoded manifest as a list of one segment. Raises ``DataError``."""
        if not data:
            return cls()
        if not data.startswith(_MAGIC):
            return cls._of(data, Manifest.decode(data))
        files, at = cls(), 0
        while at < len(data):
            at = files._decode_one(data, at)
        return files

    def _decode_one(self, data: bytes, begin: int) -> int:
        """Append the segment that begins at an offset, without decoding its content; return its end. Copies only the
        segment, as there may be many thousands."""
        line_end = data.find(b"\n", begin)
        try:
            if line_end < 0 or not data.startswith(_MAGIC, begin):
                raise ValueError(f"a segment does not begin with {_MAGIC.decode('ascii')!r}")
            head: dict[str, Any] = json.loads(data[begin + len(_MAGIC) : line_end])
            size, start = int(head["bytes"]), line_end + 1
            segment = _segment(head, data[start : max(start, start + size)])
            if len(segment.blob) != size or segment.shards < len(self):
                raise ValueError(f"a segment of {size:,} bytes is incomplete")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read a list of files: {error}; scan the files again") from None
        self.segments.append(segment)
        return start + size

    def _look(self) -> None:
        """Decode and verify new segments. Raises ``DataError``."""
        while len(self._counts) < len(self.segments):
            number = len(self._counts)
            segment = self.segments[number]
            part = Manifest.decode(segment.blob)
            before = self.segments[number - 1] if number else None
            falls = before is not None and segment.epoch < before.epoch
            if falls or _after(before, part) != (segment.shards, segment.digest):
                raise DataError(
                    f"a list of files is damaged: segment {number} does not match its digest; scan the files again"
                )
            self._take(part)

    def _take(self, part: Manifest) -> None:
        """Add the decoded files of the next segment."""
        self._parts.append(part)
        self._counts.append(part.file_count)
        if self._sizes is not None:
            self._sizes.update(part.paths_and_sizes())

    def _encode_heads(self) -> None:
        for segment in itertools.islice(self.segments, len(self._heads), None):
            head, end = segment.head(), self._ends[-1] if self._ends else 0
            self._heads.append(head)
            self._ends.append(end + len(head) + len(segment.blob))


def _segment(head: dict[str, Any], blob: bytes) -> ListSegment:
    types = {str(column): str(kind) for column, kind in dict(head.get("types", {})).items()}
    return ListSegment(int(head["epoch"]), bool(head["named"]), int(head["shards"]), str(head["digest"]), blob, types)


def _after(before: ListSegment | None, part: Manifest) -> tuple[int, str]:
    """Shards and digest of a list after these files are appended."""
    if before is None:
        return len(part), part.digest
    chained = hashlib.blake2b(f"{before.digest} {part.digest}".encode("ascii"), digest_size=16).hexdigest()
    return before.shards + len(part), chained


@dataclass(frozen=True, slots=True)
class ComparedFiles:
    """Found files compared with a list."""

    fresh: Manifest
    """Files that are not in the list."""
    known: int
    """Number of files that are in the list, with the same size."""


def compare_files(files: FileList, found: Manifest) -> ComparedFiles:
    """Split found files into new and known ones. Raises ``DataError`` that names files whose size has changed."""
    sizes = files.sizes()
    fresh: list[int] = []
    changed: list[str] = []
    for number, (path, size) in enumerate(found.paths_and_sizes()):
        before = sizes.get(path)
        if before is None:
            fresh.append(number)
        elif before != size:
            changed.append(f"{path} ({size:,} bytes instead of {before:,})")
    if changed:
        raise DataError(f"{named('whose size has changed since they were listed', changed)}. {REPLACED}")
    return ComparedFiles(chosen(found, fresh), found.file_count - len(fresh))


REPLACED = "Files of a data set must not change: put new content under a new name"


def chosen(manifest: Manifest, numbers: Sequence[int]) -> Manifest:
    """Some files of a manifest, in its order."""
    if len(numbers) == manifest.file_count:
        return manifest
    builder = ManifestBuilder(manifest.format)
    files = manifest.files
    for number in numbers:
        file = files[number]
        builder.file(file.path, file.size_bytes)
        for index in range(file.first, file.first + file.shards):
            ref = manifest.ref(index)
            builder.shard(ref.begin, ref.end, ref.records)
    return builder.build()


def pieces(manifest: Manifest) -> Iterator[Manifest]:
    """Split a manifest into manifests of at most ``SEGMENT_FILES`` files."""
    for begin in range(0, max(1, manifest.file_count), SEGMENT_FILES):
        yield chosen(manifest, range(begin, min(begin + SEGMENT_FILES, manifest.file_count)))


def with_files(position: str, files: FileList) -> str:
    """Add the file list to a position (JSON): a later job may find more files."""
    fields = json.loads(position)
    return json.dumps({**fields, "files": base64.b64encode(files.encode()).decode("ascii")}, separators=(",", ":"))


def files_of(position: str) -> FileList:
    """The file list in a position; empty if there is none. Raises ``DataError``."""
    try:
        data = base64.b64decode(json.loads(position).get("files", ""), validate=True)
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"cannot read a position in a data set: {error}") from None
    return FileList.decode(data)
