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
    assert asyncio.run(etcd_cluster._listen_addresses(plan, plans)) == ("127.0.0.1",)
    assert asyncio.run(start_local_member(["other:2379"], tmp_path)) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_address_that_another_host_sees(address: str) -> None:
    if not can_bind(address, 0):
        pytest.skip("this host has no IPv6")
    assert etcd_cluster._outward_address(address) == address
