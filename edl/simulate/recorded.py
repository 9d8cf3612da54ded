"""Reads recorded faults: CSV with a header line, or one JSON object a line, with the same names."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edl.errors import SettingError, UsageError
from edl.simulate.faults import KINDS, TRAITS, TimedFault, check, useless
from edl.simulate.shape import ClusterShape

COLUMNS = ("at_s", "kind", "unit", "lasts_s", "factor")
REQUIRED = ("at_s", "kind")


class FaultFileError(UsageError):
    """A file of recorded faults cannot be used; names the file, the line and the value."""


def read(path: Path, cluster: ClusterShape) -> list[TimedFault]:
    """The faults of a file, in order of time. ``.csv``: comma-separated; anything else: JSON lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FaultFileError(f"--trace={path}: cannot be read: {error}. Give a CSV or JSON-lines file") from None
    rows = _csv_rows(path, text) if path.suffix.lower() == ".csv" else _json_rows(path, text)
    found: list[TimedFault] = []
    for line, row in rows:
        fault = _fault(f"{path}, line {line}", row)
        try:
            check([fault], cluster)
        except SettingError as error:
            raise FaultFileError(f"{path}, line {line}: {error}. Correct it, or simulate a larger cluster") from None
        found.append(fault)
    if not found:
        raise FaultFileError(f"--trace={path}: there is no fault in it. Its columns are {', '.join(COLUMNS)}")
    return sorted(found)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or ()]
    _check_names(f"{path}, line 1", names)
    reader.fieldnames = names
    for row in reader:
        if None in row:
            raise FaultFileError(f"{path}, line {reader.line_num}: more values than the {len(names)} columns of line 1")
        yield reader.line_num, {name: value for name, value in row.items() if value not in (None, "")}


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError as error:
            raise FaultFileError(f"{path}, line {line}: not JSON ({error}). Write one object a line") from None
        if not isinstance(row, dict):
            raise FaultFileError(
                f"{path}, line {line}: {content.strip()[:40]!r} is no object with {', '.join(COLUMNS)}"
            )
        _check_names(f"{path}, line {line}", list(row))
        yield line, row


def _check_names(where: str, names: list[str]) -> None:
    unknown = [name for name in names if name not in COLUMNS]
    missing = [name for name in REQUIRED if name not in names]
    if unknown:
        raise FaultFileError(f"{where}: unknown column {unknown[0]!r}. Columns are {', '.join(COLUMNS)}")
    if missing:
        raise FaultFileError(f"{where}: column {missing[0]} is missing. Columns are {', '.join(COLUMNS)}")


def _fault(where: str, row: Mapping[str, Any]) -> TimedFault:
    kind = KINDS.get(str(row.get("kind", "")).strip())
    if kind is None:
        raise FaultFileError(f"{where}: kind={row.get('kind', '')!r}. Use one of {', '.join(KINDS)}")
    defaults = {"unit": 0, "lasts_s": 0.0, "factor": TRAITS[kind].factor}
    numbers = {name: _number(where, name, row.get(name, defaults.get(name))) for name in COLUMNS if name != "kind"}
    unit, lasts_s, factor = numbers["unit"], numbers["lasts_s"], numbers["factor"]
    if unit != int(unit):
        raise FaultFileError(f"{where}: unit={unit:g}. Units are counted from 0")
    if factor < 1:
        raise FaultFileError(f"{where}: factor={factor:g}. It must be at least 1: 2 is twice as slow")
    setting, why = useless(kind, lasts_s, factor)
    if setting:
        column, value = ("lasts_s", lasts_s) if setting == "lasts" else ("factor", factor)
        advice = "Leave it out" if value else "Give its duration in seconds"
        raise FaultFileError(f"{where}: {column}={value:g}: {why}. {advice}")
    return TimedFault(numbers["at_s"], int(unit), kind, lasts_s, factor)


def _number(where: str, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise FaultFileError(f"{where}: {name}={value!r} is no number of 0 or more. Give it without a unit") from None
    return number
