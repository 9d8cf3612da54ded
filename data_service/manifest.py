"""The shards of a data set: file, begin and end. A million shards are a few arrays, not a million objects.

The encoding is a line of JSON, then parts compressed by zlib. Shard edges are stored as differences, mostly the same
few numbers, so a million shards take a few kB to some hundred kB.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edl.errors import DataError

if TYPE_CHECKING:
    Longs = array[int]

RECORD_FORMATS = ("ipc", "parquet")
"""Formats in which begin and end of a shard count records."""
LINE_FORMATS = ("csv", "jsonl", "text")
"""Formats in which begin and end of a shard are byte offsets; the number of records is only known after reading."""
TYPELESS = ("csv", "jsonl")
"""Formats whose files do not declare the types of their columns."""
USER_FORMAT = "user"
"""Format in which the user's functions define begin and end."""
FORMATS = (*RECORD_FORMATS, *LINE_FORMATS, USER_FORMAT)
UNKNOWN = -1
"""Number of records of a shard or data set that has not been read."""
NAMED_FILES = 5
"""Most files that are named in a message; the rest are counted."""

_MAGIC = b"edl-manifest-1 "
_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One shard. In record formats: records ``[begin, end)`` of the file; in line formats: the lines that begin in
    these bytes."""

    index: int
    file: str
    begin: int
    end: int
    records: int
    """Number of records; -1 until it is read."""
    size_bytes: int = -1
    """Size of the file when it was listed; -1 if unknown."""


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file of a data set, and its shards."""

    path: str
    size_bytes: int
    first: int
    """Number of its first shard."""
    shards: int


