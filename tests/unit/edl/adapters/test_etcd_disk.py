"""Disk requirements of an etcd member."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from edl.adapters import etcd_disk
from edl.errors import StoreError


def test_a_disk_that_is_too_small_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd_disk.refuse_small(tmp_path)
    monkeypatch.setattr(etcd_disk, "free_bytes", lambda folder: None)
    etcd_disk.refuse_small(tmp_path)
    monkeypatch.setattr(etcd_disk, "free_bytes", lambda folder: 900_000)
    with pytest.raises(StoreError, match=rf"136 MB in {tmp_path}, whose disk has 0\.9 MB left.*data_dir"):
        etcd_disk.refuse_small(tmp_path)


def test_a_private_store_leaves_the_temporary_directory_only_for_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, small, other = tmp_path / "usual", tmp_path / "small", tmp_path / "other"
    for folder in (usual, small, other):
        folder.mkdir()
    free = {usual: etcd_disk.NEEDED_BYTES, small: 5, other: etcd_disk.NEEDED_BYTES}
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(usual))
    monkeypatch.setattr(etcd_disk, "OTHERS", (small, tmp_path / "none", other))
    monkeypatch.setattr(etcd_disk, "free_bytes", lambda folder: free.get(folder, 0))
    assert etcd_disk.roomy_parent() == usual
    free[usual] = 1_000_000
    assert etcd_disk.roomy_parent() == other
    free[other] = 1_000_000
    assert etcd_disk.roomy_parent() == usual, "where the error belongs"


def test_of_a_long_log_the_end_stays_and_its_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "member.log"
    monkeypatch.setattr(etcd_disk, "MOST_LOG_BYTES", 1000)
    monkeypatch.setattr(etcd_disk, "KEPT_LOG_BYTES", 10)
    etcd_disk.trim_log(log)
    with log.open("ab", buffering=0) as writer:
        writer.write(b"." * 990 + b"0123456789")
        etcd_disk.trim_log(log)
        assert log.stat().st_size == 1000
        writer.write(b"!")
        etcd_disk.trim_log(log)
        writer.write(b"?")
    assert log.read_bytes() == b"123456789!?"


def test_without_room_for_its_logs_next_file_a_member_is_kept_from_taking_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    monkeypatch.setattr(etcd_disk, "free_bytes", lambda folder: free)
    etcd_disk.hold_back_spare(tmp_path)  # a member without data
    log = tmp_path / "member" / "wal"
    log.mkdir(parents=True)
    segment, stale, part = log / "0000-0000.wal", log / "1.tmp", log / "0.tmp"
    for file in (segment, stale, part):
        file.write_bytes(b"." * 1000)
    free = etcd_disk.SEGMENT_BYTES
    etcd_disk.hold_back_spare(tmp_path)
    assert part.is_dir() and not stale.exists() and segment.is_file()
    etcd_disk.hold_back_spare(tmp_path)
    assert part.is_dir()
    free = etcd_disk.SEGMENT_BYTES + etcd_disk.ROOM_BYTES
    etcd_disk.hold_back_spare(tmp_path)
    assert not part.exists()


def test_a_file_that_is_allocated_stays_however_full_the_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_disk, "free_bytes", lambda folder: 0)
    monkeypatch.setattr(etcd_disk, "SEGMENT_BYTES", 8192)
    whole = tmp_path / "member" / "wal" / "0.tmp"
    whole.parent.mkdir(parents=True)
    whole.write_bytes(b"." * 8192)
    etcd_disk.hold_back_spare(tmp_path)
    assert whole.is_file()
