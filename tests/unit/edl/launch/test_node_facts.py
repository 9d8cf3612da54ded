"""A scrape does not wait for a file system that hangs, and asks it once."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from edl.adapters.file_systems import FileSystem, local_path, look_at
from edl.launch import node_facts
from edl.launch.node_facts import DirectoryObserver
from edl.metrics.facts import DirectoryFacts


def test_numbers_are_those_of_the_file_system(tmp_path: Path) -> None:
    found = asyncio.run(DirectoryObserver("logs", str(tmp_path / "not" / "yet")).look(60.0))
    whole = os.statvfs(tmp_path)
    assert (found.name, found.answers) == ("logs", True)
    assert found.size_bytes == whole.f_blocks * whole.f_frsize
    assert 0 < found.free_bytes <= found.size_bytes
    assert found.inodes == whole.f_files


def test_a_path_that_cannot_be_looked_at_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = asyncio.run(DirectoryObserver("logs", str(tmp_path / "file" / "below")).look(60.0))
    assert found == DirectoryFacts("logs", answers=False)


def test_a_file_system_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    back = threading.Event()

    def hang(path: str) -> FileSystem:
        calls.append(path)
        assert back.wait(60)
        return look_at(path)

    monkeypatch.setattr(node_facts, "look_at", hang)

    async def scenario() -> None:
        observer = DirectoryObserver("logs", str(tmp_path))
        for _ in range(3):
            assert not (await observer.look(0.01)).answers
        assert not any(one.answers for one in await asyncio.gather(observer.look(0.01), observer.look(0.01)))
        assert len(calls) == 1, "threads would add up"
        back.set()
        assert all(one.answers for one in await asyncio.gather(observer.look(60.0), observer.look(60.0)))
        assert (await observer.look(60.0)).answers
        assert len(calls) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("where", "path"), [("/ckpt", "/ckpt"), ("file:///ckpt", "/ckpt"), ("s3://bucket/ckpt", ""), ("", "")]
)
def test_object_stores_have_no_file_system(where: str, path: str) -> None:
    assert local_path(where) == path
