"""Evicted rows that are exported: buffered within a limit, and written beside the checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from edl.adapters.files import PlainFiles
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.evicted import EVICTED_BYTES
from ps.spec import BUCKETS
from tests.support.checkpoint_rows import USER, files_below, rows_of, taken
from tests.unit.ps.checkpoint.test_directory import keys_of


def test_evicted_rows_are_kept_beside_the_checkpoints(tmp_path: Path) -> None:
    directory = CheckpointDirectory(PlainFiles(tmp_path), "job", 4)
    few = rows_of(USER, keys_of(10))
    assert not directory.evicted.add("user", few)
    assert directory.evicted.add("user", rows_of(USER, keys_of(EVICTED_BYTES // 40, 2)))
    directory.write_evicted()
    assert len(files_below(tmp_path)) == 1 and not directory.evicted.full
    directory.evicted.add("user", few)
    directory.write(1, 1, np.ones(BUCKETS, np.uint8), taken({"user": few}))
    names = [one for one in files_below(tmp_path) if one.startswith("ps/job/evicted/user/server-4-")]
    assert len(names) == 2
    safetensors = pytest.importorskip("safetensors.numpy")
    assert sorted(safetensors.load_file(tmp_path / names[1])["user/keys"].tolist()) == sorted(few.keys.tolist())


def test_evicted_rows_that_cannot_be_written_are_kept_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is no reason to run out of memory, weeks later."""
    said: list[str] = []
    files = PlainFiles(tmp_path)
    directory = CheckpointDirectory(files, "job", 4, say=said.append)
    monkeypatch.setattr("ps.checkpoint.evicted.EVICTED_MOST_BYTES", 20_000)
    rows = rows_of(USER, keys_of(100, 2))

    def full(path: str, parts: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        for _ in range(7):
            directory.evicted.add("user", rows)
            with contextlib.suppress(OSError):
                directory.write_evicted()
            assert directory.evicted._bytes <= 20_000
    assert len(said) == 1 and f"dropping {4 * len(rows):,} evicted rows" in said[0]
    directory.write_evicted()
    safetensors = pytest.importorskip("safetensors.numpy")
    (name,) = files_below(tmp_path)
    assert len(safetensors.load_file(tmp_path / name)["user/keys"]) == 3 * len(rows)


def test_rows_that_are_evicted_while_others_cannot_be_written_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PlainFiles(tmp_path)
    directory = CheckpointDirectory(files, "job", 4)
    first, second = rows_of(USER, keys_of(10)), rows_of(USER, keys_of(20, 2))

    def meanwhile(path: str, parts: object) -> None:
        directory.evicted.add("user", second)
        raise OSError(28, "No space left on device")

    directory.evicted.add("user", first)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", meanwhile)
        with pytest.raises(OSError, match="No space"):
            directory.write_evicted()
    directory.write_evicted()
    safetensors = pytest.importorskip("safetensors.numpy")
    (name,) = files_below(tmp_path)
    saved = safetensors.load_file(tmp_path / name)["user/keys"].tolist()
    assert sorted(saved) == sorted([*first.keys.tolist(), *second.keys.tolist()])
    assert directory.evicted._bytes == 0
