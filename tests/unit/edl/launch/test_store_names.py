"""A launcher whose store is on a host that has no address yet: a pod's name is known some time after the pod runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from edl.adapters.clock import SystemClock
from edl.adapters.etcd_cluster import hosts_without_address
from edl.errors import StoreUnavailable
from edl.launch import store_opening
from edl.launch.settings import Backend, LaunchSettings, StoreSettings
from edl.types import JobId
from tests.support.script_folder import folder
from tests.unit.edl.launch.test_cli import read

__all__ = ["folder"]

NAMES = {"here": "127.0.0.1", "there": "192.0.2.7"}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names that have an address now; all others have none."""
    found: set[str] = set()

    def look(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in found:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (NAMES[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(store_opening, "STORE_RETRY_S", 0.0)
    monkeypatch.setattr(store_opening, "NAMES_RETRY_S", 0.0)
    return found


class Store:
    """A store that answers from a given time on."""

    def __init__(self, answers_at: int) -> None:
        self.asked = 0
        self.served = False
        self.before_each: Callable[[int], None] = lambda asked: None
        self._answers_at = answers_at

    async def read(self, _: str) -> None:
        self.asked += 1
        self.before_each(self.asked)
        if not self.served and self.asked < self._answers_at:
            raise StoreUnavailable("nobody answers")


class Member:
    running = True


def reach(store: Store, settings: LaunchSettings, serve: Callable[[], Awaitable[Any]], log: list[str]) -> Any:
    endpoints = settings.store.endpoints
    return asyncio.run(store_opening._reach(store, settings, endpoints, None, serve, log.append))  # type: ignore[arg-type]


def test_which_names_have_none(known: set[str]) -> None:
    known.add("here")
    assert asyncio.run(hosts_without_address(["here:1", "there:2", "here:3", "there:4"])) == ("there",)
    known.add("there")
    assert asyncio.run(hosts_without_address(["here:1", "there:2"])) == ()


def test_a_name_that_turns_out_to_be_this_host_is_served(known: set[str], folder: Path) -> None:
    """Else a job whose first pod comes before its name would wait for ever: nobody else would start the store."""
    store, looks = Store(answers_at=1000), []

    def name_it(asked: int) -> None:
        if asked == 5:
            known.add("here")

    async def serve() -> Member | None:
        looks.append(set(known))
        store.served = "here" in known
        return Member() if store.served else None

    store.before_each = name_it
    found = reach(store, read("--rdzv-endpoint=here:2379", "--nnodes=2", "train.py"), serve, [])
    assert isinstance(found, Member)
    assert looks[-1] == {"here"} and store.asked == 6, "as soon as the name is known"


def test_known_names_are_looked_at_once_more_and_then_left(known: set[str], folder: Path) -> None:
    """Once more, since they may have become known between the two looks at the beginning."""
    known.add("there")
    store, looks = Store(answers_at=6), []

    async def serve() -> None:
        looks.append(1)

    assert reach(store, read("--rdzv-endpoint=there:2379", "train.py"), serve, []) is None
    assert len(looks) == 1 and store.asked == 6


def test_one_member_is_enough(known: set[str], folder: Path) -> None:
    """That another host has no address yet starts no second member here."""
    known.add("here")
    store, started = Store(answers_at=50), []

    async def serve() -> Member:
        started.append(1)
        return Member()

    settings = read("--rdzv-endpoint=here:2379,there:2379,third:2379", "train.py")
    assert isinstance(reach(store, settings, serve, []), Member)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("names", "needed"),
    [
        (["there"], "a launcher must run there"),
        (["there", "third", "fourth"], "launchers must run at 2 of these 3 addresses"),
    ],
)
def test_what_is_waited_for_is_said(
    known: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], needed: str
) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(SystemClock, "now_s", lambda _: float(next(now)))
    endpoints, unknown, log = [f"{name}:2379" for name in names], ", ".join(names), list[str]()

    async def serve() -> None: ...

    settings = read(f"--rdzv-endpoint={','.join(endpoints)}", "--recover-timeout=30", "train.py")
    with pytest.raises(StoreUnavailable, match=f"no address yet for {unknown}"):
        reach(Store(10_000), settings, serve, log)
    assert log == [f"waiting for the store at {', '.join(endpoints)} (no address yet for {unknown}): {needed}"]


def test_an_answer_that_is_late_while_a_launcher_registers_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_opening, "STORE_RETRY_S", 0)
    tries = iter([StoreUnavailable("late"), StoreUnavailable("late"), None])

    async def action() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "registered"

    settings = read("--rdzv-endpoint=there:2379", "--rdzv-backend=etcd", "train.py")
    assert asyncio.run(store_opening.retried(action, settings)) == "registered"

    now = iter(range(100))
    monkeypatch.setattr(SystemClock, "now_s", lambda _: float(next(now)))
    tries = iter([StoreUnavailable("late")] * 100)
    with pytest.raises(StoreUnavailable, match="late"):
        asyncio.run(store_opening.retried(action, settings))
    assert next(now) == 11, "connect_timeout is 10 s"


def test_private_stores_of_jobs_of_one_name_lie_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_opening, "runtime_folder", lambda *_: tmp_path)
    job, private = JobId("mine"), StoreSettings(Backend.EMBEDDED)
    found = {store_opening.data_folder(private, job) for _ in range(3)}
    assert len(found) == 3
    shared = StoreSettings(Backend.EMBEDDED, ("h1:2379",))
    assert store_opening.data_folder(shared, job) == store_opening.data_folder(shared, job) == tmp_path / "mine"
    named = StoreSettings(Backend.EMBEDDED, data_dir=str(tmp_path / "a" / "b"))
    assert store_opening.data_folder(named, job) == tmp_path / "a" / "b"
    assert all(path.is_dir() for path in (*found, tmp_path / "mine", tmp_path / "a" / "b"))
