"""From patterns of files to a manifest: which files there are, and where their shards begin and end."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from data_service.file_list import REPLACED
from data_service.filesystems import FoundFile, Storage, is_url
from data_service.formats import open_reader
from data_service.formats.options import Options, format_of
from data_service.manifest import FORMATS, USER_FORMAT, Manifest, ManifestBuilder, counted, named
from edl.errors import DataError, SettingError

if TYPE_CHECKING:
    from data_service.formats.file_reader import FileReader, FileSplit

SHARD_RECORDS = 65536
SHARD_BYTES = 16 << 20
MANY_FILES = 1_000_000
"""From here on somebody is told that fewer, larger files would be read faster: opening one costs more than that."""
SAMPLED_FILES = 16
THREADS = 16
AHEAD = 256
"""Files that are being looked at, or wait for their turn."""
SAY_EVERY = 100_000
CONVERT = "python -m data_service convert"

Say = Callable[[str], None]


def scan(
    patterns: str | Sequence[str],
    format: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    shard_records: int = SHARD_RECORDS,
    shard_bytes: int = SHARD_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
    say: Say | None = None,
    known: KnownFiles | None = None,
) -> Manifest:
    """The shards of all files, in the order of their names; with ``known``, of those that are not known yet.

    ``patterns``: files, folders with all below them, or globs (``*``, ``?``, ``[…]``, ``**``); local or URLs.
    ``format``: one of ``manifest.FORMATS``; default what the names' suffixes say. ``columns``: the ones that will be
    read, if not all: only these must be there and agree. ``shard_records``: at most so many records a shard; row groups
    of Parquet, and compressed batches, are not cut. ``shard_bytes``: about so large are the shards of lines. ``say``
    hears what may be of interest: empty files, files that were left out.

    Only the ends of files, or their beginnings and the edges of shards, are read. 250 bytes of memory a file are used
    meanwhile. Raises ``DataError``: nothing found, a file is damaged or is just being written, formats or columns
    differ, a known file has changed; ``SettingError`` for wrong options.
    """
    for name, value in (("shard_records", shard_records), ("shard_bytes", shard_bytes)):
        if value < 1:
            raise SettingError(name, value, "must be at least 1")
    if format is not None and format not in FORMATS:
        raise SettingError("format", format, f"no such format; there are {', '.join(FORMATS)}")
    hear = say or (lambda text: None)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    storage = Storage(storage_options)
    kind, files = _files(wanted, format, storage, hear)
    pattern = known.like if known is not None else ""
    if known is not None:
        files = known.others(files)
    unready = known.unready if known is not None else None
    if unready is not None:
        files = [file for file in files if _is_ready(file, kind, columns, storage_options, options, unready)]
    paths = [*([pattern] if pattern else []), *(file.path for file in files if file.size_bytes)]
    settled = _settled(kind, paths, columns, storage_options, options or Options())
    reader = open_reader(kind, columns, storage_options=storage_options, options=settled)
    try:
        if pattern and files and kind != USER_FORMAT:
            reader.schema(pattern)  # what the others are compared with
        manifest = _manifest(kind, files, reader, (shard_records, shard_bytes), hear, unready)
        _check_settled(files, storage if kind != USER_FORMAT else None)
        return manifest
    finally:
        reader.close()


@dataclass
class KnownFiles:
    """A list of files that is held against what is found."""

    sizes: Mapping[str, int]
    like: str = ""
    """One of them that has records: new ones must have its columns."""
    seen: set[str] = field(default_factory=set)
    """Those that have been found again."""
    unready: Callable[[str, DataError], None] | None = None
    """Told of new files that cannot be listed, and why; they are left out. None: the first one ends the scan."""

    def others(self, files: list[FoundFile]) -> list[FoundFile]:
        """Files that are not known. Raises ``DataError`` for known ones that have another size now."""
        changed = [
            f"{file.path} ({file.size_bytes:,} bytes instead of {self.sizes[file.path]:,})"
            for file in files
            if self.sizes.get(file.path, file.size_bytes) != file.size_bytes
        ]
        if changed:
            raise DataError(f"{named('of another length than when they were listed', changed)}. {REPLACED}")
        self.seen.update(file.path for file in files if file.path in self.sizes)
        return [file for file in files if file.path not in self.sizes]


def _is_ready(
    file: FoundFile,
    kind: str,
    columns: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
    options: Options | None,
    unready: Callable[[str, DataError], None],
) -> bool:
    """Whether the columns of a file of CSV or JSON lines can be told."""
    if kind not in ("csv", "jsonl") or not file.size_bytes:
        return True
    reader: Any = open_reader(kind, columns, storage_options=storage_options, options=options)
    try:
        reader.found(file.path)
    except DataError as error:
        unready(file.path, error)
        return False
    return True


def _check_settled(files: list[FoundFile], storage: Storage | None) -> None:
    """Raises ``DataError`` for a file that has grown since it was found: it is just being written."""
    for file in files if storage is not None else ():
        if is_url(file.path):
            continue  # stores of objects show them whole or not at all
        advice = "Write it under another name, and rename it when it is complete"
        try:
            size = storage.size(file.path) if storage is not None else 0
        except FileNotFoundError:
            raise DataError(f"{file.path}: was there a moment ago and is gone. {advice}") from None
        if size != file.size_bytes:
            raise DataError(f"{file.path}: is being written ({file.size_bytes:,} bytes, then {size:,}). {advice}")


def settle_types(
    manifest: Manifest,
    columns: Sequence[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> Options:
    """The options with the type of each column of CSV or JSON lines, so that all readers take it for the same.

    By the first lines of up to ``SAMPLED_FILES`` files: integers and floats together are floats, anything else that
    differs is text. Other formats say their types themselves. Raises ``DataError`` as ``scan`` does.
    """
    files = [file.path for file in manifest.files if file.shards]
    return _settled(manifest.format, files, columns, storage_options, options or Options())


def _settled(
    kind: str,
    files: list[str],
    columns: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
    given: Options,
) -> Options:
    if kind not in ("csv", "jsonl"):
        return given
    import pyarrow as pa

    from data_service.formats.lines import merged_types

    step = max(1, len(files) // SAMPLED_FILES)
    schemas = []
    reader: Any = open_reader(kind, columns, storage_options=storage_options, options=given)
    for path in files[::step][:SAMPLED_FILES]:
        schemas.append(reader.found(path))
    found: dict[str, str] = {}
    for name, type_ in merged_types(schemas).items():
        if columns is not None and name not in columns:
            continue
        with contextlib.suppress(ValueError):  # nested ones have no names; they must agree as they are
            if pa.type_for_alias(str(type_)) == type_:
                found[name] = str(type_)
    return replace(given, types={**found, **given.types})


def _files(patterns: list[str], format: str | None, storage: Storage, say: Say) -> tuple[str, list[FoundFile]]:
    """The format, and all files in the order of their names, each once."""
    found: dict[str, FoundFile] = {}
    kinds: dict[str, str] = {}
    ignored: list[str] = []
    for pattern in patterns:
        before = len(found) + len(ignored)
        for one in _found(pattern, format, storage):
            kind = format_of(one.path)
            if format is None and not kind:
                if one.named:
                    raise DataError(f"{one.path}: its name does not say its format. Give format={'|'.join(FORMATS)}")
                ignored.append(one.path)
                continue
            if format in (None, "ipc", "parquet", "csv", "jsonl") and kind:
                kinds.setdefault(kind, one.path)
            found[one.path] = one
            if len(found) == MANY_FILES:
                say(_too_many(f"more than {MANY_FILES:,} files", pattern))
        if len(found) + len(ignored) == before and not any(one in pattern for one in "*?["):
            say(f"{pattern}: nothing in this folder, or nothing that was not named already")
    _check_kinds(kinds, format)
    if ignored:
        say(named("left out, since their names do not say their format", sorted(ignored)))
    if not found:
        text = ", ".join(patterns) or "no pattern given"
        raise DataError(f"{text}: no file found. Check the pattern; quote it, so that the shell leaves it alone")
    return format or next(iter(kinds)), [found[path] for path in sorted(found)]


def _found(pattern: str, format: str | None, storage: Storage) -> Iterator[FoundFile]:
    try:
        yield from _found_or_named(pattern, format, storage)
    except OSError as error:
        raise DataError(f"{pattern}: cannot be listed: {error}. Check the path and its permissions") from error


def _found_or_named(pattern: str, format: str | None, storage: Storage) -> Iterator[FoundFile]:
    if format != "user":
        yield from storage.find(pattern)
        return
    try:
        first = next(storage.find(pattern), None)
    except (DataError, SettingError):
        yield FoundFile(pattern, 0, named=True)  # a name that means something to the user's functions
        return
    if first is not None:
        yield from storage.find(pattern)


def _check_kinds(kinds: dict[str, str], format: str | None) -> None:
    others = {kind: path for kind, path in kinds.items() if kind != format}
    if format is not None and others:
        kind, path = next(iter(others.items()))
        raise DataError(f"{path}: is {kind} by its name, and format={format}. Name only files of one format")
    if len(kinds) > 1:
        text = ", ".join(f"{kind} ({path})" for kind, path in sorted(kinds.items()))
        raise DataError(
            f"files of several formats: {text}. Name files of one, or convert them: {CONVERT} PATTERN… OUTPUT"
        )


def _manifest(
    kind: str,
    files: list[FoundFile],
    reader: FileReader[Any],
    sizes: tuple[int, int],
    say: Say,
    unready: Callable[[str, DataError], None] | None = None,
) -> Manifest:
    builder = ManifestBuilder(kind)
    empty: list[str] = []
    large = 0
    for number, (file, splits) in enumerate(_split_all(files, reader, sizes, unready), 1):
        builder.file(file.path, file.size_bytes)
        for split in splits:
            builder.shard(split.begin, split.end, split.records)
            large += split.records > 16 * sizes[0]
        if not splits:
            empty.append(file.path)
        if number % SAY_EVERY == 0:
            say(f"{number:,} of {counted(len(files), 'file')} looked at")
    if empty:
        say(named("without records", empty))
    if large:
        say(
            f"{counted(large, 'shard')} of more than {16 * sizes[0]:,} records: the files cannot be cut there, so that "
            f"each takes much memory and work is shared badly. Consider {CONVERT}"
        )
    return builder.build()


def _split_all(
    files: list[FoundFile],
    reader: FileReader[Any],
    sizes: tuple[int, int],
    unready: Callable[[str, DataError], None] | None = None,
) -> Iterator[tuple[FoundFile, list[FileSplit]]]:
    """Each file's shards, in order; a few files are looked at at a time. All are compared with the first."""

    def split(file: FoundFile) -> list[FileSplit] | None:
        if not file.size_bytes and reader.format != "user":
            return []
        try:
            return reader.split(file.path, file.size_bytes, *sizes)
        except DataError as error:
            if unready is None:
                raise
            unready(file.path, error)
            return None

    rest = iter(files)
    for file in rest:
        splits = split(file)
        if splits is not None:
            yield file, splits
        if splits is not None and file.size_bytes:
            break  # an empty one has no columns that others could be compared with
    waiting: deque[tuple[FoundFile, Future[list[FileSplit] | None]]] = deque()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="scan") as pool:
        try:
            for file in rest:
                waiting.append((file, pool.submit(split, file)))
                if len(waiting) >= AHEAD:
                    yield from _taken(*waiting.popleft())
            while waiting:
                yield from _taken(*waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()


def _taken(file: FoundFile, splits: Future[list[FileSplit] | None]) -> Iterator[tuple[FoundFile, list[FileSplit]]]:
    found = splits.result()
    if found is not None:
        yield file, found


def _too_many(what: str, pattern: str) -> str:
    where = "" if is_url(pattern) else " (any local folder for OUTPUT)"
    return (
        f"{pattern}: {what}. Opening so many costs more than reading them. Make fewer, larger ones: {CONVERT} "
        f"{pattern} OUTPUT{where}, some folders at a time"
    )
