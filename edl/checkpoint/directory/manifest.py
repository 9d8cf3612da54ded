"""What a checkpoint directory holds, as text: names of folders, the owner's file, the marker that makes one complete.

Nothing here touches a file. Whatever is wrong with what was read is a ``CheckpointError`` that holds only the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from edl.errors import CheckpointError, SettingError
from edl.wire import snapshot
from edl.wire.messages import Version
from edl.wire.snapshot import Meta

FORMAT = 1
"""Of the directory, and of a marker of a state in one file. Raised when an older edl would misread them."""
PARTS_FORMAT = 2
"""Of the marker of a state in several parts. In format 1 parts did not say which piece of a tensor they hold."""
OWNER_FILE = "edl.json"
MARKER_FILE = "DONE"
RUNS_REMEMBERED = 100
_END = b"\n}\n"  # objects further in are indented

_FOLDER = re.compile(r"commit-(\d{10,})\.era-(\d{10,})")
_Value = TypeVar("_Value", str, int)


def folder_name(version: Version) -> str:
    """Name of a checkpoint's folder."""
    return snapshot.folder_name(version.era, version.commit)


def folder_version(name: str) -> Version | None:
    """Whose folder that is; None for a name that is not of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    version = Version(era=int(match[2]), commit=int(match[1])) if match else None
    return version if version is not None and folder_name(version) == name else None


def state_file(shard: int, shards: int) -> str:
    """Name of the file that holds the state, or one part of it."""
    return snapshot.FILE_NAME if shards == 1 else f"state-{shard:05d}-of-{shards:05d}.safetensors"


def part_file(shard: int, shards: int) -> str:
    """Name of the file that says that one part of several is complete."""
    return f"part-{shard:05d}-of-{shards:05d}.json"


@dataclass(frozen=True, slots=True)
class Sum:
    """Size and checksum of a file."""

    bytes: int
    crc32: int
    blocks: tuple[int, ...] = field(default=(), compare=False)
    """Checksum of each ``BLOCK_BYTES`` of the file, the last block being shorter: so that a piece of it can be read and
    checked without the rest. Empty where nobody reads pieces."""


BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of ``DONE``."""

    job: str
    run: str
    version: Version
    shards: int
    """Parts the state is in, one of each worker: ``state_file`` names them."""
    files: Mapping[str, Sum] = field(default_factory=dict)
    written_at: str = ""
    """For people."""
    format: int = 0
    """As it was read; 0: one that is about to be written."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.bytes for entry in self.files.values())


def marker_text(marker: Marker) -> bytes:
    """A marker as JSON. Also for a part of several, which has one file."""
    return _text(
        {
            "format": FORMAT if marker.shards == 1 else PARTS_FORMAT,
            "job": marker.job,
            "run": marker.run,
            "era": marker.version.era,
            "commit": marker.version.commit,
            "shards": marker.shards,
            "files": {name: _sum_fields(entry) for name, entry in marker.files.items()},
            "written_at": marker.written_at,
        }
    )


def parse_marker(data: bytes) -> Marker:
    """The opposite of ``marker_text``. Raises ``CheckpointError`` with the reason."""
    values = _object(data, "the marker", PARTS_FORMAT)
    files: dict[str, Sum] = {}
    listed = values.get("files")
    for name, entry in (listed if isinstance(listed, dict) else {}).items():
        if not isinstance(entry, dict):
            raise CheckpointError(f"the marker says nothing of {name}")
        try:
            crc32 = int(_get(entry, "crc32", str), 16)
        except ValueError:
            raise CheckpointError(f"the marker has no checksum of {name}") from None
        files[name] = Sum(_get(entry, "bytes", int), crc32, _blocks(name, entry))
    if not files:
        raise CheckpointError("the marker names no file")
    version = Version(era=_get(values, "era", int), commit=_get(values, "commit", int))
    job, run, shards = _get(values, "job", str), _get(values, "run", str), _get(values, "shards", int)
    check_format(values["format"], "the marker", FORMAT if shards == 1 else PARTS_FORMAT)
    return Marker(job, run, version, shards, files, _get(values, "written_at", str), _get(values, "format", int))


def _sum_fields(entry: Sum) -> dict[str, object]:
    fields: dict[str, object] = {"bytes": entry.bytes, "crc32": f"{entry.crc32:08x}"}
    if entry.blocks:
        fields |= {"block_bytes": BLOCK_BYTES, "blocks": "".join(f"{crc32:08x}" for crc32 in entry.blocks)}
    return fields


def _blocks(name: str, entry: Mapping[str, object]) -> tuple[int, ...]:
    """Checksums of blocks: as many as the file has, or none."""
    if "blocks" not in entry:
        return ()
    text, size = _get(entry, "blocks", str), _get(entry, "bytes", int)
    if _get(entry, "block_bytes", int) != BLOCK_BYTES or len(text) != 8 * -(-size // BLOCK_BYTES):
        raise CheckpointError(f"the marker's checksums of the blocks of {name} do not fit its {size} bytes")
    try:
        return tuple(int(text[start : start + 8], 16) for start in range(0, len(text), 8))
    except ValueError:
        raise CheckpointError(f"the marker's checksums of the blocks of {name} are no numbers") from None


def why_old_parts(marker: Marker) -> str:
    """Why the parts of a sharded state cannot be used; empty when they can, or when the state is in one file."""
    if marker.shards == 1 or marker.format >= PARTS_FORMAT:
        return ""
    how = "with torch.distributed.checkpoint, whose metadata are a pickle" if marker.shards == 0 else "in bare parts"
    return f"an older edl wrote this sharded state {how}; this one does not unpickle and does not guess: write it anew"


@dataclass(frozen=True, slots=True)
class Owner:
    """The content of ``edl.json``: who may write into a checkpoint directory."""

    job: str
    run: str
    """The job's run that writes; every launcher of a run has the same."""
    before: tuple[str, ...] = ()
    """Runs that wrote before, oldest first."""

    def succeeded_by(self, job: str, run: str) -> Owner:
        """The next owner. It remembers the runs before it, so that none of them comes back."""
        return Owner(job, run, (*self.before, self.run)[-RUNS_REMEMBERED:])


