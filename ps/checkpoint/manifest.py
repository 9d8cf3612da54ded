"""The JSON files of a checkpoint: the parts written by pservers, and the manifest that makes the checkpoint valid.

    <checkpoint directory>/ps/<job>/
        checkpoint-0000000012/
            server-3-5f1c09aa-000.safetensors   rows of the buckets that pserver 3 owned; several when there are many
            server-3-5f1c09aa.json              a part: its files with their sizes and checksums, and its buckets
            checkpoint.json                     the manifest, written last: tables, step, parts with their checksums
        evicted/<table>/server-3-5f1c09aa-000.safetensors

Pure: no file access. Invalid input raises a ``CheckpointError`` that contains only the reason.
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

from edl.checkpoint.directory.manifest import Sum, check_format, is_truncated
from edl.errors import CheckpointError, EdlError, ProtocolError
from edl.job_records import Training
from edl.wire import json_messages
from edl.wire.json_messages import from_plain, to_plain
from ps.spec import BUCKETS, TableSpec

FORMAT = 1
MANIFEST_FILE = "checkpoint.json"
EVICTED = "evicted"
BLOCK_BYTES = 1 << 20
"""Checksums are per block of this size, so that a reader of part of a file can verify that part alone."""
CHAIN = 8
"""Most base checkpoints that an incremental one may need. After that many, everything is written in full."""

_END = b"\n}\n"
_FOLDER = re.compile(r"(?:checkpoint|cut)-(\d{10,})")
"""``cut-<number>``, with ``cut.json`` in it, is how earlier versions of edl named checkpoints. They are still read."""
_Value = TypeVar("_Value", str, int)
Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of buckets, ascending and not overlapping."""


def job_folder(job: str) -> str:
    """Folder of a job's parameter-server checkpoints, relative to the checkpoint directory."""
    return f"ps/{job}"


def checkpoint_name(number: int) -> str:
    """Folder name of a checkpoint."""
    return f"checkpoint-{number:010d}"


def checkpoint_number(name: str) -> int | None:
    """Number of the checkpoint with this folder name; None if the name is not that of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match and f"{int(match[1]):010d}" == match[1] else None


def manifest_file(run: str) -> str:
    """File name of the manifest in a checkpoint's folder."""
    return "cut.json" if run.rpartition("/")[2].startswith("cut-") else MANIFEST_FILE


def part_name(server: int, tag: str) -> str:
    """File name of a part's description."""
    return f"server-{server}-{tag}.json"


def file_name(server: int, tag: str, number: int) -> str:
    """File name of one of a part's row files."""
    return f"server-{server}-{tag}-{number:03d}.safetensors"


@dataclass(frozen=True, slots=True)
class Sums:
    """Size and checksums of a row file."""

    bytes: int
    blocks: tuple[int, ...]
    """CRC32 of each block of ``BLOCK_BYTES``; the last block may be shorter."""
    buckets: tuple[int, int]
    """Half-open range of buckets that its rows belong to."""


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One pserver's part of a checkpoint."""

    server: int
    checkpoint: int
    history: int
    buckets: Ranges
    """Buckets that the pserver owned when the checkpoint was marked."""
    whole: Ranges
    """Those of ``buckets`` that are written in full; for the others only the changes since ``base`` are."""
    base: str
    """Folder of the base checkpoint; empty if all buckets are whole."""
    files: Mapping[str, Sums]
    rows: Mapping[str, int]
    """Number of rows written in this part, by table."""

    @property
    def bytes(self) -> int:
        """Total size of its row files."""
        return sum(one.bytes for one in self.files.values())


@dataclass(frozen=True, slots=True)
class PartReport:
    """A pserver's report about its part, for the pserver that writes the manifest."""

    server: int
    part: str
    """File name of the part's description."""
    sum: Sum
    buckets: Ranges
    base: str
    bytes: int
    rows: int
    seconds: float = 0.0

    def encode(self) -> str:
        """The report as JSON text."""
        return json_messages.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> PartReport:
        """The inverse of ``encode``. Raises ``CheckpointError``."""
        try:
            return json_messages.decode(cls, text)
        except ProtocolError as error:
            raise CheckpointError(
                f"not a pserver's report about its part of a checkpoint ({error}): {text[:80]}"
            ) from None


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The checkpoint's manifest: the content of ``checkpoint.json``."""

    job: str
    checkpoint: int
    history: int
    step: int
    base: str
    """Folder of the base checkpoint, relative to the checkpoint directory; empty if this one is complete in itself."""
    chain: int
    """Number of base checkpoints that it needs, directly or not."""
    tables: tuple[TableSpec, ...]
    training: Training
    parts: Mapping[str, Sum]
    """The parts' descriptions: size and checksum by file name."""
    bytes: int
    """Total size of this checkpoint's row files."""
    rows: int
    """Rows written in this checkpoint."""
    extra: Any = None
    """Trainers' state: values and data positions."""
    written_at: str = ""
    """ISO 8601 time, for display only."""


