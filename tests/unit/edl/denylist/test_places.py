"""Where the denylist is kept: every place does the same."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.adapters.files import PlainFiles
from edl.adapters.remote_files import RemoteFiles
from edl.denylist.places import DenylistPlace, FilesDenylist, StoreDenylist
from edl.errors import DenylistError
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.wire.denylist import DenylistEntry

DEVICE = DenylistEntry("m1", "GPU-5b1c/../x y", "ECC errors: 12", "job digits", "r1", 1.5, 2.5)
HOST = DenylistEntry("rack-3/..", reason="ärgerlich", by="me@host")


@pytest.fixture(params=["store", "folder", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> DenylistPlace:
    if request.param == "store":
        return StoreDenylist(MemoryStore(FakeClock()), "etcd")
    if request.param == "folder":
        return FilesDenylist(PlainFiles(str(tmp_path / "not" / "yet")), asyncio.to_thread)
    pytest.importorskip("fsspec")
    return FilesDenylist(RemoteFiles(f"memory://{tmp_path.parent.name}/{tmp_path.name}"), asyncio.to_thread)


def test_put_list_remove(place: DenylistPlace) -> None:
    async def body() -> None:
        assert list(await place.entries()) == []
        await place.put(HOST)
        await place.put(DEVICE)
        assert list(await place.entries()) == [DEVICE, HOST]
        await place.remove(HOST.name)
        await place.remove(HOST.name)
        assert list(await place.entries()) == [DEVICE]

    asyncio.run(body())


def test_a_device_has_one_entry(place: DenylistPlace) -> None:
    async def body() -> None:
        moved = DenylistEntry("m2", DEVICE.device, "again", "job other", "r2", 3.0, 0.0)
        await place.put(DEVICE)
        await place.put(moved)
        assert list(await place.entries()) == [moved]

    asyncio.run(body())


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    async def body() -> None:
        place = FilesDenylist(PlainFiles(tmp_path), asyncio.to_thread)
        await place.put(DEVICE)
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "torn.json").write_text('{"host": "m')
        (tmp_path / "folder.json").mkdir()
        assert await place.entries() == [DEVICE]

    asyncio.run(body())
    assert {one.name for one in tmp_path.iterdir()} >= {"notes.txt", "torn.json", "folder.json"}


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "file").write_text("")
        place = FilesDenylist(PlainFiles(tmp_path / "file"), asyncio.to_thread)
        calls: list[Callable[[], Any]] = [place.entries, lambda: place.put(DEVICE)]
        for call in calls:
            with pytest.raises(DenylistError, match=r"the denylist in .*file cannot be used: Not a directory"):
                await call()

    asyncio.run(body())


class ClosedFiles(PlainFiles):
    """A folder in which one file belongs to a user who lets nobody read it."""

    closed = ""

    def read(self, name: str) -> bytes:
        if name == self.closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return super().read(name)


def test_an_entry_that_only_another_user_may_read_does_not_hide_the_others(tmp_path: Path) -> None:
    async def body() -> None:
        files = ClosedFiles(tmp_path)
        place = FilesDenylist(files, asyncio.to_thread)
        await place.put(DEVICE)
        await place.put(HOST)
        assert len(await place.entries()) == 2
        assert place.left_out == ""
        files.closed = "host%2Frack-3%2F...json"
        assert await place.entries() == [DEVICE]
        assert place.left_out == (
            f"1 file of the denylist in {tmp_path} does not count, because this user may not read it "
            "(host%2Frack-3%2F...json: Permission denied): run chmod a+r there"
        )

    asyncio.run(body())
