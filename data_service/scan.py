"""Scanning: from file patterns to a manifest with all files and their shards."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from data_service.file_list import REPLACED, chosen
from data_service.filesystems import FilePaths, FoundFile, Storage, is_url, texts_of
from data_service.formats import open_reader
from data_service.formats.options import FormatOptions, format_of
from data_service.manifest import FORMATS, TYPELESS, USER_FORMAT, Manifest, ManifestBuilder, counted, named
from edl.errors import DataError, EdlError, SettingError

if TYPE_CHECKING:
    from data_service.formats.file_reader import FileReader, FileSplit

SHARD_RECORDS = 65536
SHARD_BYTES = 16 << 20
MANY_FILES = 1_000_000
"""From this number on, a message recommends fewer, larger files: opening a file costs more than reading it."""
SAMPLED_FILES = 16
THREADS = 16
AHEAD = 256
"""Most files that are being scanned or queued."""
SAY_EVERY = 100_000
CONVERT = "python -m data_service convert"

Say = Callable[[str], None]
Unready = Callable[[str, DataError], None]
"""Receives a file that cannot be listed now, with the reason."""


def scan(
    patterns: FilePaths,
    format: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    shard_records: int = SHARD_RECORDS,
    shard_bytes: int = SHARD_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    options: FormatOptions | None = None,
    say: Say | None = None,
    known: KnownFiles | None = None,
) -> Manifest:
    """List the shards of all files, ordered by file name; with ``known``, only of new files.

    ``patterns``: files, folders with everything below them, or globs (``*``, ``?``, ``[…]``, ``**``); local or URLs.
    ``format``: one of ``manifest.FORMATS``; default: by the file names' suffixes. ``columns``: the columns that will be
    read, if not all; only these must exist and agree. ``shard_records``: most records per shard; Parquet row groups and
    compressed batches are not divided. ``shard_bytes``: approximate size of shards in line formats. ``say`` receives
    notes, such as empty or skipped files.

    Reads only the ends of files, or their beginnings and the edges of shards. Uses 250 bytes of memory per file. Raises
    ``DataError`` if nothing is found, a file is damaged or is being written, formats or columns differ, or a known file
    has changed; ``SettingError`` for invalid options.
    """
    for name, value in (("shard_records", shard_records), ("shard_bytes", shard_bytes)):
        if value < 1:
            raise SettingError(name, value, "must be at least 1")
    if format is not None and format not in FORMATS:
        raise SettingError("format", format, f"no such format; available are {', '.join(FORMATS)}")
    hear = say or (lambda text: None)
    wanted = list(texts_of(patterns))
    storage = Storage(storage_options)
    unready = known.unready if known is not None else None
    kind, files = _files(wanted, format, storage, hear, unready)
    pattern = known.like if known is not None else ""
    if known is not None:
        files = known.others(files)
    if unready is not None:
        files = [file for file in files if _is_ready(file, kind, columns, storage_options, options, unready)]
    paths = [pattern] if pattern else [file.path for file in files if file.size_bytes]
    settled = _settled(kind, paths, columns, storage_options, options or FormatOptions())
    reader = open_reader(kind, columns, storage_options=storage_options, options=settled)
    try:
        if pattern and files and kind != USER_FORMAT:
            reader.schema(pattern)  # the others are compared with it
        manifest = _manifest(kind, files, reader, (shard_records, shard_bytes), hear, unready)
        return manifest if kind == USER_FORMAT else _settled_files(manifest, storage, unready)
    finally:
        reader.close()


@dataclass
class KnownFiles:
    """A file list to compare found files with."""

    sizes: Mapping[str, int]
    like: str = ""
    """A known file with records: new ones must have the same columns."""
    seen: set[str] = field(default_factory=set)
    """Known files that have been found again."""
    unready: Unready | None = None
    """New files that it receives are skipped. None: the first one aborts the scan."""

    def others(self, files: list[FoundFile]) -> list[FoundFile]:
        """Files that are not known. Raises ``DataError`` if the size of a known file has changed."""
        changed = [
            f"{file.path} ({file.size_bytes:,} bytes instead of {self.sizes[file.path]:,})"
            for file in files
            if self.sizes.get(file.path, file.size_bytes) != file.size_bytes
        ]
        if changed:
            raise DataError(f"{named('whose size has changed since they were listed', changed)}. {REPLACED}")
        self.seen.update(file.path for file in files if file.path in self.sizes)
        return [file for file in files if file.path not in self.sizes]


def _is_ready(
    file: FoundFile,
    kind: str,
    columns: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
    options: FormatOptions | None,
    unready: Unready,
) -> bool:
    """True if the columns of a CSV or JSON lines file can be determined."""
    if kind not in TYPELESS or not file.size_bytes:
        return True
    reader: Any = open_reader(kind, columns, storage_options=storage_options, options=options)
    try:
        reader.found(file.path)
    except DataError as error:
        unready(file.path, error)
        return False
    return True


def _settled_files(manifest: Manifest, storage: Storage, unready: Unready | None) -> Manifest:
    """The manifest without files that have changed since they were found, because they are being written. ``unready``
    receives them; without it, the first one raises ``DataError``."""
    kept: list[int] = []
    for number, (path, size_bytes) in enumerate(manifest.paths_and_sizes()):
        try:
            if not is_url(path):  # object stores show complete objects only
                _check_settled(path, size_bytes, storage)
            kept.append(number)
        except DataError as error:
            if unready is None:
                raise
            unready(path, error)
    return chosen(manifest, kept)


def _check_settled(path: str, size_bytes: int, storage: Storage) -> None:
    advice = "Write it under another name, and rename it when it is complete"
    try:
        now_bytes = storage.size(path)
    except FileNotFoundError:
        raise DataError(f"{path}: has disappeared during the scan. {advice}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be listed: {error}. Check the path and its permissions") from error
    if now_bytes != size_bytes:
        raise DataError(f"{path}: is being written ({size_bytes:,} bytes, then {now_bytes:,}). {advice}")


def settle_types(
    manifest: Manifest,
    columns: Sequence[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: FormatOptions | None = None,
) -> FormatOptions:
    """Add the type of each column to the options of CSV or JSON lines, so that all readers use the same.

    Types are inferred from the first lines of up to ``SAMPLED_FILES`` files: integers and floats become float,
    otherwise differing types text. Other formats contain their types. Raises ``DataError`` as ``scan`` does.
    """
    files = [file.path for file in manifest.files if file.shards]
    return _settled(manifest.format, files, columns, storage_options, options or FormatOptions())


def _settled(
    kind: str,
    files: list[str],
    columns: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
    given: FormatOptions,
) -> FormatOptions:
    if kind not in TYPELESS:
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
        with contextlib.suppress(ValueError):  # nested types have no alias; they must agree
            if pa.type_for_alias(str(type_)) == type_:
                found[name] = str(type_)
    return replace(given, types={**found, **given.types})


def _files(
    patterns: list[str], format: str | None, storage: Storage, say: Say, unready: Unready | None
) -> tuple[str, list[FoundFile]]:
    """The format, and all files ordered by name, without repetition. ``unready`` receives files of another format."""
    found: dict[str, FoundFile] = {}
    kinds: dict[str, str] = {}
    ignored: list[str] = []
    for pattern in patterns:
        before = len(found) + len(ignored)
        for one in _found(pattern, format, storage):
            kind = format_of(one.path)
            if format is None and not kind:
                if one.named:
                    raise DataError(f"{one.path}: its name does not show its format. Set format={'|'.join(FORMATS)}")
                ignored.append(one.path)
                continue
            if format in (None, "ipc", "parquet", "csv", "jsonl") and kind:
                if unready is not None and format is not None and kind != format:
                    unready(one.path, _other_format(one.path, kind, format))
                    continue
                kinds.setdefault(kind, one.path)
            found[one.path] = one
            if len(found) == MANY_FILES:
                say(_too_many(f"more than {MANY_FILES:,} files", pattern))
        if len(found) + len(ignored) == before and not any(one in pattern for one in "*?["):
            say(f"{pattern}: no files in this folder, or none that are not already listed")
    _check_kinds(kinds, format)
    if ignored:
        say(named("skipped, because their names do not show their format", sorted(ignored)))
    if not found:
        text = ", ".join(patterns) or "no pattern given"
        raise DataError(f"{text}: no file found. Check the pattern, and quote it so that the shell does not expand it")
    return format or next(iter(kinds)), [found[path] for path in sorted(found)]


def _found(pattern: str, format: str | None, storage: Storage) -> Iterator[FoundFile]:
    try:
        yield from _found_or_named(pattern, format, storage)
    except EdlError:
        raise
    except Exception as error:  # clients of remote files have errors of their own
        if not isinstance(error, OSError) and not is_url(pattern):
            raise
        raise DataError(f"{pattern}: cannot be listed: {error}. Check the path and its permissions") from error


def _found_or_named(pattern: str, format: str | None, storage: Storage) -> Iterator[FoundFile]:
    if format != "user":
        yield from storage.find(pattern)
        return
    try:
        first = next(storage.find(pattern), None)
    except (DataError, SettingError):
        yield FoundFile(pattern, 0, named=True)  # a name with a meaning to the user's functions
        return
    if first is not None:
        yield from storage.find(pattern)


def _check_kinds(kinds: dict[str, str], format: str | None) -> None:
    others = {kind: path for kind, path in kinds.items() if kind != format}
    if format is not None and others:
        kind, path = next(iter(others.items()))
        raise _other_format(path, kind, format)
    if len(kinds) > 1:
        text = ", ".join(f"{kind} ({path})" for kind, path in sorted(kinds.items()))
        raise DataError(
            f"files of several formats: {text}. Use files of one, or convert them: {CONVERT} PATTERN… OUTPUT"
        )


def _other_format(path: str, kind: str, format: str) -> DataError:
    return DataError(f"{path}: is {kind} by its name, but format={format}. Use only files of one format")


def _manifest(
    kind: str,
    files: list[FoundFile],
    reader: FileReader[Any],
    sizes: tuple[int, int],
    say: Say,
    unready: Unready | None = None,
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
            say(f"{number:,} of {counted(len(files), 'file')} scanned")
    if empty:
        say(named("without records", empty))
    if large:
        say(
            f"{counted(large, 'shard')} of more than {16 * sizes[0]:,} records: the files cannot be divided there, so "
            f"each takes much memory and work is distributed unevenly. Consider {CONVERT}"
        )
    return builder.build()


def _split_all(
    files: list[FoundFile],
    reader: FileReader[Any],
    sizes: tuple[int, int],
    unready: Unready | None = None,
) -> Iterator[tuple[FoundFile, list[FileSplit]]]:
    """Each file's shards, in order, scanning a few files at a time. All are compared with the first."""

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
            break  # an empty file has no columns to compare with
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
        f"{pattern}: {what}. Opening them takes longer than reading them. Create fewer, larger files: {CONVERT} "
        f"{pattern} OUTPUT{where}, some folders at a time"
    )
