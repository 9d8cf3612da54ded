"""What a checkpoint says about itself, as text: the parts that pservers have written, and the marker that makes one.

    <checkpoint directory>/ps/<job>/
        cut-0000000012/
            server-3-5f1c09aa-000.safetensors   rows of the buckets that pserver 3 owned; several when there are many
            server-3-5f1c09aa.json              a part: its files with their sizes and checksums, and its buckets
            cut.json                            the marker, written last: tables, step, parts with their checksums
        evicted/<table>/server-3-5f1c09aa-000.safetensors

Nothing here touches a file. Whatever is wrong with what was read is a ``CheckpointError`` with only the reason.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edl.checkpoint.directory.manifest import Sum, broken_off, check_format
from edl.errors import CheckpointError, EdlError, ProtocolError
from edl.job_records import Training
from edl.wire import json_messages
from edl.wire.json_messages import from_plain, to_plain
from ps.spec import BUCKETS, TableSpec

FORMAT = 1
MARKER_FILE = "cut.json"
EVICTED = "evicted"
BLOCK_BYTES = 1 << 20
"""Files are checked in blocks of this size, so that who needs a part of one reads no more of it."""
CHAIN = 8
"""Cuts that a cut may need beside itself. After so many everything is written anew."""

_END = b"\n}\n"
_FOLDER = re.compile(r"cut-(\d{10,})")
_Value = TypeVar("_Value", str, int)
Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of buckets, rising and apart."""


def job_folder(job: str) -> str:
    """Where a job's cuts lie, below the checkpoint directory."""
    return f"ps/{job}"


def cut_name(number: int) -> str:
    """Name of a cut's folder."""
    return f"cut-{number:010d}"


def cut_number(name: str) -> int | None:
    """Whose folder that is; None for a name that is no cut's."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match and cut_name(int(match[1])) == name else None


def part_name(server: int, tag: str) -> str:
    """Name of the file that describes a part."""
    return f"server-{server}-{tag}.json"


def file_name(server: int, tag: str, number: int) -> str:
    """Name of one of a part's files of rows."""
    return f"server-{server}-{tag}-{number:03d}.safetensors"


@dataclass(frozen=True, slots=True)
class Sums:
    """Size and checksums of a file of rows."""

    bytes: int
    blocks: tuple[int, ...]
    """CRC32 of each ``BLOCK_BYTES``, the last one shorter."""
    buckets: tuple[int, int]
    """Half-open range that its rows are of."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one pserver has written of a cut."""

    server: int
    cut: int
    history: int
    buckets: Ranges
    """What it owned when the cut was marked."""
    whole: Ranges
    """Those of them that are written in full. Of the others there is what has changed since ``base``."""
    base: str
    """Folder of the cut before; empty when all are whole."""
    files: Mapping[str, Sums]
    rows: Mapping[str, int]
    """Of each table, those written here."""

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(one.bytes for one in self.files.values())


