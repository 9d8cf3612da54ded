"""Names of this host, and what other nodes make of them."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from edl.launch import addresses
from edl.launch.addresses import only_here


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
    monkeypatch.setattr(addresses, "address_towards", lambda endpoint: outward)
    said = only_here(host, "beta:2379")
    assert bool(said) is wrong
    assert not wrong or ("127.0.1.1" in said and f"at {outward}" in said)
