"""Parses ``--data``, the data sets that a job's workers find by name, and ``--reader-functions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from data_service.formats.options import check_function_name
from data_service.loader.source import NAME, DataSettings, loader_arguments
from edl.errors import SettingError
from edl.job_records import DataFiles

_HOW = "Write NAME=PATTERN[,PATTERN…][;KEY=VALUE…], such as train=/data/*.parquet;shuffle=no"


def data_sets(texts: Sequence[str]) -> tuple[DataFiles, ...]:
    """Parse all ``--data`` options; paths become absolute. Raises ``SettingError``, also for settings that the workers
    would refuse."""
    sets: dict[str, DataFiles] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        first, *others = rest.split(";")
        files = [_absolute(pattern.strip()) for pattern in first.split(",") if pattern.strip()]
        if not NAME.fullmatch(name) or not equals or not files:
            raise SettingError("--data", repr(text), "does not name a data set and its files", _HOW)
        if name in sets:
            raise SettingError("--data", repr(text), f"data set {name} is given twice", "Join the patterns with commas")
        settings: dict[str, str] = {}
        for item in filter(None, (other.strip() for other in others)):
            key, equals, value = item.partition("=")
            if not equals or not key.isidentifier() or key == "files":
                raise SettingError("--data", repr(text), f"{item!r} is not KEY=VALUE", _HOW)
            settings[key] = value
        sets[name] = DataFiles(name, tuple(files), settings)
    for name, one in sets.items():
        DataSettings(**loader_arguments(name, {"files": one.patterns, **one.settings})).settle(name, {})
    return tuple(sets.values())


def functions_from(listed: str, sets: Iterable[DataFiles]) -> tuple[str, ...]:
    """Functions that trainers may run in readers, as ``module:function``: those in ``--reader-functions``, and those
    that data sets name. Raises ``SettingError``."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        check_function_name("--reader-functions", name)
    for one in sets:
        names += [one.settings[key] for key in ("decode", "read", "shards") if one.settings.get(key)]
    return tuple(dict.fromkeys(names))


def _absolute(pattern: str) -> str:
    """Make a path absolute, because workers may run in another folder."""
    return pattern if "://" in pattern else str(Path(pattern).absolute())
