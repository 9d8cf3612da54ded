"""What launchers tell one another about their synchronised directories, and its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edl.errors import ProtocolError
from edl.sync_dir.index import FileRecord, FileVersion
from edl.types import NodeId

FOR_EVER = 2**63 - 1
"""A moment after which a node writes nothing."""
_PATH = re.compile(r"[0-9]{1,4}(/[^/]+)+/?", re.DOTALL)
"""The number of a directory and a name in it. Which of these lead where is up to ``SyncedTree.locate``."""


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
    started: int = 0
    """Newest round in which its workers may have run."""
    writing: bool = False
    """Workers of earlier rounds than ``settled`` may still write there."""
    until_ns: int = 0
    """All that was finished there until then is among its changes, by its clock. ``FOR_EVER``: it leaves."""
    now_ns: int = 0
    """Its clock."""
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
        "started": report.started,
        "writing": report.writing,
        "until": report.until_ns,
        "now": report.now_ns,
        "arrived": report.arrived_bytes,
        "failure": report.failure,
    }


def report_from(frame: Mapping[str, Any]) -> PeerReport:
    """A report from a frame. Raises ``ProtocolError``."""
    head, settled, alike, started = (number(frame, name) for name in ("head", "settled", "alike", "started"))
    until_ns, now_ns, arrived = (number(frame, name) for name in ("until", "now", "arrived"))
    failure = text(frame, "failure")
    rounds, writing = (settled, alike, started), frame.get("writing") is True
    return PeerReport(text(frame, "life"), head, *rounds, writing, until_ns, now_ns, arrived, failure)


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
        *(record.size, record.mtime_ns, record.mode, record.removed, record.appeared_ns),
    ]


def _record(
    path: str,
    counter: int,
    since_ns: int,
    node: str,
    size: int,
    mtime_ns: int,
    mode: int,
    removed: bool,
    appeared_ns: int,
) -> FileRecord:
    numbers = (counter, since_ns, size, mtime_ns, mode, appeared_ns)
    if not all(type(one) is int for one in numbers) or not (isinstance(path, str) and isinstance(node, str)):
        raise TypeError(f"{path!r:.100} has values of other types")
    if not _PATH.fullmatch(path):
        raise TypeError(f"{path!r:.100} is no path in a synchronised directory")
    if path.endswith("/") and removed is not True:
        raise TypeError(f"{path!r:.100} is a folder, but not removed")
    version = FileVersion(counter, since_ns, NodeId(node))
    return FileRecord(path, version, size, mtime_ns, mode & 0o777, removed is True, appeared_ns)


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
