"""Which addresses of this host a store member can listen on."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from edl.adapters import etcd_cluster
from edl.adapters.etcd_cluster import can_bind, start_local_member
from edl.adapters.etcd_plan import plan_members
from edl.adapters.etcd_server import EtcdMember
from edl.errors import SettingError


@pytest.fixture
def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was started with ``ipv6.disable=1``, on a host whose names still have addresses of both kinds."""

    class Socket(socket.socket):
        def __init__(self, family: int = -1, *arguments: Any, **named: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *arguments, **named)

    def look(host: str, *_: Any, **__: Any) -> list[Any]:
        addresses = {"both": ("::1", "127.0.0.1"), "other": ("2001:db8::1", "192.0.2.1")}[host]
        return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "socket", Socket)
    monkeypatch.setattr(socket, "getaddrinfo", look)


@pytest.mark.usefixtures("without_ipv6")
def test_a_host_without_ipv6(tmp_path: Path) -> None:
    assert not can_bind("::1", 0)
    assert can_bind("127.0.0.1", 0)
    plan, *_ = plans = plan_members(["both:2379"])
    assert asyncio.run(etcd_cluster._addresses_of(plan, plans)) == etcd_cluster._Addresses(("127.0.0.1",))
    assert asyncio.run(start_local_member(["other:2379"], tmp_path)) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_address_that_another_host_sees(address: str) -> None:
    if not can_bind(address, 0):
        pytest.skip("this host has no IPv6")
    assert etcd_cluster._outward_address(address) == address


HERE, THERE = "10.0.0.5", "10.0.0.6"


class SharedName:
    """A name with the addresses of this host and of others, and which of them serve a store."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.addresses: tuple[str, ...] = (HERE, THERE)
        self.serving: tuple[str, ...] = ()
        self.log: list[str] = []
        self.listening: list[tuple[str, ...]] = []

        def look(host: str, *_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.addresses]

        async def asked(host: str, port: int, path: str, identity: object) -> Any:
            return {"etcdserver": "3.5.1"} if host in self.serving else None

        async def nothing(*_: object) -> None:
            return None

        monkeypatch.setattr(socket, "getaddrinfo", look)
        monkeypatch.setattr(
            etcd_cluster, "can_bind", lambda address, port: address in (HERE, "2001:db8::5", "127.0.0.1")
        )
        monkeypatch.setattr(etcd_cluster, "_get_json", asked)
        monkeypatch.setattr(EtcdMember, "start", lambda member: self.listening.append(member._listen))
        monkeypatch.setattr(EtcdMember, "wait_listening", nothing)

    def begin(self) -> None:
        assert asyncio.run(start_local_member(["train:2379"], self.folder, log=self.log.append)) is not None


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedName:
    return SharedName(tmp_path, monkeypatch)


def test_a_name_of_several_hosts_one_of_which_serves_a_store_is_refused(shared: SharedName) -> None:
    """Otherwise there would be one on each, and each pod of a headless service would train alone."""
    shared.serving = (THERE,)
    with pytest.raises(SettingError) as raised:
        shared.begin()
    for words in ("--rdzv-endpoint=train:2379", THERE, "Name one host per store member"):
        assert words in str(raised.value)
    assert not shared.listening


def test_a_name_with_addresses_that_do_not_answer_is_only_remarked_on(shared: SharedName) -> None:
    """They may be this host's own, behind a NAT."""
    shared.begin()
    assert shared.listening == [(HERE,)]
    (line,) = shared.log
    assert "train:2379" in line and THERE in line


@pytest.mark.parametrize(
    "addresses",
    [
        pytest.param((HERE, "2001:db8::5"), id="of both kinds"),
        pytest.param((HERE, "2001:db8::6"), id="without IPv6 here"),
        pytest.param((HERE, "127.0.1.1"), id="in /etc/hosts, too"),
    ],
)
def test_a_host_with_several_addresses_is_one_host(shared: SharedName, addresses: tuple[str, ...]) -> None:
    shared.addresses = addresses
    shared.begin()
    assert len(shared.listening) == 1 and not shared.log


@pytest.mark.parametrize(
    ("host", "resolved", "seen_at", "listens"),
    [
        ("train", ("127.0.1.1",), HERE, ("127.0.1.1", HERE)),
        ("train", ("127.0.1.1",), "", ("127.0.1.1",)),  # a job of one node
        ("train", ("127.0.1.1",), "127.0.0.1", ("127.0.1.1",)),
        ("localhost", ("127.0.0.1",), HERE, ("127.0.0.1",)),
        ("localhost.localdomain", ("127.0.0.1",), HERE, ("127.0.0.1",)),
        ("127.0.1.1", ("127.0.1.1",), HERE, ("127.0.1.1",)),
        ("train", (HERE,), "10.9.9.9", (HERE,)),
    ],
)
def test_the_only_member_also_listens_where_others_see_it(
    host: str, resolved: tuple[str, ...], seen_at: str, listens: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(_: str, *__: Any, **___: Any) -> list[Any]:
        return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(etcd_cluster, "can_bind", lambda address, port: True)
    monkeypatch.setattr(etcd_cluster, "_outward_address", lambda host: resolved[0])
    plan, *_ = plans = plan_members([f"{host}:2379"])
    assert asyncio.run(etcd_cluster._addresses_of(plan, plans, seen_at)).own == listens
