"""The files of a data set as a list that only grows: one segment after another, each with the epoch it joins.

Epoch ``e`` consists of the segments whose ``epoch`` is at most ``e``. Epochs of segments never fall, so the shards of
any epoch are the first ``n`` of the list, and a shard keeps its number for good. The digest of a list is chained: that
of a longer list depends on the shorter one, so a position can be held against the list it was taken in.

A list is stored and sent as bytes that are appended to: what somebody has of it is a prefix of what it becomes.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from data_service.manifest import Manifest, ManifestBuilder, named
from edl.errors import DataError

_MAGIC = b"edl-files-1 "
SEGMENT_FILES = 200_000
"""So many files are scanned, encoded and sent at once."""


@dataclass(frozen=True, slots=True)
class ListSegment:
    """Files that were added together."""

    epoch: int
    """The first epoch they belong to."""
    named: bool
    """Added by name (``edl data add``, ``Data.add``): the data set's own patterns may not find them."""
    shards: int
    """Of the list up to here, this segment included."""
    digest: str
    """Of the list up to here."""
    blob: bytes
    """``Manifest.encode()`` of its own files."""

    def head(self) -> bytes:
        """A line of JSON."""
        head = {"epoch": self.epoch, "named": int(self.named), "shards": self.shards, "digest": self.digest}
        return b"".join([_MAGIC, json.dumps({**head, "bytes": len(self.blob)}).encode("ascii"), b"\n"])

    def encode(self) -> bytes:
        """The head, then the manifest."""
        return self.head() + self.blob


@dataclass(frozen=True, slots=True)
class ListVersion:
    """What a list is after some of its segments."""

    shards: int
    digest: str
    number: int = 0
    """Segments that it has."""


class FileList:
    """Segments and their shards. It only gets longer: by ``append``, or by segments of somebody else's list that are
    added to ``segments``. A list may grow by a file a minute for weeks, so nothing goes over all of it for one more
    segment: what follows from the segments is made when it is asked for, and of the new ones only."""

    __slots__ = ("_counts", "_ends", "_heads", "_lock", "_parts", "_sizes", "segments")

    def __init__(self, segments: Sequence[ListSegment] = ()) -> None:
        self.segments = list(segments)
        self._lock: AbstractContextManager[Any] = nullcontext()
        self._parts: list[Manifest] = []
        """Together they are the manifest of the segments that have been looked at; joined when it is asked for."""
        self._counts: list[int] = []
        """Files of each segment that has been looked at."""
        self._heads: list[bytes] = []
        """Of the first segments, encoded."""
        self._ends: list[int] = []
        """Where those segments end in ``encode()``."""
        self._sizes: dict[str, int] | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> FileList:
        """A list of one segment, there from the beginning."""
        files = cls()
        files.append(manifest.encode(), 0, decoded=manifest)
        return files

    def shared(self, lock: AbstractContextManager[Any]) -> FileList:
        """The same, for several threads: held while it changes. May be taken again by who has it."""
        self._lock = lock
        return self

    def __len__(self) -> int:
        """Shards."""
        return self.segments[-1].shards if self.segments else 0

    @property
    def digest(self) -> str:
        """Of the whole list."""
        return self.segments[-1].digest if self.segments else ""

    @property
    def manifest(self) -> Manifest:
        """All of it. Raises ``DataError`` when what was decoded is damaged."""
        with self._lock:
            self._look()
            if not self._parts:
                raise LookupError("a list of no files")
            if len(self._parts) > 1:
                first, *others = self._parts
                self._parts = [first.joined(others, self.segments[len(self._counts) - 1].digest)]
            return self._parts[0]

    def append(self, blob: bytes, epoch: int, *, named: bool = False, decoded: Manifest | None = None) -> ListSegment:
        """More files. They join no epoch before one that earlier files wait for. Raises ``DataError``."""
        part = decoded or Manifest.decode(blob)
        with self._lock:
            self._look()
            before = self.segments[-1] if self.segments else None
            if before is not None:
                epoch = max(epoch, before.epoch)
                if part.format != self._parts[0].format:
                    raise DataError(f"files of format {part.format} cannot join ones of format {self._parts[0].format}")
            segment = ListSegment(epoch, named, *_after(before, part), blob)
            self.segments.append(segment)
            self._take(part)
        return segment

    def at(self, epoch: int) -> ListVersion:
        """The list as this epoch sees it. The first segment is in all of them."""
        return self.version(bisect_right(self.segments, epoch, 1, key=lambda one: one.epoch))

    def version(self, number: int) -> ListVersion:
        """What it is, or was, with so many segments."""
        segment = self.segments[number - 1]
        return ListVersion(segment.shards, segment.digest, number)

    def knows(self, digest: str, shards: int | None = None) -> bool:
        """Whether this is the digest of this list, or of what it was at some time, most likely of late."""
        return any(one.digest == digest and shards in (None, one.shards) for one in reversed(self.segments))

    def extends(self, other: FileList) -> bool:
        """Whether it is the other one, or what has become of it."""
        return not other.segments or self.knows(other.digest, len(other))

    def sizes(self) -> dict[str, int]:
        """Size by path of all files. Made once it is needed: 100 bytes a file."""
        with self._lock:
            self._look()
            if self._sizes is None:
                self._sizes = dict(self.manifest.paths_and_sizes()) if self.segments else {}
            return self._sizes

    def own_paths(self) -> Iterator[str]:
        """Files that the data set's own patterns have found, not ones that were added by name."""
        if not self.segments:
            return
        files = iter(self.manifest.paths_and_sizes())
        for segment, count in zip(self.segments, self._counts, strict=False):
            yield from (path for path, _ in itertools.islice(files, count) if not segment.named)

    def encode(self) -> bytes:
        """As bytes that only get longer."""
        with self._lock:
            self._encode_heads()
            segments = zip(self._heads, self.segments, strict=False)
            return b"".join(part for head, segment in segments for part in (head, segment.blob))

    @property
    def encoded_bytes(self) -> int:
        """Of ``encode()``."""
        with self._lock:
            self._encode_heads()
            return self._ends[-1] if self._ends else 0

    def encoded_part(self, begin: int, size: int) -> bytes:
        """``encode()[begin : begin + size]``, without making the rest of it."""
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
        """Of what ``encode`` gave, or of an encoded manifest. Raises ``DataError``."""
        if not data:
            return cls()
        if not data.startswith(_MAGIC):
            return cls.of(Manifest.decode(data))
        files, at = cls(), 0
        while at < len(data):
            at = files._decode_one(data, at)
        return files

    def _decode_one(self, data: bytes, begin: int) -> int:
        """Take the segment that begins there; where it ends. What is in it is looked at when it is needed. Nothing but
        the segment is copied: there may be many thousands of them."""
        line_end = data.find(b"\n", begin)
        try:
            if line_end < 0 or not data.startswith(_MAGIC, begin):
                raise ValueError(f"a segment does not begin with {_MAGIC.decode('ascii')!r}")
            head: dict[str, Any] = json.loads(data[begin + len(_MAGIC) : line_end])
            size, start = int(head["bytes"]), line_end + 1
            segment = _segment(head, data[start : max(start, start + size)])
            if len(segment.blob) != size or segment.shards < len(self):
                raise ValueError(f"a segment of {size:,} bytes is not whole")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"a list of files cannot be read: {error}; scan the files again") from None
        self.segments.append(segment)
        return start + size

    def _look(self) -> None:
        """Decode, and check, the segments that nobody has looked at. Raises ``DataError``."""
        while len(self._counts) < len(self.segments):
            number = len(self._counts)
            segment = self.segments[number]
            part = Manifest.decode(segment.blob)
            before = self.segments[number - 1] if number else None
            falls = before is not None and segment.epoch < before.epoch
            if falls or _after(before, part) != (segment.shards, segment.digest):
                raise DataError(f"a list of files is damaged: its segment {number} is another; scan them again")
            self._take(part)

    def _take(self, part: Manifest) -> None:
        """These are the files of the first segment that nobody has looked at."""
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
    return ListSegment(int(head["epoch"]), bool(head["named"]), int(head["shards"]), str(head["digest"]), blob)


