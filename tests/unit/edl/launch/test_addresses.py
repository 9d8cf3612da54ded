"""Names of this host, and what other nodes make of them."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from edl.errors import SettingError
from edl.launch import addresses
from edl.launch.addresses import address_towards, only_here, reachable_address, seen_at


@pytest.mark.parametrize(
    ("host", "found", "outward", "wrong"),
    [
        ("alpha", ["127.0.1.1"], "10.0.0.5", True),
        ("alpha", ["127.0.1.1", "::1"], "fd00::5", True),
        ("alpha", ["127.0.1.1", "10.0.0.5"], "10.0.0.5", False),
        ("alpha", ["10.0.0.5"], "10.0.0.5", False),
        ("alpha", ["127.0.1.1"], "127.0.0.1", False),  # all nodes are on this host
        ("127.0.0.1", ["127.0.0.1"], "10.0.0.5", False),  # on purpose
    ],
)
def test_a_name_that_means_this_host_to_itself_alone_is_said(
    monkeypatch: pytest.MonkeyPatch, host: str, found: list[str], outward: str, wrong: bool
) -> None:
    def resolve(_: str, port: object, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(addresses, "address_towards", lambda endpoints: outward)
    said = only_here(host, ["beta:2379"])
    assert bool(said) is wrong
    assert not wrong or ("127.0.1.1" in said and f"at {outward}" in said)


ROUTES: dict[str, str | OSError | None] = {
    "alpha": socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    "beta": None,
    "gamma": "10.0.0.5",
    "delta": "10.1.0.5",
    "self": "127.0.0.1",
}
"""This host's address on the way to each host; None: there is no route."""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    def towards(host: str, port: int) -> str | None:
        found = ROUTES[host]
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(addresses, "own_address_towards", towards)


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["gamma", "delta"], "10.0.0.5"),
        (["alpha", "beta", "gamma"], "10.0.0.5"),  # the first host is lost, and its name with it
        (["self", "gamma"], "10.0.0.5"),  # /etc/hosts has a loopback address for this host's own name
        (["self"], "127.0.0.1"),
    ],
)
def test_any_host_of_the_store_tells_this_ones_address(hosts: list[str], expected: str) -> None:
    assert address_towards([f"{host}:2379" for host in hosts]) == expected


@pytest.mark.usefixtures("network")
def test_without_a_route_to_any_of_them_the_address_has_to_be_named() -> None:
    with pytest.raises(SettingError, match=r"no route from here to alpha:2379, beta:2379\. Name this node's address"):
        address_towards(["alpha:2379", "beta:2379"])


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "default_route_address", lambda: "10.0.0.9")
    monkeypatch.setattr(addresses, "can_bind", lambda address, port: address == "10.0.0.7")
    for host in ("localhost", "127.0.0.1", "127.0.1.1"):
        monkeypatch.setitem(ROUTES, host, "127.0.0.1")


@pytest.mark.usefixtures("network", "routed")
@pytest.mark.parametrize(
    ("local_addr", "hosts", "nodes", "expected", "lines"),
    [
        ("", ["self"], 2, "10.0.0.9", 1),  # only /etc/hosts of this host says loopback
        ("", ["self"], 1, "127.0.0.1", 0),
        ("", ["localhost"], 2, "127.0.0.1", 0),
        ("", ["127.0.0.1"], 2, "127.0.0.1", 0),
        ("", ["127.0.1.1"], 2, "127.0.0.1", 0),
        ("", ["self", "gamma"], 2, "10.0.0.5", 0),
        ("", ["gamma"], 2, "10.0.0.5", 0),
        ("mine", ["self"], 2, "mine", 0),
    ],
)
def test_others_do_not_get_a_loopback_address_from_etc_hosts(
    local_addr: str, hosts: list[str], nodes: int, expected: str, lines: int
) -> None:
    said: list[str] = []
    assert reachable_address(local_addr, [f"{host}:2379" for host in hosts], nodes, said.append) == expected
    assert len(said) == lines
    assert all("self has a loopback address" in line and "/etc/hosts" in line for line in said)


@pytest.mark.usefixtures("network")
def test_without_a_default_route_the_loopback_address_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "default_route_address", lambda: None)
    assert reachable_address("", ["self:2379"], 2) == "127.0.0.1"


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize(
    ("local_addr", "nodes", "expected"),
    [
        ("", 1, ""),
        ("10.0.0.7", 1, ""),
        ("", 2, "10.0.0.9"),
        ("10.0.0.7", 2, "10.0.0.7"),
        ("mine", 2, "10.0.0.9"),
        ("192.0.2.7", 2, "10.0.0.9"),  # of a router
    ],
)
def test_where_a_store_member_is_seen(local_addr: str, nodes: int, expected: str) -> None:
    assert seen_at(local_addr, nodes) == expected
