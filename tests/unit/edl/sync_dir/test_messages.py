"""What launchers send, and what they refuse to read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edl.errors import ProtocolError
from edl.sync_dir.index import FileRecord, FileVersion
from edl.sync_dir.messages import (
    FOR_EVER,
    PeerReport,
    record_from,
    record_to,
    records_from,
    records_to,
    report_from,
    report_to,
)
from edl.types import NodeId

RECORD = FileRecord("0/ä/b", FileVersion(3, 0, NodeId("a")), 10**12, 1_700_000_000_123_456_789, 0o640, True, 10**18)


def test_records_and_reports_come_back() -> None:
    assert records_from(records_to([RECORD, RECORD])) == [RECORD, RECORD]
    assert record_from(json.loads(json.dumps(record_to(RECORD)))) == RECORD
    report = PeerReport("life", 7, 3, 2, 1, True, FOR_EVER, 10**18, 10**15, "no space")
    assert report_from(json.loads(json.dumps(report_to(report)))) == report


@pytest.mark.parametrize("data", [b"", b"{", b"7", b"[7]", b"[[1, 2]]", b'[["0/f", "1", 0, "a", 1, 1, 1, false]]'])
def test_anything_else_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        records_from(data)


def test_only_what_is_removed_may_be_a_folder() -> None:
    folder = FileRecord("0/a/", FileVersion(3, 0, NodeId("a")), 0, 0, 0, removed=True)
    assert record_from(record_to(folder)).folder == "0/a"
    with pytest.raises(ProtocolError):
        record_from(record_to(replace(folder, removed=False)))


@pytest.mark.parametrize("path", ["", "0", "0/", "0//", "x/a", "/a", "0/a//", "0//a/", "0/a//b", "9" * 5 + "/a", "²/a"])
def test_what_is_no_path_in_a_directory_is_a_protocol_error(path: str) -> None:
    """``0/`` would set everything aside."""
    with pytest.raises(ProtocolError):
        record_from(record_to(replace(RECORD, path=path)))


@pytest.mark.parametrize("path", ["0/a", "12/a/", "0/a\n", "0/a /b\n/", "0/..a"])
def test_other_paths_come_back(path: str) -> None:
    assert record_from(record_to(replace(RECORD, path=path))).path == path


@pytest.mark.parametrize("frame", [{}, {"record": 7}, {"record": [1]}])
def test_a_record_with_other_values_is_a_protocol_error(frame: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        record_from(frame)


@pytest.mark.parametrize("at", [0, 3])
def test_a_record_needs_a_path_and_a_node(at: int) -> None:
    row = record_to(RECORD)["record"]
    row[at] = 7
    with pytest.raises(ProtocolError):
        record_from({"record": row})


@pytest.mark.parametrize("frame", [{}, {"life": "x"}, {"life": 1, "head": 1}, {"life": "x", "head": -1}])
def test_a_report_with_other_values_is_a_protocol_error(frame: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        report_from({**report_to(PeerReport("", 0)), "head": None, **frame})
