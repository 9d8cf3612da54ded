"""The text files of a checkpoint directory: folder names, the owner's file, and the manifest that makes a checkpoint
complete.

Nothing here touches a file. Invalid content raises ``CheckpointError`` with only the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from edl.errors import CheckpointError, SettingError
from edl.wire import snapshot
from edl.wire.records import Version
from edl.wire.snapshot import Meta

FORMAT = 1
"""Format of the directory, and of the manifest of a state in one file. Incremented when an older edl would misread
it."""
PARTS_FORMAT = 2
"""Format of the manifest of a state in several parts. In format 1, parts did not say which piece of a tensor they
hold."""
OWNER_FILE = "edl.json"
MANIFEST_FILE = "DONE"
RUNS_REMEMBERED = 100
_END = b"\n}\n"  # nested objects are indented

_FOLDER = re.compile(r"commit-(\d{10,})\.era-(\d{10,})")
_Value = TypeVar("_Value", str, int)


def folder_name(version: Version) -> str:
    """Name of a checkpoint's folder."""
    return snapshot.folder_name(version.era, version.commit)


def folder_version(name: str) -> Version | None:
    """The version that a folder name stands for; None for any other name."""
    match = _FOLDER.fullmatch(name)
    version = Version(era=int(match[2]), commit=int(match[1])) if match else None
    return version if version is not None and folder_name(version) == name else None


def state_file(shard: int, shards: int) -> str:
    """Name of the file that holds the state, or one part of it."""
    return snapshot.FILE_NAME if shards == 1 else f"state-{shard:05d}-of-{shards:05d}.safetensors"


def part_file(shard: int, shards: int) -> str:
    """Name of the file that marks one of several parts as complete."""
    return f"part-{shard:05d}-of-{shards:05d}.json"


@dataclass(frozen=True, slots=True)
class Sum:
    """Size in bytes and CRC-32 of a file."""

    bytes: int
    crc32: int
    blocks: tuple[int, ...] = field(default=(), compare=False)
    """CRC-32 of each ``BLOCK_BYTES`` of the file (the last block may be shorter), so that a piece can be read and
    checked without the rest. Empty for files that are only read whole."""


BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class StateManifest:
    """The content of ``DONE``, the manifest of a checkpoint."""

    job: str
    run: str
    version: Version
    shards: int
    """Number of parts, one for each worker; ``state_file`` gives their names."""
    files: Mapping[str, Sum] = field(default_factory=dict)
    written_at: str = ""
    """Timestamp for people (ISO 8601, UTC)."""
    format: int = 0
    """Format as read from a file; 0 for a manifest that is about to be written."""

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(entry.bytes for entry in self.files.values())


def manifest_text(manifest: StateManifest) -> bytes:
    """A manifest as JSON. Also used for one part of several, which has one file."""
    return _text(
        {
            "format": FORMAT if manifest.shards == 1 else PARTS_FORMAT,
            "job": manifest.job,
            "run": manifest.run,
            "era": manifest.version.era,
            "commit": manifest.version.commit,
            "shards": manifest.shards,
            "files": {name: _sum_fields(entry) for name, entry in manifest.files.items()},
            "written_at": manifest.written_at,
        }
    )


def parse_manifest(data: bytes) -> StateManifest:
    """Parse the output of ``manifest_text``. Raises ``CheckpointError`` with the reason."""
    values = _object(data, "the manifest", PARTS_FORMAT)
    files: dict[str, Sum] = {}
    listed = values.get("files")
    for name, entry in (listed if isinstance(listed, dict) else {}).items():
        if not isinstance(entry, dict):
            raise CheckpointError(f"the manifest has no entry for {name}")
        try:
            crc32 = int(_get(entry, "crc32", str), 16)
        except ValueError:
            raise CheckpointError(f"the manifest has no checksum for {name}") from None
        files[name] = Sum(_get(entry, "bytes", int), crc32, _blocks(name, entry))
    if not files:
        raise CheckpointError("the manifest names no file")
    version = Version(era=_get(values, "era", int), commit=_get(values, "commit", int))
    job, run, shards = _get(values, "job", str), _get(values, "run", str), _get(values, "shards", int)
    check_format(values["format"], "the manifest", FORMAT if shards == 1 else PARTS_FORMAT)
    return StateManifest(job, run, version, shards, files, _get(values, "written_at", str), _get(values, "format", int))


def _sum_fields(entry: Sum) -> dict[str, object]:
    fields: dict[str, object] = {"bytes": entry.bytes, "crc32": f"{entry.crc32:08x}"}
    if entry.blocks:
        fields |= {"block_bytes": BLOCK_BYTES, "blocks": "".join(f"{crc32:08x}" for crc32 in entry.blocks)}
    return fields