def _after(before: ListSegment | None, part: Manifest) -> tuple[int, str]:
    """Shards and digest of a list after these files have been appended."""
    if before is None:
        return len(part), part.digest
    chained = hashlib.blake2b(f"{before.digest} {part.digest}".encode("ascii"), digest_size=16).hexdigest()
    return before.shards + len(part), chained


@dataclass(frozen=True, slots=True)
class Sorted:
    """Files that somebody has found, held against a list."""

    fresh: Manifest
    """Those that the list does not have."""
    known: int
    """Those that it has, with the same size."""


def sort_out(files: FileList, found: Manifest) -> Sorted:
    """Which of these files are new. Raises ``DataError`` that names those that were changed since they were listed."""
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
        raise DataError(f"{named('of another length than when they were listed', changed)}. {REPLACED}")
    return Sorted(chosen(found, fresh), found.file_count - len(fresh))


REPLACED = "Files of a data set must stay as they are: put the new content under a new name"


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


def pieces(manifest: Manifest, most: int = SEGMENT_FILES) -> Iterator[Manifest]:
    """The same files in manifests of at most so many."""
    for begin in range(0, max(1, manifest.file_count), most):
        yield chosen(manifest, range(begin, min(begin + most, manifest.file_count)))


def with_files(position: str, files: FileList) -> str:
    """A position as text, with the list that it belongs to: whoever takes it up again may find more files."""
    told = json.loads(position)
    return json.dumps({**told, "files": base64.b64encode(files.encode()).decode("ascii")}, separators=(",", ":"))


def files_of(position: str) -> FileList:
    """The list that comes with a position; empty if none does. Raises ``DataError``."""
    try:
        data = base64.b64decode(json.loads(position).get("files", ""), validate=True)
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"a position in a data set cannot be read: {error}") from None
    return FileList.decode(data)