class Manifest:
    """An immutable, ordered list of shards. Created by ``ManifestBuilder`` or ``decode``."""

    __slots__ = ("_counts", "_edges", "_firsts", "_paths", "_sizes", "digest", "format", "records")

    def __init__(
        self,
        format: str,
        paths: list[str],
        sizes: Longs,
        firsts: Longs,
        edges: Longs,
        counts: Longs | None,
        parts: tuple[bytes, ...] = (),
        digest: str = "",
    ) -> None:
        """``edges``: begin and end of each shard in turn. ``counts``: records of each shard; None if they are ``end -
        begin`` (record formats) or unknown (other formats). ``parts``: see ``_parts``, if available. ``digest``: if it
        differs from that of the content."""
        self.format = format
        self._paths, self._sizes, self._firsts, self._edges, self._counts = paths, sizes, firsts, edges, counts
        self.records = self._total()
        """Number of records in all shards; -1 if one is unknown."""
        self.digest = digest or _digest(format, parts or self._parts())
        """Hexadecimal digest of format, paths, sizes and shard edges."""

    def __len__(self) -> int:
        return len(self._edges) // 2

    @property
    def size_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(self._sizes)

    def ref(self, index: int) -> ShardRef:
        """The shard with this number. Raises ``IndexError``."""
        edges = self._edges
        if not 0 <= 2 * index < len(edges):
            raise IndexError(f"shard {index} of {len(self)}")
        begin, end = edges[2 * index], edges[2 * index + 1]
        records = end - begin if self._counts is None and self.format in RECORD_FORMATS else self.count(index)
        file = bisect_right(self._firsts, index) - 1
        return ShardRef(index, self._paths[file], begin, end, records, self._sizes[file])

    def rows(self, begun: Iterable[tuple[int, int]]) -> tuple[list[list[int]], list[str], list[int]]:
        """Many shards, each given with a number, as rows of integers: shard, that number, index of the file, begin,
        end, records. Also returns the files' paths and sizes. Ten times as fast as ``ref``."""
        edges, counts, firsts = self._edges, self._counts, self._firsts
        exact = counts is None and self.format in RECORD_FORMATS
        files: dict[int, int] = {}
        rows = []
        for index, upto in begun:
            begin, end = edges[2 * index], edges[2 * index + 1]
            file = files.setdefault(bisect_right(firsts, index) - 1, len(files))
            rows.append([index, upto, file, begin, end, end - begin if exact else counts[index] if counts else UNKNOWN])
        return rows, [self._paths[file] for file in files], [self._sizes[file] for file in files]

    def count(self, index: int) -> int:
        """Number of records in a shard; -1 if unknown."""
        if self._counts is not None:
            return self._counts[index]
        if self.format in RECORD_FORMATS:
            return self._edges[2 * index + 1] - self._edges[2 * index]
        return UNKNOWN

    @property
    def file_count(self) -> int:
        """Number of files, with or without shards."""
        return len(self._paths)

    def paths_and_sizes(self) -> Iterable[tuple[str, int]]:
        """Paths and sizes of all files, in order."""
        return zip(self._paths, self._sizes, strict=True)

    def joined(self, others: Sequence[Manifest], digest: str) -> Manifest:
        """Append the shards of other manifests, which are renumbered. ``digest``: that of the result. Joining many at
        once takes time proportional to the total size."""
        sizes, firsts, edges = self._sizes[:], self._firsts[:], self._edges[:]
        for one in others:
            shards = len(edges) // 2
            firsts.extend(array("q", (first + shards for first in one._firsts)))
            sizes.extend(one._sizes)
            edges.extend(one._edges)
        parts = (self, *others)
        counts: Longs | None = None
        if any(one._counts is not None for one in parts):
            counts = array("q", (one.count(shard) for one in parts for shard in range(len(one))))
        paths = list(itertools.chain.from_iterable(one._paths for one in parts))
        return Manifest(self.format, paths, sizes, firsts, edges, counts, digest=digest)

    @property
    def files(self) -> tuple[FileRef, ...]:
        """All files in order, with or without shards."""
        ends = itertools.chain(itertools.islice(self._firsts, 1, None), (len(self),))
        return tuple(
            FileRef(path, size, first, end - first)
            for path, size, first, end in zip(self._paths, self._sizes, self._firsts, ends, strict=False)
        )

    def describe(self) -> str:
        """A summary: ``12 files, 4,096 shards, 1,234,567 records``."""
        records = "" if self.records == UNKNOWN else f", {counted(self.records, 'record')}"
        return f"{counted(len(self._paths), 'file')}, {counted(len(self), 'shard')}{records}"

    def difference(self, other: Manifest) -> str:
        """How ``other`` differs, as text; empty if it does not."""
        if self.digest == other.digest:
            return ""
        if self.format != other.format:
            return f"format {other.format} instead of {self.format}"
        mine, theirs = (
            dict(zip(self._paths, self._sizes, strict=True)),
            dict(zip(other._paths, other._sizes, strict=True)),
        )
        found = [
            named("added", [path for path in theirs if path not in mine]),
            named("removed", [path for path in mine if path not in theirs]),
            named(
                "with another size",
                [
                    f"{path} ({theirs[path]:,} bytes instead of {size:,})"
                    for path, size in mine.items()
                    if path in theirs and theirs[path] != size
                ],
            ),
        ]
        text = "; ".join(part for part in found if part)
        if text:
            return text
        if len(self) == len(other) and self._paths != other._paths:
            return "the same files in a different order"
        return f"the same files, split differently: {len(other):,} shards instead of {len(self):,}"

    def encode(self) -> bytes:
        """Encode as bytes: a line of JSON, then compressed parts."""
        parts = [zlib.compress(part, 1) for part in self._parts()]
        head = {
            "format": self.format,
            "digest": self.digest,
            "shards": len(self),
            "counts": self._counts is not None,
            "parts": [len(part) for part in parts],
        }
        return b"".join([_MAGIC, json.dumps(head).encode("ascii"), b"\n", *parts])

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The inverse of ``encode``. Raises ``DataError`` if it is damaged or of another version."""
        try:
            manifest, digest = _decoded(cls, data)
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error, OverflowError, RecursionError) as error:
            raise DataError(f"cannot read a manifest of {len(data):,} bytes: {error}; scan the files again") from None
        if manifest.digest != digest:
            raise DataError(
                f"a manifest states digest {digest[:12]} but has {manifest.digest[:12]}; scan the files again"
            )
        return manifest

    def _parts(self) -> tuple[bytes, ...]:
        paths = json.dumps(self._paths, separators=(",", ":")).encode("ascii")
        edges = self._edges
        steps = array("q", itertools.chain(edges[:1], map(operator.sub, itertools.islice(edges, 1, None), edges)))
        counts = b"" if self._counts is None else _little(self._counts)
        return paths, _little(self._sizes), _little(self._firsts), _little(steps), counts

    def _total(self) -> int:
        if self._counts is not None:
            return UNKNOWN if UNKNOWN in self._counts else sum(self._counts)
        if self.format in RECORD_FORMATS:
            return sum(itertools.islice(self._edges, 1, None, 2)) - sum(itertools.islice(self._edges, 0, None, 2))
        return 0 if not self._edges else UNKNOWN


class ManifestBuilder:
    """Collects files and their shards, in the order in which they are numbered."""

    def __init__(self, format: str) -> None:
        """Raises ``DataError`` for an unknown format (see ``FORMATS``)."""
        if format not in FORMATS:
            raise DataError(f"unknown data format {format!r}; available are {', '.join(FORMATS)}")
        self._format = format
        self._paths: list[str] = []
        self._known: set[str] = set()
        self._sizes, self._firsts = array("q"), array("q")
        self._edges, self._counts = array("q"), array("q")
        self._plain = True

    def file(self, path: str, size_bytes: int) -> None:
        """Add the next file. Raises ``DataError`` if it is already listed, because its records would be read twice."""
        if path in self._known:
            raise DataError(f"{path} is listed twice, so its records would be read twice. List it once")
        if not 0 <= size_bytes < _LIMIT:
            raise DataError(f"{path}: invalid size, {size_bytes} bytes")
        self._known.add(path)
        self._paths.append(path)
        self._sizes.append(size_bytes)
        self._firsts.append(len(self._counts))

    def shard(self, begin: int, end: int, records: int) -> None:
        """Add the next shard of the last file. Raises ``DataError`` for invalid numbers."""
        if not self._paths:
            raise DataError("a shard before the first file; call file() first")
        plain = end - begin if self._format in RECORD_FORMATS else UNKNOWN
        if not 0 <= begin <= end < _LIMIT or (self._format in RECORD_FORMATS and records != plain) or records < UNKNOWN:
            raise DataError(
                f"{self._paths[-1]}: a shard from {begin} to {end} with {records} records is invalid in format "
                f"{self._format}"
            )
        self._edges.append(begin)
        self._edges.append(end)
        self._counts.append(records)
        self._plain = self._plain and records == plain

    def build(self) -> Manifest:
        """The manifest of what has been added so far. The builder can be used further without changing it."""
        counts = None if self._plain else self._counts[:]
        return Manifest(self._format, self._paths[:], self._sizes[:], self._firsts[:], self._edges[:], counts)


def counted(number: int, what: str) -> str:
    """A number with a noun: ``1 file``, ``2,048 files``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def named(how: str, files: list[str]) -> str:
    """A list of files for messages: ``2 files added: a, b``; empty for none."""
    if not files:
        return ""
    rest = f" and {len(files) - NAMED_FILES:,} more" if len(files) > NAMED_FILES else ""
    return f"{counted(len(files), 'file')} {how}: {', '.join(files[:NAMED_FILES])}{rest}"


