"""The source and the settings of a data set, as a script or the launcher's ``--data`` gives them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from data_service.formats import FormatReader, open_reader
from data_service.formats.options import FormatOptions, check_function_name, truth
from data_service.loader.window import Tail, tail_named
from data_service.manifest import FORMATS, TYPELESS, USER_FORMAT, Manifest
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW
from data_service.protocol.messages import DataSetOptions
from data_service.remote import POLICIES
from edl.errors import SettingError

if TYPE_CHECKING:
    from data_service.scan import KnownFiles

_T = TypeVar("_T")
EPOCH = "epoch"
"""Value of ``rescan`` for scanning the patterns at the end of each epoch."""
VARIABLE = "EDL_DATA_SETS"
"""Environment variable with the launcher's ``--data`` options, as JSON: by data set, ``files`` and texts for other
settings."""
SHARD_RECORDS = 65536
SHARD_BYTES = 16 << 20
SEEDS = 1 << 62
"""Seeds are below this, and not below its negative."""
_LOOK_S = 0.05
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Valid names of data sets."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """The files of a data set and how they are read."""

    name: str
    files: tuple[str, ...]
    format: str | None = None
    columns: tuple[str, ...] | None = None
    shard_records: int = SHARD_RECORDS
    shard_bytes: int = SHARD_BYTES
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    options: FormatOptions = field(default_factory=FormatOptions)
    remote: str = ""
    """Use of remote readers: empty, ``prefer`` or ``only``."""
    decode: str = ""
    """``module:function``, applied to each batch of records where it is read."""
    rescan: str = ""
    """When to scan the patterns again: empty (never), ``epoch``, or an interval in seconds."""
    when: str = NOW
    """When newly found files join."""

    @property
    def rescan_s(self) -> float:
        """Seconds between two scans; 0: no periodic scans."""
        return 0.0 if self.rescan in ("", EPOCH) else float(self.rescan)

    def scan(
        self,
        check: Callable[[], None],
        say: Callable[[str], None],
        files: tuple[str, ...] = (),
        known: KnownFiles | None = None,
        format: str = "",
    ) -> Manifest:
        """List the shards, on another thread while ``check`` is called periodically. ``files``: instead of the source's
        own. ``known`` and ``format``: of a list that the result must fit. Raises ``DataError``."""
        from data_service.scan import scan

        def work() -> Manifest:
            found = scan(
                files or self.files,
                self.format or format or None,
                columns=self.columns,
                shard_records=self.shard_records,
                shard_bytes=self.shard_bytes,
                storage_options=dict(self.storage_options),
                options=self.options,
                say=say,
                known=known,
            )
            self._check_types(found)
            return found

        return _on_thread(work, check)

    def types_of(self, manifest: Manifest, check: Callable[[], None]) -> Mapping[str, str]:
        """The types of columns that the files do not declare, on another thread as in ``scan``. Raises
        ``DataError``."""
        if manifest.format not in TYPELESS:
            return {}
        from data_service.scan import settle_types

        storage = dict(self.storage_options)
        return _on_thread(
            lambda: settle_types(manifest, self.columns, storage_options=storage, options=self.options).types, check
        )

    def typed(self, types: Mapping[str, str]) -> DataSource:
        """The source with these types of columns. Types that its own options give take precedence."""
        return replace(self, options=replace(self.options, types={**types, **self.options.types}))

    def _check_types(self, manifest: Manifest) -> None:
        """Raise ``UnsupportedData`` for unsupported columns. Results of the user's functions are only checked when they
        are read."""
        if not len(manifest) or self.decode or manifest.format == USER_FORMAT:
            return
        from data_service.formats.arrays import check_types

        file = manifest.ref(0).file
        storage = dict(self.storage_options)
        reader = open_reader(manifest.format, self.columns, storage_options=storage, options=self.options)
        try:
            check_types(reader.schema(file), file)
        finally:
            reader.close()

    def reader(self, format: str, rank: int) -> FormatReader:
        """The reader of the data set's shards, for the worker of this rank."""
        storage = dict(self.storage_options)
        here = open_reader(format, self.columns, storage_options=storage, options=self.options)
        if not (self.remote or self.decode):
            return here
        from data_service.remote.client import Pool, RemoteReader, shared_pool  # Flight takes a moment to load

        return RemoteReader(
            shared_pool(rank) if self.remote else Pool(),
            self.name,
            format,
            self.columns,
            local=here,
            policy=self.remote or "prefer",
            decode=self.decode,
            options=self.options,
            storage_options=storage,
        )


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The settings of a data set that a script gives; None where it gives none."""

    files: tuple[str, ...] | None = None
    format: str | None = None
    columns: tuple[str, ...] | None = None
    shuffle: bool | None = None
    seed: int | None = None
    tail: str | None = None
    shard_records: int | None = None
    shard_bytes: int | None = None
    storage_options: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None
    """Options of the format, by name."""
    remote: str | None = None
    decode: str | None = None
    rescan: str | None = None
    when: str | None = None

    def settle(self, name: str, environment: Mapping[str, str]) -> DataSettings:
        """Complete the settings by those of ``--data``, then by defaults; the format's options one by one. Raises
        ``SettingError`` for invalid values, and if there are no files."""
        launcher = declared(environment, name)
        defaults = {
            "shuffle": True,
            "seed": 0,
            "tail": "pad",
            "shard_records": SHARD_RECORDS,
            "shard_bytes": SHARD_BYTES,
            "storage_options": {},
            "remote": "",
            "decode": "",
            "rescan": "",
            "when": NOW,
        }
        found: dict[str, Any] = {}
        for name_ in (one.name for one in fields(DataSettings)):
            candidates = (getattr(self, name_), launcher.get(name_), defaults.get(name_))
            found[name_] = next((value for value in candidates if value is not None), None)
        found["options"] = {**launcher.get("options", {}), **(self.options or {})}
        if not found["files"]:
            known = ", ".join(names(environment)) or "none"
            advice = f"Pass files in the script, or start the job with --data {name}=PATTERN (currently named: {known})"
            raise SettingError("data set", name, "no files are given", advice)
        settled = DataSettings(**found)
        settled._check()
        return settled

    def _check(self) -> None:
        """Raise ``SettingError`` for invalid values."""
        for size in ("shard_records", "shard_bytes"):
            if getattr(self, size) < 1:
                raise SettingError(size, getattr(self, size), "must be at least 1")
        if type(self.seed) is not int or not -SEEDS <= self.seed < SEEDS:
            raise SettingError("seed", self.seed, "must be an integer from -2**62 to 2**62 - 1")
        if not isinstance(self.shuffle, bool):
            raise SettingError("shuffle", repr(self.shuffle), "must be True or False")
        if self.format is not None and self.format not in FORMATS:
            raise SettingError("format", self.format, f"no such format; available are {', '.join(FORMATS)}")
        if self.remote and self.remote not in POLICIES:
            raise SettingError("remote", self.remote, f"must be one of {', '.join(POLICIES)}")
        if not _is_rescan(self.rescan or ""):
            raise SettingError("rescan", self.rescan, f"must be a number of seconds above 0, or {EPOCH}")
        if self.when not in (NOW, NEXT_EPOCH):
            raise SettingError("when", self.when, f"must be {NOW} or {NEXT_EPOCH}")
        if self.columns is not None and (not all(self.columns) or not 0 < len(self.columns) == len(set(self.columns))):
            raise SettingError("columns", ",".join(self.columns), "must name at least one column, each only once")
        tail_named(self.tail or "")
        options = FormatOptions.of(self.options or {})
        for name, function in (("decode", self.decode), ("read", options.read), ("shards", options.shards)):
            if function and isinstance(function, str):
                check_function_name(name, function)

    def source(self, name: str) -> DataSource:
        """The source of the data set with this name; for settings that ``settle`` has completed."""
        assert self.files and self.shard_records and self.shard_bytes  # noqa: S101
        return DataSource(
            name,
            self.files,
            self.format,
            self.columns,
            self.shard_records,
            self.shard_bytes,
            self.storage_options or {},
            FormatOptions.of(self.options or {}),
            self.remote or "",
            self.decode or "",
            self.rescan or "",
            self.when or "",
        )


@dataclass(frozen=True, slots=True)
class SettledData:
    """A data set after the settings of script and launcher have been combined."""

    source: DataSource
    options: DataSetOptions
    tail: Tail


def _on_thread(work: Callable[[], _T], check: Callable[[], None]) -> _T:
    """The result of ``work`` on another thread, while ``check`` is called periodically."""
    result: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - raised on the calling thread
            failed.append(error)

    thread = threading.Thread(target=run, name="edl-scan", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        check()
    if failed:
        raise failed[0]
    return result[0]


def _is_rescan(value: str) -> bool:
    try:
        return value in ("", EPOCH) or 0 < float(value) < float("inf")
    except ValueError:
        return False


def checked_name(name: str) -> str:
    """Return the name if it is valid. Raises ``SettingError``."""
    if not NAME.fullmatch(name):
        raise SettingError("data set", repr(name), "must be 1 to 64 letters, digits, dots, dashes and underscores")
    return name


def declared(environment: Mapping[str, str], name: str) -> dict[str, Any]:
    """The ``--data`` settings of a data set: arguments of the loader, and ``options`` for the readers.

    Empty if there are none. Raises ``SettingError``.
    """
    try:
        items = dict(json.loads(environment.get(VARIABLE) or "{}").get(name, {}))
    except (ValueError, TypeError, AttributeError) as error:
        value = environment.get(VARIABLE, "")
        raise SettingError(VARIABLE, value, f"is not in the launcher's format ({error})") from None
    return loader_arguments(name, items)


def loader_arguments(name: str, items: Mapping[str, Any]) -> dict[str, Any]:
    """The same from the settings of data set ``name`` as the launcher has them: ``files``, and texts by key. Raises
    ``SettingError``."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {}
    kinds = [one.name for one in fields(FormatOptions)]
    for key, value in items.items():
        match key:
            case "files":
                found[key] = tuple(value)
            case "columns":
                found[key] = tuple(value.split(","))
            case "format" | "tail" | "remote" | "decode" | "rescan" | "when":
                found[key] = value
            case "shuffle":
                found[key] = truth(f"--data {key}", value)
            case "delimiter" if not value:
                advice = "Write delimiter=semicolon, because ';' ends a setting of --data"
                raise SettingError(f"--data {name}", "delimiter=", "is empty", advice)
            case "seed" | "shard_records" | "shard_bytes":
                found[key] = _number(key, value)
            case _ if key in kinds:
                options[key] = value
            case _:
                ours = "format columns shuffle seed tail shard_records shard_bytes remote decode rescan when"
                known = [*ours.split(), *kinds]
                raise SettingError(
                    f"--data {name}", f"{key}={value}", f"no such setting; available are {', '.join(known)}"
                )
    if options:
        found["options"] = FormatOptions.parsed(options)
    return found


def names(environment: Mapping[str, str]) -> Sequence[str]:
    """The names of the data sets in ``--data``."""
    try:
        return sorted(json.loads(environment.get(VARIABLE) or "{}"))
    except (ValueError, TypeError):
        return ()


def _number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise SettingError(f"--data {key}", value, "must be an integer") from None
