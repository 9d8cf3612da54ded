"""Names of this host, and what other nodes make of them."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from edl.errors import SettingError
from edl.launch import addresses
from edl.launch.addresses import address_towards, only_here


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