def _little(numbers: Longs) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _longs(data: bytes) -> Longs:
    numbers = array("q")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _digest(format: str, parts: tuple[bytes, ...]) -> str:
    sum_ = hashlib.blake2b(format.encode("utf-8"), digest_size=16)
    for part in parts:
        sum_.update(len(part).to_bytes(8, "little"))
        sum_.update(part)
    return sum_.hexdigest()


def _decoded(make: Callable[..., Manifest], data: bytes) -> tuple[Manifest, str]:
    """Decode a manifest; also return the digest that it should have. Raises various errors for invalid data."""
    head_bytes, newline, rest = data.partition(b"\n")
    if not newline or not head_bytes.startswith(_MAGIC):
        raise ValueError(f"it does not begin with {_MAGIC.decode('ascii')!r}")
    head = json.loads(head_bytes[len(_MAGIC) :])
    if head["format"] not in FORMATS:
        raise ValueError(f"format {head['format']!r} is not known")
    if len(head["parts"]) != 5 or sum(head["parts"]) != len(rest):
        raise ValueError(f"{len(rest):,} bytes follow the head, {head['parts']} are announced")
    ends = list(itertools.accumulate(head["parts"]))
    parts = [zlib.decompress(rest[end - size : end]) for end, size in zip(ends, head["parts"], strict=True)]
    paths = json.loads(parts[0])
    sizes, firsts = _longs(parts[1]), _longs(parts[2])
    edges = array("q", itertools.accumulate(_longs(parts[3])))
    counts = _longs(parts[4]) if head["counts"] else None
    shards = len(edges) // 2
    if not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
        raise ValueError("its paths are not a list of texts")
    if not len(paths) == len(sizes) == len(firsts) or len(edges) % 2 or shards != head["shards"]:
        raise ValueError("its parts are of different lengths")
    if shards and (not firsts or firsts[0] != 0 or min(edges) < 0 or max(firsts) > shards):
        raise ValueError("its shards lie outside its files")
    if counts is not None and len(counts) != shards:
        raise ValueError("its counts have a different length")
    if any(map(operator.gt, itertools.islice(edges, 0, None, 2), itertools.islice(edges, 1, None, 2))):
        raise ValueError("a shard ends before it begins")
    if any(map(operator.gt, firsts, itertools.islice(firsts, 1, None))):
        raise ValueError("its files are not in order")
    return make(head["format"], paths, sizes, firsts, edges, counts, tuple(parts)), str(head["digest"])