@dataclass(frozen=True, slots=True)
class Told:
    """What a pserver says of its part, as text, for whoever writes the marker."""

    server: int
    part: str
    """Name of the part's own file."""
    sum: Sum
    buckets: Ranges
    base: str
    bytes: int
    rows: int
    seconds: float = 0.0

    def encode(self) -> str:
        """As JSON."""
        return json_messages.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Told:
        """The inverse. Raises ``CheckpointError``."""
        try:
            return json_messages.decode(cls, text)
        except ProtocolError as error:
            raise CheckpointError(
                f"not what a pserver says of its part of a checkpoint ({error}): {text[:80]}"
            ) from None


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of ``cut.json``."""

    job: str
    cut: int
    history: int
    step: int
    base: str
    """Folder, below the checkpoint directory, of the cut that this one goes on from; empty: it is whole in itself."""
    chain: int
    """Cuts before it that it needs."""
    tables: tuple[TableSpec, ...]
    training: Training
    parts: Mapping[str, Sum]
    """The files that describe them."""
    bytes: int
    """Of the files of rows of this cut."""
    rows: int
    """Written in this cut."""
    extra: Any = None
    """What is said about trainers: values, positions in data."""
    written_at: str = ""
    """For people."""


def part_text(part: Part) -> bytes:
    """A part as JSON."""
    return _text(
        {
            "format": FORMAT,
            "server": part.server,
            "cut": part.cut,
            "history": part.history,
            "buckets": [list(pair) for pair in part.buckets],
            "whole": [list(pair) for pair in part.whole],
            "base": part.base,
            "rows": dict(part.rows),
            "files": {
                name: {
                    "bytes": one.bytes,
                    "buckets": list(one.buckets),
                    "block_bytes": BLOCK_BYTES,
                    "crc32": " ".join(f"{crc:08x}" for crc in one.blocks),
                }
                for name, one in part.files.items()
            },
        }
    )


def parse_part(data: bytes) -> Part:
    """The inverse of ``part_text``. Raises ``CheckpointError`` with the reason."""
    values = _object(data, "a part")
    try:
        files = {str(name): _sums(str(name), one) for name, one in dict(values["files"]).items()}
        rows = {str(name): int(count) for name, count in dict(values["rows"]).items()}
        return Part(
            server=_get(values, "server", int),
            cut=_get(values, "cut", int),
            history=_get(values, "history", int),
            buckets=_ranges(values["buckets"]),
            whole=_ranges(values["whole"]),
            base=_get(values, "base", str),
            files=files,
            rows=rows,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a part is not what edl writes: {error!r}") from None


def marker_text(marker: Marker) -> bytes:
    """A marker as JSON."""
    plain: dict[str, Any] = {"format": FORMAT, **to_plain(marker)}
    plain["parts"] = {name: {"bytes": one.bytes, "crc32": f"{one.crc32:08x}"} for name, one in marker.parts.items()}
    return _signed(_text(plain))


def parse_marker(data: bytes) -> Marker:
    """The inverse of ``marker_text``. Raises ``CheckpointError`` with the reason."""
    values = _object(data, "its marker")
    if data != _signed(_unsigned(data)):
        raise CheckpointError("its marker is damaged: its own checksum differs")
    try:
        parts = {
            str(name): Sum(_get(one, "bytes", int), int(_get(one, "crc32", str), 16))
            for name, one in dict(values["parts"]).items()
        }
        return Marker(
            job=_get(values, "job", str),
            cut=_get(values, "cut", int),
            history=_get(values, "history", int),
            step=_get(values, "step", int),
            base=_get(values, "base", str),
            chain=_get(values, "chain", int),
            tables=tuple(from_plain(TableSpec, one) for one in values["tables"]),
            training=from_plain(Training, values["training"]),
            parts=parts,
            bytes=_get(values, "bytes", int),
            rows=_get(values, "rows", int),
            extra=values.get("extra"),
            written_at=_get(values, "written_at", str),
        )
    except (KeyError, TypeError, ValueError, EdlError) as error:
        raise CheckpointError(f"its marker is not what edl writes: {error!r}") from None


def make_marker(
    job: str,
    told: Sequence[Told],
    *,
    cut: int,
    history: int,
    chain: int,
    tables: tuple[TableSpec, ...],
    training: Training,
    extra: str,
    wall_s: float,
) -> Marker:
    """The marker of a cut, of what all pservers have told. ``chain``: of the cut it goes on from, and that one.

    Raises ``CheckpointError`` unless each bucket was written once.
    """
    owner: dict[int, int] = {}
    for one in told:
        for bucket in flat(one.buckets):
            if bucket in owner:
                raise CheckpointError(f"bucket {bucket} was written by pserver {owner[bucket]} and by {one.server}")
            owner[bucket] = one.server
    if len(owner) != BUCKETS:
        missing = next(bucket for bucket in range(BUCKETS) if bucket not in owner)
        raise CheckpointError(f"{BUCKETS - len(owner)} buckets were written by nobody, such as {missing}")
    bases = {one.base for one in told if one.base}
    if len(bases) > 1:
        raise CheckpointError(f"its parts go on from different cuts: {', '.join(sorted(bases))}")
    try:
        said = json.loads(extra) if extra else {}
        step = int(said.get("step", 0)) if isinstance(said, dict) else 0
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"what is to be kept of the trainers is not JSON: {error}") from None
    return Marker(
        job=job,
        cut=cut,
        history=history,
        step=step,
        base=next(iter(bases), ""),
        chain=chain if bases else 0,
        tables=tables,
        training=training,
        parts={one.part: one.sum for one in told},
        bytes=sum(one.bytes for one in told),
        rows=sum(one.rows for one in told),
        extra=said,
        written_at=datetime.datetime.fromtimestamp(wall_s, datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def ranges(buckets: Iterable[int]) -> Ranges:
    """Buckets, in rising order, as ranges."""
    found: list[tuple[int, int]] = []
    for bucket in buckets:
        if found and bucket == found[-1][1]:
            found[-1] = (found[-1][0], bucket + 1)
        else:
            found.append((int(bucket), int(bucket) + 1))
    return tuple(found)


def flat(pairs: Ranges) -> list[int]:
    """The buckets of ranges."""
    return [bucket for first, end in pairs for bucket in range(first, end)]


def _sums(name: str, one: Any) -> Sums:
    blocks = tuple(int(crc, 16) for crc in _get(one, "crc32", str).split())
    size, (first, end) = _get(one, "bytes", int), one["buckets"]
    if one["block_bytes"] != BLOCK_BYTES or len(blocks) != -(-size // BLOCK_BYTES) or "/" in name:
        raise ValueError(f"{name} has {len(blocks)} checksums for {size} bytes")
    if not 0 <= first <= end <= BUCKETS:
        raise ValueError(f"{name} has buckets {first} to {end}")
    return Sums(size, blocks, (first, end))


def _ranges(value: Any) -> Ranges:
    found = tuple((int(first), int(end)) for first, end in value)
    ends = [0, *(number for pair in found for number in pair), BUCKETS]
    if any(before > after for before, after in itertools.pairwise(ends)):
        raise ValueError(f"{found} are no ranges of buckets")
    return found


def _text(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, indent=1, allow_nan=False).encode() + b"\n"


def _signed(text: bytes) -> bytes:
    """With its own checksum as the last entry."""
    return text[: -len(_END)] + b',\n "crc32": "%08x"' % zlib.crc32(text) + _END


def _unsigned(data: bytes) -> bytes:
    return data.rpartition(b',\n "crc32"')[0] + _END


def _object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object of a format that this edl knows."""
    if broken_off(data):
        raise CheckpointError(f"{what} is truncated")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):  # bad UTF-8 is a ValueError too
        raise CheckpointError(f"{what} is not JSON") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{what} is not what edl writes")
    check_format(values.get("format"), what)
    return values


def _get(values: Mapping[str, Any], key: str, kind: type[_Value]) -> _Value:
    value = values[key]
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise ValueError(f"{key} is {value!r}")
    return value
