"""What a report is made of, as JSON: all runs, with versions, settings and the machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import Outcome


@dataclass(frozen=True, slots=True)
class Record:
    """``missing``: reasons by row and contender. ``machine``: as ``common.report.machine`` describes it."""

    machine: dict[str, Any]
    versions: dict[str, str]
    outcomes: tuple[Outcome, ...] = ()
    missing: dict[str, dict[str, str]] = field(default_factory=dict)

    def of(self, row: str, contender: str = "") -> list[Outcome]:
        """The runs of a row, or of one contender in it, in the order in which they were made."""
        return [one for one in self.outcomes if one.event == row and contender in ("", one.launcher)]


class OtherMachine(Exception):
    """Runs of two machines, or of two versions of a contender, do not belong into one report."""


def merged(old: Record, new: Record) -> Record:
    """The new runs and those of ``old`` that they do not replace: all runs of a contender in a row are replaced
    together. Raises ``OtherMachine``."""
    for what, before, now in (
        *((name, old.machine.get(name), new.machine.get(name)) for name in ("processor", "cores", "memory_bytes")),
        *((name, old.versions[name], new.versions[name]) for name in old.versions.keys() & new.versions.keys()),
    ):
        if before != now:
            raise OtherMachine(f"{what} was {before!r} and is {now!r} now")
    measured = {(one.event, one.launcher) for one in new.outcomes}
    kept = [one for one in old.outcomes if (one.event, one.launcher) not in measured]
    missing = {
        row: reasons
        for row in {*old.missing, *new.missing}
        if (reasons := _reasons(row, old, measured) | new.missing.get(row, {}))
    }
    left = [one for one in kept if one.launcher not in new.missing.get(one.event, {})]
    return replace(
        new,
        versions=old.versions | new.versions,
        outcomes=(*left, *new.outcomes),
        missing=dict(sorted(missing.items())),
    )


def _reasons(row: str, old: Record, measured: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: reason for name, reason in old.missing.get(row, {}).items() if (row, name) not in measured}


def dump(record: Record) -> str:
    """As JSON."""
    return json.dumps(asdict(record), indent=1) + "\n"


def load(path: Path) -> Record | None:
    """Read a record; ``None`` if there is no such file."""
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    outcomes = tuple(Outcome(**one) for one in data["outcomes"])
    return Record(data["machine"], data["versions"], outcomes, data["missing"])
