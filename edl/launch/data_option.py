"""``--data``: data sets that a job's workers find by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from data_service.loader.source import NAME, VARIABLE, declared
from edl.errors import SettingError
from edl.job_records import DataFiles, environment_text

_HOW = "Write NAME=PATTERN[,PATTERN…][;KEY=VALUE…], such as train=/data/*.parquet;shuffle=no"


def data_sets(texts: Sequence[str]) -> tuple[DataFiles, ...]:
    """The data sets of all ``--data`` options. Raises ``SettingError``, also for what the workers would refuse."""
    sets: dict[str, DataFiles] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        first, *others = rest.split(";")
        files = [_absolute(pattern.strip()) for pattern in first.split(",") if pattern.strip()]
        if not NAME.fullmatch(name) or not equals or not files:
            raise SettingError("--data", repr(text), "names no data set with files", _HOW)
        if name in sets:
            raise SettingError("--data", repr(text), f"{name} is there already", "Join the patterns with commas")
        settings: dict[str, str] = {}
        for item in filter(None, (other.strip() for other in others)):
            key, equals, value = item.partition("=")
            if not equals or not key.isidentifier() or key == "files":
                raise SettingError("--data", repr(text), f"{item!r} is no KEY=VALUE", _HOW)
            settings[key] = value
        sets[name] = DataFiles(name, tuple(files), settings)
    for name, one in sets.items():
        declared({VARIABLE: environment_text([one])}, name)
    return tuple(sets.values())


def functions_from(listed: str, sets: Iterable[DataFiles]) -> tuple[str, ...]:
    """Functions that readers may be asked to call: those of ``--reader-functions`` and those that data sets name.
    Raises ``SettingError``."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        module, colon, function = name.partition(":")
        if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise SettingError("--reader-functions", repr(name), "names no function", "Write package.module:function")
    for one in sets:
        names += [one.settings[key] for key in ("decode", "read", "shards") if one.settings.get(key)]
    return tuple(dict.fromkeys(names))


def _absolute(pattern: str) -> str:
    """Workers may run in another folder."""
    return pattern if "://" in pattern else str(Path(pattern).absolute())