def _blocks(name: str, entry: Mapping[str, object]) -> tuple[int, ...]:
    """The checksums of all blocks of a file, or none."""
    if "blocks" not in entry:
        return ()
    text, size = _get(entry, "blocks", str), _get(entry, "bytes", int)
    if _get(entry, "block_bytes", int) != BLOCK_BYTES or len(text) != 8 * -(-size // BLOCK_BYTES):
        raise CheckpointError(f"the manifest's block checksums of {name} do not match its {size} bytes")
    try:
        return tuple(int(text[start : start + 8], 16) for start in range(0, len(text), 8))
    except ValueError:
        raise CheckpointError(f"the manifest's block checksums of {name} are not numbers") from None


def why_old_parts(manifest: StateManifest) -> str:
    """The reason why the parts of a sharded state cannot be used; empty if they can, or if the state is in one file."""
    if manifest.shards == 1 or manifest.format >= PARTS_FORMAT:
        return ""
    how = "with torch.distributed.checkpoint, whose metadata is a pickle" if manifest.shards == 0 else "in bare parts"
    return f"an older edl wrote this sharded state {how}; this version cannot read it: write it again"


@dataclass(frozen=True, slots=True)
class DirectoryOwner:
    """The content of ``edl.json``: the job and run that may write into a checkpoint directory."""

    job: str
    run: str
    """The run of the job that writes; the same for all launchers of a run."""
    before: tuple[str, ...] = ()
    """Earlier writing runs, oldest first."""

    def succeeded_by(self, job: str, run: str) -> DirectoryOwner:
        """The next owner. It remembers the previous runs, so that none of them can write again."""
        return DirectoryOwner(job, run, (*self.before, self.run)[-RUNS_REMEMBERED:])


def owner_text(owner: DirectoryOwner) -> bytes:
    """Encode the owner's file as JSON."""
    return _text({"format": FORMAT, "job": owner.job, "run": owner.run, "before": list(owner.before)})


def parse_owner(data: bytes) -> DirectoryOwner | None:
    """Parse the output of ``owner_text``; None if the text is truncated. Raises ``CheckpointError`` with the reason."""
    if is_truncated(data):
        return None
    values = _object(data, OWNER_FILE)
    before = values.get("before")
    runs = tuple(run for run in before if isinstance(run, str)) if isinstance(before, list) else ()
    return DirectoryOwner(_get(values, "job", str), _get(values, "run", str), runs)


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule that decides which complete checkpoints are kept."""

    keep_last: int = 3
    """Number of newest checkpoints to keep, at least 2."""
    keep_every: int = 0
    """Also keep those whose commit number is a multiple of this, forever; 0 for none."""

    def __post_init__(self) -> None:
        if self.keep_last < 2:
            advice = "With one, a crash during the next write could leave none"
            raise SettingError("--checkpoint-keep", self.keep_last, "must be at least 2", advice)
        if self.keep_every < 0:
            raise SettingError("--checkpoint-keep-every", self.keep_every, "must be 0 (none) or more")

    def surplus(self, complete: Collection[Version], spared: Collection[Version] = ()) -> list[Version]:
        """The checkpoints to delete, oldest first. ``spared`` ones are kept whatever their age, such as the last
        written by this run."""
        oldest_first = sorted(complete)
        kept = {*oldest_first[-self.keep_last :], *spared}
        if self.keep_every:
            kept.update(version for version in oldest_first if version.commit % self.keep_every == 0)
        return [version for version in oldest_first if version not in kept]

    def overtaken(self, unfinished: Collection[Version], complete: Sequence[Version]) -> list[Version]:
        """Unfinished checkpoints so old that they would be surplus if they were complete."""
        if len(complete) < self.keep_last:
            return []
        oldest_kept = sorted(complete)[-self.keep_last]
        return [version for version in sorted(unfinished) if version < oldest_kept]


def why_sizes_differ(manifest: StateManifest, sizes: Mapping[str, int]) -> str:
    """The first difference between manifest and actual files; empty if they match."""
    for name, entry in sorted(manifest.files.items()):
        size = sizes.get(name)
        if size is None:
            return f"{name} is missing"
        if size < entry.bytes:
            return f"{name} is truncated: {size} of {entry.bytes} bytes"
        if size > entry.bytes:
            return f"{name} has {size} bytes instead of {entry.bytes}"
    return ""


def why_other_job(theirs: str, mine: str) -> str:
    """The reason to refuse another job's checkpoint."""
    return f"written by job {theirs}, this is job {mine} (--adopt-checkpoint allows it)"


def check_format(number: object, what: str, newest: int = FORMAT) -> None:
    """Raise ``CheckpointError`` for an invalid format number, or for one that this edl is too old for."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise CheckpointError(f"{what} was not written by edl: its format is {number!r}")
    if number > newest:
        raise CheckpointError(f"{what} has format {number}, newer than this edl knows ({newest}): upgrade edl")


def check_header(header: Meta, manifest: StateManifest, shard: int) -> None:
    """Check that a state file's header agrees with the manifest. Raises ``CheckpointError``."""
    said = Version(header.era, header.commit)
    if header.job != manifest.job:
        raise CheckpointError(f"its header says job {header.job}, its manifest {manifest.job}")
    if said != manifest.version:
        raise CheckpointError(f"its header says {folder_name(said)}, its manifest {folder_name(manifest.version)}")
    if (header.shard, header.shards) != (shard, manifest.shards):
        theirs, ours = f"part {header.shard} of {header.shards}", f"{shard} of {manifest.shards}"
        raise CheckpointError(f"its header says {theirs}, its manifest {ours}")


def is_truncated(data: bytes) -> bool:
    """Whether an owner's file or a manifest is truncated."""
    return not data.endswith(_END)


def each(problems: Sequence[tuple[str, str]], shown: Callable[[str], str]) -> str:
    """Refused checkpoints with their reasons, one per line."""
    return "\n".join(f"  {shown(name)}: {reason}" for name, reason in problems)


def _text(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"


def _object(data: bytes, what: str, newest: int = FORMAT) -> dict[str, object]:
    """Parse a JSON object whose format this edl knows. Raises ``CheckpointError``."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):  # bad UTF-8 is a ValueError too
        raise CheckpointError(f"{what} is not JSON") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{what} was not written by edl")
    check_format(values.get("format"), what, newest)
    return values


def _get(values: Mapping[str, object], key: str, kind: type[_Value]) -> _Value:
    value = values.get(key)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise CheckpointError(f"{key} is {value!r}, which edl never writes")
    return value
