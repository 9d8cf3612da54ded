"""What launchers tell one another about their synchronised directories, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edl.errors import ProtocolError
from edl.sync_dir.index import FileRecord, FileVersion
from edl.types import NodeId


@dataclass(frozen=True, slots=True)
class PeerReport:
    """A node's answer to a request for its changes; the changes themselves follow."""

    life: str
    """Identifies its launcher. The numbers of its changes are those of this launcher."""
    head: int
    """Number of its newest change."""
    settled: int = 0
    """Newest round for which all that its earlier workers wrote is among its changes."""
    alike: int = 0
    """Newest round for which it has the files of all members."""
    arrived_bytes: int = 0
    """What it has received so far, from anyone: grows while it makes progress."""
    failure: str = ""
    """Why it cannot fetch files of another node at the moment; empty: it can."""


def report_to(report: PeerReport) -> dict[str, Any]:
    """A report as a frame."""
    return {
        "life": report.life,
        "head": report.head,
        "settled": report.settled,
        "alike": report.alike,
        "arrived": report.arrived_bytes,
        "failure": report.failure,
    }


def report_from(frame: Mapping[str, Any]) -> PeerReport:
    """A report from a frame. Raises ``ProtocolError``."""
    head, settled, alike, arrived = (number(frame, name) for name in ("head", "settled", "alike", "arrived"))
    return PeerReport(text(frame, "life"), head, settled, alike, arrived, text(frame, "failure"))


def records_to(records: Sequence[FileRecord]) -> bytes:
    """Records as a JSON list with one row each."""
    return json.dumps([_row(record) for record in records]).encode()


def records_from(data: bytes) -> list[FileRecord]:
    """Records from JSON. Raises ``ProtocolError``."""
    try:
        return [_record(*row) for row in json.loads(data)]
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"not a list of files: {error}") from error


def record_to(record: FileRecord) -> dict[str, Any]:
    """One record as a part of a frame."""
    return {"record": _row(record)}


def record_from(frame: Mapping[str, Any]) -> FileRecord:
    """One record from a frame. Raises ``ProtocolError``."""
    try:
        return _record(*frame["record"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"not a file: {error!r}") from error


def _row(record: FileRecord) -> list[Any]:
    version = record.version
    return [
        *(record.path, version.counter, version.mtime_ns, version.node),
        *(record.size, record.mtime_ns, record.mode, record.removed),
    ]


def _record(
    path: str, counter: int, since_ns: int, node: str, size: int, mtime_ns: int, mode: int, removed: bool
) -> FileRecord:
    numbers = (counter, since_ns, size, mtime_ns, mode)
    if not all(type(one) is int for one in numbers) or not (isinstance(path, str) and isinstance(node, str)):
        raise TypeError(f"{path!r:.100} has values of other types")
    return FileRecord(path, FileVersion(counter, since_ns, NodeId(node)), size, mtime_ns, mode & 0o777, removed is True)


def number(frame: Mapping[str, Any], name: str) -> int:
    """A number from 0 in a frame. Raises ``ProtocolError``."""
    value = frame.get(name)
    if type(value) is not int or value < 0:
        raise ProtocolError(f"{name} is {value!r:.100}")
    return value


def text(frame: Mapping[str, Any], name: str) -> str:
    """A text in a frame. Raises ``ProtocolError``."""
    value = frame.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is {value!r:.100}")
    return value
