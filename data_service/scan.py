"""From patterns of files to a manifest: which files there are, and where their shards begin and end."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from data_service.filesystems import Found, Storage, is_url
from data_service.manifest import FORMATS, Manifest, ManifestBuilder, counted, named
from data_service.readers import open_reader
from data_service.readers.options import Options, format_of
from edl.errors import DataError, SettingError

if TYPE_CHECKING:
    from data_service.readers.common import FileReader, Split

SHARD_RECORDS = 65536
SHARD_BYTES = 16 << 20
MAX_FILES = 1_000_000
"""A manifest of so many files takes 7 MB in the store, one second to encode or to decode, and 0.5 GB while it is made;
all workers start later by that. And opening a file takes longer than reading a small one."""
MAX_SHARDS = 4_000_000
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
) -> Manifest:
    """The shards of all files, in the order of their names.

    ``patterns``: files, folders with all below them, or globs (``*``, ``?``, ``[…]``, ``**``); local or URLs.
    ``format``: one of ``manifest.FORMATS``; default what the names' suffixes say. ``columns``: the ones that will be
    read, if not all: only these must be there and agree. ``shard_records``: at most so many records a shard; row groups
    of Parquet, and compressed batches, are not cut. ``shard_bytes``: about so large are the shards of lines. ``say``
    hears what may be of interest: empty files, files that were left out.

    Only the ends of files, or their beginnings and the edges of shards, are read. Raises ``DataError``: nothing found,
    a file is damaged, formats or columns differ, more than ``MAX_FILES`` files; ``SettingError`` for wrong options.
    """
    for name, value in (("shard_records", shard_records), ("shard_bytes", shard_bytes)):
        if value < 1:
            raise SettingError(name, value, "must be at least 1")
    if format is not None and format not in FORMATS:
        raise SettingError("format", format, f"no such format; there are {', '.join(FORMATS)}")
    hear = say or (lambda text: None)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    kind, files = _files(wanted, format, Storage(storage_options), hear)
    paths = [file.path for file in files if file.size_bytes]
    settled = _settled(kind, paths, columns, storage_options, options or Options())
    reader = open_reader(kind, columns, storage_options=storage_options, options=settled)
    try:
        return _manifest(kind, files, reader, (shard_records, shard_bytes), hear)
    finally:
        reader.close()


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

    from data_service.readers.lines import merged_types

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


def _files(patterns: list[str], format: str | None, storage: Storage, say: Say) -> tuple[str, list[Found]]:
    """The format, and all files in the order of their names, each once."""
    found: dict[str, Found] = {}
    kinds: dict[str, str] = {}
    ignored: list[str] = []
    for pattern in patterns:
        before = len(found) + len(ignored)
        for one in _found(pattern, format, storage):
            kind = format_of(one.path)
            if format is None and not kind:
                if one.named:
                    raise DataError(f"{one.path}: its name does not say its format. Give format={'|'.join(FORMATS)}")
                if len(ignored) < MAX_FILES:
                    ignored.append(one.path)
                continue
            if format in (None, "ipc", "parquet", "csv", "jsonl") and kind:
                kinds.setdefault(kind, one.path)
            found[one.path] = one
            if len(found) > MAX_FILES:
                raise DataError(_too_many(f"more than {MAX_FILES:,} files", pattern))
        if len(found) + len(ignored) == before and not any(one in pattern for one in "*?["):
            say(f"{pattern}: nothing in this folder, or nothing that was not named already")
    _check_kinds(kinds, format)
    if ignored:
        say(named("left out, since their names do not say their format", sorted(ignored)))
    if not found:
        text = ", ".join(patterns) or "no pattern given"
        raise DataError(f"{text}: no file found. Check the pattern; quote it, so that the shell leaves it alone")
    return format or next(iter(kinds)), [found[path] for path in sorted(found)]


def _found(pattern: str, format: str | None, storage: Storage) -> Iterator[Found]:
    if format != "user":
        yield from storage.find(pattern)
        return
    try:
        first = next(storage.find(pattern), None)
    except (DataError, SettingError):
        yield Found(pattern, 0, named=True)  # a name that means something to the user's functions
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


def _manifest(kind: str, files: list[Found], reader: FileReader[Any], sizes: tuple[int, int], say: Say) -> Manifest:
    builder = ManifestBuilder(kind)
    empty: list[str] = []
    shards, large = 0, 0
    for number, (file, splits) in enumerate(_split_all(files, reader, sizes), 1):
        builder.file(file.path, file.size_bytes)
        for split in splits:
            builder.shard(split.begin, split.end, split.records)
            large += split.records > 16 * sizes[0]
        if not splits:
            empty.append(file.path)
        shards += len(splits)
        if shards > MAX_SHARDS:
            advice = "Make shards larger (shard_records, shard_bytes), or convert"
            raise DataError(f"{file.path}: more than {MAX_SHARDS:,} shards up to here. {advice}")
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
    files: list[Found], reader: FileReader[Any], sizes: tuple[int, int]
) -> Iterator[tuple[Found, list[Split]]]:
    """Each file's shards, in order; a few files are looked at at a time. All are compared with the first."""

    def split(file: Found) -> list[Split]:
        if not file.size_bytes and reader.format != "user":
            return []
        return reader.split(file.path, file.size_bytes, *sizes)

    rest = iter(files)
    for file in rest:
        splits = split(file)
        yield file, splits
        if file.size_bytes:
            break  # an empty one has no columns that others could be compared with
    waiting: deque[tuple[Found, Future[list[Split]]]] = deque()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="scan") as pool:
        try:
            for file in rest:
                waiting.append((file, pool.submit(split, file)))
                if len(waiting) >= AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _too_many(what: str, pattern: str) -> str:
    where = "" if is_url(pattern) else " (any local folder for OUTPUT)"
    return (
        f"{pattern}: {what}. Opening so many costs more than reading them. Make fewer, larger ones: {CONVERT} "
        f"{pattern} OUTPUT{where}, some folders at a time"
    )
