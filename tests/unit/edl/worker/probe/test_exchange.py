"""Exchanges between probes on loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from unittest import mock

import pytest

from edl.types import NodeId
from edl.wire.health import CheckHealth, HealthPeer, LinkFinding
from edl.wire.health_records import ProbeOrder
from edl.worker.probe import exchange
from edl.worker.probe.exchange import Exchanges, block_of

LIMIT_S = 60.0


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV6 = _has_ipv6()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a test can compute quickly, larger than a socket's buffers."""
    monkeypatch.setattr(exchange, "BLOCK_BYTES", 6 << 20)
    monkeypatch.setattr(exchange.block_of, "__defaults__", (6 << 20,))


def order(node: str, peers: Sequence[HealthPeer] = (), *, stage: int = 1, shared: str = "s") -> ProbeOrder:
    ordered = CheckHealth(1, stage, 0, tuple(peers), 64, 10.0, "test")
    return ProbeOrder(ordered, NodeId(node), 1, shared)


class Group:
    """Probes of several nodes, each of which exchanges data with all others."""

    def __init__(self, names: str, host: str = "127.0.0.1", **orders: ProbeOrder) -> None:
        self.names = names
        self.probes = {name: Exchanges(orders.get(name, order(name))) for name in names}
        for name, probe in self.probes.items():
            peers = tuple(HealthPeer(NodeId(other), host, self.probes[other].port) for other in names if other != name)
            probe._order = order(name, peers, stage=probe._order.stage).order

    def run(self, limit_s: float = LIMIT_S, without: str = "") -> dict[str, dict[str, LinkFinding]]:
        """What each node has found about the others."""
        found: dict[str, dict[str, LinkFinding]] = {}

        def run(name: str) -> None:
            links = self.probes[name].run(time.monotonic() + limit_s)
            found[name] = {link.node: link for link in links}

        threads = [threading.Thread(target=run, args=(name,)) for name in self.names if name not in without]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in without:
            self.probes[name]._listener.close()
        return found


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_all_bytes_arrive(names: str) -> None:
    found = Group(names).run()
    for name in names:
        assert set(found[name]) == set(names) - {name}
        for link in found[name].values():
            assert link.error == "" and link.latency_s > 0 and link.bytes_per_s > 0


@pytest.mark.skipif(not IPV6, reason="this host has no IPv6")
def test_nodes_with_ipv6_addresses() -> None:
    found = Group("ab", "::1").run()
    assert found["a"]["b"].error == found["b"]["a"].error == ""


def test_bytes_that_change_on_the_way_are_found_on_both_sides() -> None:
    real = block_of

    def corrupt(number: int, stage: int, sender: str, size: int = 0) -> bytes:
        data = bytearray(real(number, stage, sender))
        if sender == "a" and threading.current_thread().name == "a":
            data[-1] ^= 1  # only what a itself sends
        return bytes(data)

    group = Group("ab")
    with mock.patch.object(exchange, "block_of", corrupt):
        found: dict[str, dict[str, LinkFinding]] = {}

        def run(name: str) -> None:
            found[name] = {one.node: one for one in group.probes[name].run(time.monotonic() + LIMIT_S)}

        threads = [threading.Thread(target=run, args=(name,), name=name) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found["a"]["b"].error == "bytes arrived there that were not sent here"
    assert found["b"]["a"].error == "bytes arrived here that were not sent there"


def test_a_node_that_is_not_there_fails_alone() -> None:
    # A run without c lasts as long as its limit. On a busy machine the exchange of the others may need a longer one.
    limit_s = 1.0
    found = Group("abc").run(limit_s, without="c")
    while (found["a"]["b"].error or found["b"]["a"].error) and limit_s < LIMIT_S:
        limit_s *= 5
        found = Group("abc").run(limit_s, without="c")
    assert found["a"]["b"].error == found["b"]["a"].error == ""
    assert found["a"]["c"].error == "it did not connect in time"


def test_a_refused_connection_is_retried_until_the_time_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    probe = Exchanges(order("b", [HealthPeer(NodeId("a"), "127.0.0.1", port)]))
    (link,) = probe.run(time.monotonic() + 0.5)
    assert "cannot connect to 127.0.0.1:" in link.error or link.error == "it did not connect in time"


@pytest.mark.parametrize(
    "stranger", [order("b", shared="other"), order("b", stage=2)], ids=["of another job", "of another stage"]
)
def test_a_stranger_is_not_listened_to(stranger: ProbeOrder) -> None:
    found = Group("ab", b=stranger).run(limit_s=1.0)
    assert found["a"]["b"].error and found["b"]["a"].error


def test_noise_on_the_port_does_no_harm() -> None:
    group = Group("ab")
    with socket.create_connection(("127.0.0.1", group.probes["a"].port)) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        found = group.run()
    assert found["a"]["b"].error == found["b"]["a"].error == ""


def test_a_taken_port_is_an_error() -> None:
    with socket.create_server(("", 0)) as taken:
        ordered = order("a")
        same = CheckHealth(1, 1, taken.getsockname()[1], (), 64, 10.0, "test")
        with pytest.raises(OSError):
            Exchanges(ProbeOrder(same, ordered.node, 1, "s"))