def part_text(part: CheckpointPart) -> bytes:
    """Encode a part as JSON."""
    return _text(
        {
            "format": FORMAT,
            "server": part.server,
            "checkpoint": part.checkpoint,
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


def parse_part(data: bytes) -> CheckpointPart:
    """The inverse of ``part_text``. Raises ``CheckpointError`` with the reason."""
    values = _object(data, "a part")
    try:
        files = {str(name): _sums(str(name), one) for name, one in dict(values["files"]).items()}
        rows = {str(name): int(count) for name, count in dict(values["rows"]).items()}
        return CheckpointPart(
            server=_get(values, "server", int),
            checkpoint=_get(values, _number_key(values), int),
            history=_get(values, "history", int),
            buckets=_ranges(values["buckets"]),
            whole=_ranges(values["whole"]),
            base=_get(values, "base", str),
            files=files,
            rows=rows,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a part does not have edl's format: {error!r}") from None


def manifest_text(manifest: CheckpointManifest) -> bytes:
    """Encode a manifest as JSON, followed by its own checksum."""
    plain: dict[str, Any] = {"format": FORMAT, **to_plain(manifest)}
    plain["parts"] = {name: {"bytes": one.bytes, "crc32": f"{one.crc32:08x}"} for name, one in manifest.parts.items()}
    return _signed(_text(plain))


def parse_manifest(data: bytes) -> CheckpointManifest:
    """The inverse of ``manifest_text``. Raises ``CheckpointError`` with the reason."""
    values = _object(data, "its manifest")
    if data != _signed(_unsigned(data)):
        raise CheckpointError("its manifest is damaged: its checksum does not match")
    try:
        parts = {
            str(name): Sum(_get(one, "bytes", int), int(_get(one, "crc32", str), 16))
            for name, one in dict(values["parts"]).items()
        }
        return CheckpointManifest(
            job=_get(values, "job", str),
            checkpoint=_get(values, _number_key(values), int),
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
        raise CheckpointError(f"its manifest does not have edl's format: {error!r}") from None


def make_manifest(
    job: str,
    reports: Sequence[PartReport],
    *,
    checkpoint: int,
    history: int,
    chain: int,
    tables: tuple[TableSpec, ...],
    training: Training,
    extra: str,
    wall_s: float,
) -> CheckpointManifest:
    """Make a checkpoint's manifest from the pservers' reports.

    ``chain``: the number of base checkpoints. Raises ``CheckpointError`` unless each bucket was written exactly once.
    """
    owner: dict[int, int] = {}
    for one in reports:
        for bucket in flat(one.buckets):
            if bucket in owner:
                raise CheckpointError(f"bucket {bucket} was written by pserver {owner[bucket]} and by {one.server}")
            owner[bucket] = one.server
    if len(owner) != BUCKETS:
        missing = next(bucket for bucket in range(BUCKETS) if bucket not in owner)
        raise CheckpointError(f"{BUCKETS - len(owner)} buckets were not written by any pserver, such as {missing}")
    bases = {one.base for one in reports if one.base}
    if len(bases) > 1:
        raise CheckpointError(f"its parts have different base checkpoints: {', '.join(sorted(bases))}")
    try:
        said = json.loads(extra) if extra else {}
        step = int(said.get("step", 0)) if isinstance(said, dict) else 0
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the trainers' state is not JSON: {error}") from None
    return CheckpointManifest(
        job=job,
        checkpoint=checkpoint,
        history=history,
        step=step,
        base=next(iter(bases), ""),
        chain=chain if bases else 0,
        tables=tables,
        training=training,
        parts={one.part: one.sum for one in reports},
        bytes=sum(one.bytes for one in reports),
        rows=sum(one.rows for one in reports),
        extra=said,
        written_at=datetime.datetime.fromtimestamp(wall_s, datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def ranges(buckets: Iterable[int]) -> Ranges:
    """Ascending bucket numbers as ranges."""
    found: list[tuple[int, int]] = []
    for bucket in buckets:
        if found and bucket == found[-1][1]:
            found[-1] = (found[-1][0], bucket + 1)
        else:
            found.append((int(bucket), int(bucket) + 1))
    return tuple(found)


def flat(pairs: Ranges) -> list[int]:
    """The buckets in the given ranges."""
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
        raise ValueError(f"{found} are not ranges of buckets")
    return found


def _text(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, indent=1, allow_nan=False).encode() + b"\n"


def _signed(text: bytes) -> bytes:
    """Append the text's own checksum as its last entry."""
    return text[: -len(_END)] + b',\n "crc32": "%08x"' % zlib.crc32(text) + _END


def _unsigned(data: bytes) -> bytes:
    return data.rpartition(b',\n "crc32"')[0] + _END


def _object(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object of a known format version. Raises ``CheckpointError``."""
    if is_truncated(data):
        raise CheckpointError(f"{what} is truncated")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):  # bad UTF-8 is a ValueError too
        raise CheckpointError(f"{what} is not JSON") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{what} does not have edl's format")
    check_format(values.get("format"), what)
    return values


def _number_key(values: Mapping[str, Any]) -> str:
    """Key of the checkpoint's number: ``cut`` in files that earlier versions of edl wrote."""
    return "checkpoint" if "checkpoint" in values else "cut"


def _get(values: Mapping[str, Any], key: str, kind: type[_Value]) -> _Value:
    value = values[key]
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise ValueError(f"{key} is {value!r}")
    return value
