"""The bytes of one commit, in memory, on the wire and on disk: a safetensors file.

Eight bytes little-endian length of the header, the header in JSON, the arrays without holes between them; see
https://github.com/huggingface/safetensors (format). The entry ``edl`` of its ``__metadata__`` names the job and the
commit and holds ``tree``, the structure that contains the arrays (``edl.worker.tree``).
"""

from __future__ import annotations

import json
import marshal
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edl.errors import CheckpointError

FORMAT = 1
"""Version of the format of ``__metadata__["edl"]``. Other versions are refused."""
FILE_NAME = "state.safetensors"
ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Element types of the format, except those smaller than a byte."""
_LENGTH = struct.Struct("<Q")
HEADER_BYTES = _LENGTH.size
"""Number of bytes that hold the header's length."""
_ALIGNMENT = 64
"""Alignment of the data: a cache line, which also suits vector instructions."""
_LARGEST_HEADER = 100_000_000
"""Limit of the safetensors library; other programs could not read a larger header."""
_METADATA = "__metadata__"
_OWN_TEXTS = 2
"""Depth of the structure down to which the JSON of each part is cached separately."""
_NO_REFERENCES = 2
"""Version of ``marshal`` whose output depends only on the values."""


@dataclass(frozen=True, slots=True)
class Meta:
    """Identity of a snapshot."""

    job: str
    era: int
    commit: int
    round: int
    shard: int
    shards: int
    framework: str
    """Framework that wrote it: ``torch``, ``paddle``."""
    workers: int = 0
    """Workers of the world that wrote it; 0: an older edl wrote it, when each worker had a part of its own."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array to be written."""

    name: str
    dtype: str
    """A key of ``ELEMENT_BYTES``."""
    shape: tuple[int, ...]
    size: int
    """Size in bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of a snapshot: ``size`` bytes at ``offset`` of its buffer."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """How to fill a buffer: ``header`` at its start, then each array at its offset."""

    header: bytes
    leaves: tuple[tuple[str, int, int], ...]
    """``(name, offset, size)``, in the order in which the arrays were given."""
    size: int
    """Total number of bytes."""

    def write_header(self, buffer: memoryview) -> None:
        """Copy the header to the start of the buffer."""
        buffer[: len(self.header)] = self.header


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """Parsed header of a snapshot."""

    meta: Meta
    tree: Any
    entries: dict[str, Entry]
    size: int
    """Total number of bytes."""


class Layout:
    """Layout of a list of arrays; valid for every commit while names, dtypes and shapes stay the same."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        """Raises ``CheckpointError`` for a duplicate name, an unknown dtype, or a size that does not match the
        shape."""
        # Largest elements first, so that each array is aligned to its elements without padding.
        order = sorted(leaves, key=lambda leaf: (-_element_bytes(leaf), leaf.name))
        table: dict[str, dict[str, Any]] = {}
        starts: dict[str, int] = {}
        end = 0
        for leaf in order:
            if leaf.name in table or leaf.name == _METADATA:
                raise CheckpointError(f"two arrays of one snapshot would have the name {leaf.name!r}")
            starts[leaf.name] = end
            table[leaf.name] = {
                "dtype": leaf.dtype,
                "shape": list(leaf.shape),
                "data_offsets": [end, end + leaf.size],
            }
            end += leaf.size
        self.data_size = end
        self._table = _compact(table)[1:-1]
        self._leaves = tuple((leaf.name, starts[leaf.name], leaf.size) for leaf in leaves)
        self._placed: tuple[int, tuple[tuple[str, int, int], ...]] = (0, ())
        """Header length and leaves of the last plan."""
        self._texts: dict[tuple[str, ...], tuple[bytes, str]] = {}
        """Last value and its JSON, by place in the structure."""

    def plan(self, meta: Meta, tree: Any) -> SnapshotPlan:
        """The plan of one commit. ``tree``: JSON. Raises ``CheckpointError`` if the header would be too long."""
        about = _compact({"format": FORMAT, **asdict(meta)})
        ours = f'{about[:-1]},"tree":{self._text(tree)}}}'
        front = _compact({_METADATA: {"edl": ours}})
        text = f"{front[:-1]},{self._table}}}" if self._table else front
        length = -(-(_LENGTH.size + len(text)) // _ALIGNMENT) * _ALIGNMENT
        if length - _LENGTH.size > _LARGEST_HEADER:
            raise CheckpointError(
                f"the structure of the state takes {len(text)} bytes, {_LARGEST_HEADER} are allowed: keep large lists "
                "of numbers as arrays"
            )
        header = _LENGTH.pack(length - _LENGTH.size) + text.encode("ascii").ljust(length - _LENGTH.size)
        if self._placed[0] != length:
            self._placed = length, tuple((name, length + start, size) for name, start, size in self._leaves)
        return SnapshotPlan(header, self._placed[1], length + self.data_size)

    def _text(self, part: Any, *path: str) -> str:
        """JSON of the structure, most of which is unchanged since the last commit."""
        if len(path) < _OWN_TEXTS and type(part) is dict:
            inside = [f"{_compact(key)}:{self._text(value, *path, key)}" for key, value in part.items()]
            return f"{{{','.join(inside)}}}"
        exact = marshal.dumps(part, _NO_REFERENCES)  # unlike ==, it tells 1 from 1.0 and True, and 0.0 from -0.0
        before, text = self._texts.get(path, (b"", ""))
        if exact != before:
            text = _compact(part)
            self._texts[path] = exact, text
        return text


def plan(leaves: Iterable[tuple[str, str, tuple[int, ...], int]], meta: Meta, tree: Any) -> SnapshotPlan:
    """The plan for arrays given as ``(name, dtype, shape, size)``; keep a ``Layout`` to plan often."""
    return Layout([Leaf(*leaf) for leaf in leaves]).plan(meta, tree)


def header_bytes(start: bytes | memoryview) -> int:
    """Offset of the data, from the first eight bytes. Raises ``CheckpointError``."""
    if len(start) < _LENGTH.size:
        raise CheckpointError(f"not a snapshot: {len(start)} bytes are too few for a header")
    (length,) = _LENGTH.unpack(start[: _LENGTH.size])
    if length > _LARGEST_HEADER:
        raise CheckpointError(f"not a snapshot: its header would be {length} bytes long")
    return _LENGTH.size + int(length)


def raw_header(view: memoryview) -> bytes:
    """The header of a snapshot, with its length, as ``parse_header`` takes it. Raises ``CheckpointError``."""
    return bytes(view[: header_bytes(view[:HEADER_BYTES])])


def same_layout(header: bytes, other: bytes) -> bool:
    """Whether the arrays of two snapshots lie at the same places, by their headers as ``raw_header`` returns them. They
    do not if the values beside the arrays take more characters in one of them."""
    return header == other or (len(header) == len(other) and _table(header) == _table(other))


def _table(header: bytes) -> Any:
    try:
        table = json.loads(header[_LENGTH.size :])
        return {name: table[name] for name in table if name != _METADATA}
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"not a snapshot: its header is not valid JSON of a snapshot ({error})") from error


def parse(buffer: bytes | bytearray | memoryview, *, job: str = "") -> SnapshotHeader:
    """Read and check a whole snapshot, which fills the buffer exactly. Looks at the header only, not at the data.

    ``job``: the job to which it must belong; empty: any. Raises ``CheckpointError``.
    """
    view = memoryview(buffer)
    try:
        start = header_bytes(view)
        if start > len(view):
            raise CheckpointError(f"truncated: the header ends at byte {start}, the snapshot at {len(view)}")
        return parse_header(bytes(view[:start]), len(view), job=job)
    finally:
        view.release()


def parse_header(header: bytes, size: int, *, job: str = "") -> SnapshotHeader:
    """Like ``parse``, from the header (with its length prefix) and the total size only."""
    start = header_bytes(header)
    try:
        table = json.loads(header[_LENGTH.size : start])
        metadata = table.pop(_METADATA, {})
        ours = json.loads(metadata["edl"]) if "edl" in metadata else None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"not a snapshot: its header is not valid JSON of a snapshot ({error})") from error
    meta, tree = _read_meta(ours, job)
    entries = {name: _read_entry(name, fields, start) for name, fields in table.items()}
    _check_coverage(entries, start, size)
    return SnapshotHeader(meta, tree, entries, size)


def folder_name(era: int, commit: int) -> str:
    """The folder of a commit in the checkpoint directory."""
    return f"commit-{commit:010d}.era-{era:010d}"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _element_bytes(leaf: Leaf) -> int:
    width = ELEMENT_BYTES.get(leaf.dtype)
    if width is None:
        raise CheckpointError(f"{leaf.name}: a safetensors file cannot hold elements of type {leaf.dtype}")
    if any(length < 0 for length in leaf.shape) or math.prod(leaf.shape) * width != leaf.size:
        raise CheckpointError(f"{leaf.name}: {leaf.dtype} of shape {leaf.shape} does not take {leaf.size} bytes")
    return width


def _read_meta(ours: Any, job: str) -> tuple[Meta, Any]:
    if not isinstance(ours, dict):
        raise CheckpointError("a safetensors file, but not one of edl: its metadata lacks the entry 'edl'")
    version = ours.get("format")
    if version != FORMAT:
        raise CheckpointError(
            f"written in format {version!r}, this edl reads format {FORMAT}: "
            "use the edl that wrote it, or another checkpoint directory"
        )
    texts: dict[str, Any] = {key: ours.get(key) for key in ("job", "framework")}
    numbers: dict[str, Any] = {key: ours.get(key) for key in ("era", "commit", "round", "shard", "shards")}
    numbers["workers"] = ours.get("workers", 0)
    if not all(isinstance(text, str) for text in texts.values()) or "tree" not in ours:
        raise CheckpointError("damaged: its metadata lacks job, framework or tree")
    if not all(type(number) is int and number >= 0 for number in numbers.values()):
        raise CheckpointError(f"damaged: its metadata has invalid numbers: {numbers}")
    meta = Meta(**texts, **numbers)
    if not meta.shard < meta.shards:
        raise CheckpointError(f"damaged: it claims to be shard {meta.shard} of {meta.shards}")
    if job and meta.job != job:
        raise CheckpointError(
            f"it belongs to job {meta.job!r}, this is job {job!r}: give each job a checkpoint directory of its own"
        )
    return meta, ours["tree"]


def _read_entry(name: str, fields: Any, start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        good = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        if not good or math.prod(shape) * ELEMENT_BYTES[dtype] != end - begin:
            raise ValueError(f"{dtype} of shape {shape} at bytes {begin} to {end}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"damaged: its header entry for array {name!r} is invalid ({error})") from error
    return Entry(dtype, shape, start + begin, end - begin)


def _check_coverage(entries: dict[str, Entry], start: int, size: int) -> None:
    """Check that the arrays are contiguous, up to the last byte. Raises ``CheckpointError``."""
    at, before = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset != at:
            kind = "overlaps" if entry.offset < at else "leaves a gap after"
            raise CheckpointError(f"damaged: array {name!r} at byte {entry.offset} {kind} {before}, which ends at {at}")
        at, before = entry.offset + entry.size, f"array {name!r}"
    if at != size:
        kind = "truncated" if at > size else "damaged"
        raise CheckpointError(f"{kind}: its arrays end at byte {at}, the snapshot at {size}")