def owner_text(owner: Owner) -> bytes:
    """An owner as JSON."""
    return _text({"format": FORMAT, "job": owner.job, "run": owner.run, "before": list(owner.before)})


def parse_owner(data: bytes) -> Owner | None:
    """The opposite of ``owner_text``; None when it was broken off. Raises ``CheckpointError`` with the reason."""
    if broken_off(data):
        return None
    values = _object(data, OWNER_FILE)
    before = values.get("before")
    runs = tuple(run for run in before if isinstance(run, str)) if isinstance(before, list) else ()
    return Owner(_get(values, "job", str), _get(values, "run", str), runs)


@dataclass(frozen=True, slots=True)
class Retention:
    """Which complete checkpoints stay."""

    keep_last: int = 3
    """The newest so many."""
    keep_every: int = 0
    """And those whose commit number is a multiple of it, for good; 0 for none."""

    def __post_init__(self) -> None:
        if self.keep_last < 2:
            advice = "With one, a crash while the next is written could leave none"
            raise SettingError("--checkpoint-keep", self.keep_last, "must be at least 2", advice)
        if self.keep_every < 0:
            raise SettingError("--checkpoint-keep-every", self.keep_every, "must be 0 (none) or more")

    def surplus(self, complete: Collection[Version], spared: Collection[Version] = ()) -> list[Version]:
        """Those to delete, oldest first. The spared ones stay whatever their age: the last that this run wrote."""
        oldest_first = sorted(complete)
        kept = {*oldest_first[-self.keep_last :], *spared}
        if self.keep_every:
            kept.update(version for version in oldest_first if version.commit % self.keep_every == 0)
        return [version for version in oldest_first if version not in kept]

    def overtaken(self, unfinished: Collection[Version], complete: Sequence[Version]) -> list[Version]:
        """Broken-off writes so old that they would be surplus if they were finished now."""
        if len(complete) < self.keep_last:
            return []
        oldest_kept = sorted(complete)[-self.keep_last]
        return [version for version in sorted(unfinished) if version < oldest_kept]


def why_sizes_differ(marker: Marker, sizes: Mapping[str, int]) -> str:
    """What is wrong with the files that are there; empty when they fit the marker."""
    for name, entry in sorted(marker.files.items()):
        size = sizes.get(name)
        if size is None:
            return f"{name} is missing"
        if size < entry.bytes:
            return f"{name} is truncated: {size} of {entry.bytes} bytes"
        if size > entry.bytes:
            return f"{name} has {size} bytes instead of {entry.bytes}"
    return ""


def why_other_job(theirs: str, mine: str) -> str:
    """Refusal of another job's checkpoint."""
    return f"written by job {theirs}, this is job {mine} (--adopt-checkpoint allows it)"


def check_format(number: object, what: str, newest: int = FORMAT) -> None:
    """Raises ``CheckpointError`` when this edl is too old for it, or when it is no format number."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise CheckpointError(f"{what} is not what edl writes: its format is {number!r}")
    if number > newest:
        raise CheckpointError(f"{what} has format {number}, newer than this edl knows ({newest}): upgrade edl")


def check_header(header: Meta, marker: Marker, shard: int) -> None:
    """The state file says the same as the marker. Raises ``CheckpointError``."""
    said = Version(header.era, header.commit)
    if header.job != marker.job:
        raise CheckpointError(f"its header says job {header.job}, its marker {marker.job}")
    if said != marker.version:
        raise CheckpointError(f"its header says {folder_name(said)}, its marker {folder_name(marker.version)}")
    if (header.shard, header.shards) != (shard, marker.shards):
        theirs, ours = f"part {header.shard} of {header.shards}", f"{shard} of {marker.shards}"
        raise CheckpointError(f"its header says {theirs}, its marker {ours}")


def broken_off(data: bytes) -> bool:
    """Whether an owner's file or a marker lacks its end."""
    return not data.endswith(_END)


def each(problems: Sequence[tuple[str, str]], shown: Callable[[str], str]) -> str:
    """Refused checkpoints with their reasons, one line each."""
    return "\n".join(f"  {shown(name)}: {reason}" for name, reason in problems)


def _text(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"


def _object(data: bytes, what: str, newest: int = FORMAT) -> dict[str, object]:
    """A JSON object of a format that this edl knows."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):  # bad UTF-8 is a ValueError too
        raise CheckpointError(f"{what} is not JSON") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{what} is not what edl writes")
    check_format(values.get("format"), what, newest)
    return values


def _get(values: Mapping[str, object], key: str, kind: type[_Value]) -> _Value:
    value = values.get(key)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise CheckpointError(f"{key} is {value!r}, which edl does not write")
    return value
