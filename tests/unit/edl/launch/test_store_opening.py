"""What a launcher says of its store when it opens it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from edl.errors import SettingError
from edl.launch import addresses, store_opening
from edl.launch.settings import Backend, StoreSettings
from edl.launch.store_opening import data_folder, even_members
from edl.types import JobId
from tests.support.launching import read
from tests.support.script_folder import folder

__all__ = ["folder"]


@pytest.mark.parametrize("count", [0, 1, 3, 5, 7])
def test_an_odd_number_of_members_needs_no_word(count: int) -> None:
    assert even_members(count) == ""


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, ("2 must run", "survives the loss of neither host", "List 1 or 3")),
        (4, ("3 must run", "survives the loss of 1 of their hosts, as with 3", "List 3 or 5")),
        (6, ("4 must run", "survives the loss of 2 of their hosts, as with 5", "List 5 or 7")),
    ],
)
def test_an_even_number_of_members_survives_no_more_than_one_less(count: int, words: tuple[str, ...]) -> None:
    for word in words:
        assert word in even_members(count)


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wanted = StoreSettings(Backend.EMBEDDED, ("h:1",), data_dir=str(tmp_path / "file" / "data"))
    with pytest.raises(SettingError, match=r"--rdzv-conf data_dir=.*cannot create it: Not a directory"):
        data_folder(wanted, JobId("job"))


def test_a_run_that_is_just_being_founded_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["", "", "run", "", "another"]

    class Store:
        async def close(self) -> None:
            pass

    async def stored(*_: object) -> str:
        return answers.pop(0)

    monkeypatch.setattr(store_opening, "STORE_RETRY_S", 0.0)
    monkeypatch.setattr(store_opening, "FOUNDING_S", 1000.0)
    monkeypatch.setattr(store_opening, "etcd_store", lambda wanted, endpoints: Store())
    monkeypatch.setattr(store_opening, "stored_run", stored)
    settings = read("--rdzv-endpoint=h:1", "train.py")
    assert asyncio.run(store_opening._run_at(settings, ["h:1"])) == "run"
    monkeypatch.setattr(store_opening, "FOUNDING_S", 0.0)
    assert asyncio.run(store_opening._run_at(settings, ["h:1"])) == "", "not for ever"


@pytest.mark.parametrize(("nodes", "seen_at"), [("1:2", "10.0.0.9"), ("1", "")])
def test_a_member_learns_where_other_nodes_see_this_host(
    nodes: str, seen_at: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    async def start(*_: object, **named: Any) -> None:
        found.update(named)

    monkeypatch.setattr(store_opening, "start_local_member", start)
    monkeypatch.setattr(addresses, "default_route_address", lambda: "10.0.0.9")
    settings = read(f"--nnodes={nodes}", "--rdzv-endpoint=node0:2379", "--rdzv-id=job")

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as cleanup:
            await store_opening._serve(settings, folder, cleanup, list[str]().append)

    asyncio.run(serve())
    assert found["seen_at"] == seen_at
