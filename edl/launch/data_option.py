"""``--data``: data sets that a job's workers find by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data_service.loader.source import NAME, VARIABLE, declared
from edl.errors import SettingError

_HOW = "Write NAME=PATTERN[,PATTERN…][;KEY=VALUE…], such as train=/data/*.parquet;shuffle=no"


def data_sets(texts: Sequence[str]) -> str:
    """What the workers are told of all ``--data`` options, as JSON; empty for none. Raises ``SettingError``."""
    sets: dict[str, dict[str, object]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        first, *others = rest.split(";")
        files = [_absolute(pattern.strip()) for pattern in first.split(",") if pattern.strip()]
        if not NAME.fullmatch(name) or not equals or not files:
            raise SettingError("--data", repr(text), "names no data set with files", _HOW)
        if name in sets:
            raise SettingError("--data", repr(text), f"{name} is there already", "Join the patterns with commas")
        found: dict[str, object] = {"files": files}
        for item in filter(None, (other.strip() for other in others)):
            key, equals, value = item.partition("=")
            if not equals or not key.isidentifier() or key == "files":
                raise SettingError("--data", repr(text), f"{item!r} is no KEY=VALUE", _HOW)
            found[key] = value
        sets[name] = found
    told = json.dumps(sets, sort_keys=True) if sets else ""
    for name in sets:
        declared({VARIABLE: told}, name)  # what the workers would refuse is refused here
    return told


def functions_from(listed: str, texts: Sequence[str]) -> tuple[str, ...]:
    """What readers may be asked to call: ``--reader-functions`` and what ``--data`` names. Raises ``SettingError``."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        module, colon, function = name.partition(":")
        if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise SettingError("--reader-functions", repr(name), "names no function", "Write package.module:function")
    told = data_sets(texts)
    for plain in json.loads(told).values() if told else ():
        names += [plain[key] for key in ("decode", "read", "shards") if plain.get(key)]
    return tuple(dict.fromkeys(names))


def _absolute(pattern: str) -> str:
    """Workers may run in another folder."""
    return pattern if "://" in pattern else str(Path(pattern).absolute())
