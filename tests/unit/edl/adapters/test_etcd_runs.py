"""A store member whose data were left by an earlier run of the job: what it does, and what the others say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edl.adapters import etcd_cluster
from edl.adapters.etcd_cluster import start_local_member
from edl.adapters.etcd_plan import plan_members
from edl.adapters.etcd_server import EtcdMember
from edl.errors import StoreError, StoreUnavailable

ENDPOINTS = ["127.0.0.1:2379", "b:2379", "c:2379"]


class Cluster:
    """The cluster as the first member's host sees it. No process is started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answering: tuple[str, ...] = ()
        """Hosts of members that answer."""
        self.ran: tuple[str, ...] = ()
        """Hosts of members that have been up in the cluster as it is now."""
        self.run = "2"
        """The run in the store that the others serve; empty: they have no majority."""
        self.started: list[dict[str, Any]] = []
        self.log: list[str] = []
        self.mine = EtcdMember(plan_members(ENDPOINTS)[0], folder)

    async def members(self, host: str, port: int, path: str, identity: object) -> Any:
        if host not in self.answering or path != "/members":
            return None
        return [
            {"id": i, "name": p.name, "peerURLs": [p.peer_url], "clientURLs": [p.client_url] * (p.host in self.ran)}
            for i, p in enumerate(plan_members(ENDPOINTS), 1)
        ]

    async def run_at(self, endpoints: Sequence[str]) -> str:
        assert list(endpoints) == ENDPOINTS[1:]
        if not self.run:
            raise StoreUnavailable("no majority")
        return self.run

    def leave_data(self, run: str) -> None:
        (self.mine.data_dir / "member" / "wal").mkdir(parents=True)
        if run:
            self.mine.note_run(run)

    def begin(self) -> EtcdMember:
        found = asyncio.run(
            start_local_member(ENDPOINTS, self.folder, timeout_s=0.0, run_at=self.run_at, log=self.log.append)
        )
        assert found is not None
        return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)

    async def listening(member: EtcdMember, timeout_s: float) -> None:
        return None

    async def no_majority(*_: object) -> None:
        raise StoreUnavailable("nobody answers in time")

    async def nothing(*_: object) -> Any:
        return etcd_cluster._Program.OTHER

    monkeypatch.setattr(etcd_cluster, "can_bind", lambda address, port: True)
    monkeypatch.setattr(etcd_cluster, "_get_json", made.members)
    monkeypatch.setattr(etcd_cluster, "_change_cluster", no_majority)
    monkeypatch.setattr(etcd_cluster, "_program_at", nothing)
    monkeypatch.setattr(EtcdMember, "start", lambda member, **how: made.started.append(how))
    monkeypatch.setattr(EtcdMember, "wait_listening", listening)
    return made


def test_data_of_an_earlier_run_are_deleted_when_the_others_serve_a_new_one(cluster: Cluster) -> None:
    cluster.leave_data("1")
    cluster.answering = cluster.ran = ("b", "c")
    member = cluster.begin()
    assert not member.has_data() and not member.run_before()
    assert [how["existing"] for how in cluster.started] == [True], "it joins the new store"
    assert str(member.data_dir) in cluster.log[0]


@pytest.mark.parametrize(
    ("before", "stored", "answering"),
    [
        pytest.param("2", "2", ("b", "c"), id="the same run"),
        pytest.param("", "2", ("b", "c"), id="written before the job was agreed on"),
        pytest.param("1", "2", ("b",), id="the others are no majority"),
        pytest.param("1", "", ("b", "c"), id="the others serve nothing without this member"),
    ],
)
def test_other_data_are_kept(cluster: Cluster, before: str, stored: str, answering: tuple[str, ...]) -> None:
    cluster.leave_data(before)
    cluster.run, cluster.answering, cluster.ran = stored, answering, ("127.0.0.1", "b", "c")
    assert cluster.begin().has_data()
    assert cluster.started == [{}] and not cluster.log


def test_a_store_without_a_run_is_not_that_of_the_data(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(_: Sequence[str]) -> str:
        return ""

    monkeypatch.setattr(cluster, "run_at", none)
    cluster.leave_data("1")
    cluster.answering = cluster.ran = ("b", "c")
    assert not cluster.begin().has_data()


def test_members_without_data_name_the_one_that_has_them(cluster: Cluster) -> None:
    """The others deleted theirs when the run ended, so nobody has a majority with the one that is left."""
    cluster.answering, cluster.ran = ("b",), ("127.0.0.1", "b", "c")
    with pytest.raises(StoreError) as raised:
        cluster.begin()
    theirs = plan_members(ENDPOINTS)[1].name
    for words in (f"b:2379 ({cluster.folder / theirs})", "delete these folders", "start the other launchers first"):
        assert words in str(raised.value)
    assert "c:2379" not in str(raised.value)


def test_data_that_are_deleted_take_their_note_along(cluster: Cluster) -> None:
    cluster.leave_data("1")
    assert cluster.mine.run_before() == "1"
    cluster.mine.discard()
    assert not cluster.mine.run_before()
