"""Exchanges between devices, with stand-ins for the devices and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from edl.types import NodeId
from edl.wire.health import CheckHealth, HealthChecked, HealthPeer, LinkFinding
from edl.wire.health_records import ProbeOrder
from edl.worker.probe.device_exchanges import UNFINISHED, ExchangeTimes, between_devices
from edl.worker.probe.exchange import Exchanges, NotBegun
from edl.worker.probe.main import exchanged


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Links:
    """Device links. ``course``: called with the host of the peer and the limit."""

    store_port = 5

    def __init__(self, course: Callable[[str, float], None]) -> None:
        self._course = course
        self.calls: list[tuple[str, int]] = []
        self.limits: list[float] = []

    def exchange(self, name: str, rank: int, host: str, port: int, limit_s: float) -> None:
        self.calls.append((name, rank))
        self.limits.append(limit_s)
        self._course(host, limit_s)


class BytesOnly:
    """Exchanges of bytes; those with absent nodes take all the time."""

    def __init__(self, clock: Clock, nodes: str, absent: str) -> None:
        self._clock = clock
        self._nodes = nodes
        self._absent = absent
        self.stores = {node: 7 for node in nodes if node not in absent}

    def run(self, until_s: float) -> tuple[LinkFinding, ...]:
        if self._absent:
            self._clock.now_s = until_s
        return tuple(LinkFinding(NodeId(one), "timed out" if one in self._absent else "") for one in self._nodes)


def order(node: str, peers: str) -> ProbeOrder:
    found = tuple(HealthPeer(NodeId(name), name, 1) for name in peers)
    return ProbeOrder(CheckHealth(1, 2, 1, found, 64, 60.0, "test"), NodeId(node), 2, "s")


def answers(
    node: str, peers: str, links: Links, clock: Clock, *, until_s: float = 30.0, absent: str = ""
) -> list[HealthChecked]:
    bytes_only = cast("Exchanges", BytesOnly(clock, peers, absent))
    return list(exchanged(order(node, peers), HealthChecked(1, 2), bytes_only, links, until_s, clock))


def errors(answer: HealthChecked) -> dict[str, str]:
    return {link.node: link.error for link in answer.links}


def test_only_peers_with_devices_whose_bytes_have_arrived_take_part() -> None:
    found = tuple(LinkFinding(NodeId(name), "timed out" if name == "c" else "") for name in "edca")

    def course(host: str, limit_s: float) -> None:
        if host == "d":
            raise RuntimeError("NCCL error")

    links, stores = Links(course), {"a": 7, "c": 8, "d": 9, "e": 0}
    times = ExchangeTimes.between(0.0, 30.0)
    *_, last = between_devices(order("b", "acde"), HealthChecked(1, 2, links=found), stores, links, times, Clock())
    assert links.calls == [("1/2/a/b", 1), ("1/2/b/d", 0)]
    assert errors(last) == {"e": "", "d": "between the devices: RuntimeError: NCCL error", "c": "timed out", "a": ""}


def test_a_node_that_does_not_send_its_bytes_leaves_time_for_the_devices_of_the_others() -> None:
    """c has only b to wait for. It is still there when b has given a up, and both then have the same time left."""
    ends: dict[str, float] = {}
    for node, peers, absent in (("b", "ac", "a"), ("c", "b", "")):
        clock = Clock()
        links = Links(lambda host, limit_s: None)
        answers(node, peers, links, clock, absent=absent)
        (limit_s,) = links.limits
        assert limit_s >= 10.0
        ends[node] = clock.now_s + limit_s
    assert ends["b"] == pytest.approx(30.0)
    assert ends["c"] == pytest.approx(30.0)


@pytest.mark.parametrize("absent", ["", "a"])
def test_an_exchange_that_hangs_leaves_time_for_the_next_ones(absent: str) -> None:
    clock = Clock()

    def course(host: str, limit_s: float) -> None:
        clock.now_s += limit_s if host == "c" else 0.0
        if host == "c":
            raise RuntimeError("timed out")

    links = Links(course)
    *_, last = answers("b", "acde", links, clock, absent=absent)
    assert min(links.limits) >= 30.0 / 3 / 4
    assert {name for name, error in errors(last).items() if not error} == set("ade") - set(absent)


def test_an_exchange_that_never_ends_spoils_no_other_result() -> None:
    class Hangs(BaseException):
        """In place of a call that does not return."""

    def course(host: str, limit_s: float) -> None:
        if host == "c":
            raise Hangs

    seen: list[HealthChecked] = []
    clock = Clock()
    bytes_only = cast("Exchanges", BytesOnly(clock, "acd", ""))
    found = exchanged(order("b", "acd"), HealthChecked(1, 2), bytes_only, Links(course), 30.0, clock)
    with pytest.raises(Hangs):
        seen.extend(found)
    assert errors(seen[-1]) == {"a": "", "c": UNFINISHED}, "of d nothing is known yet"


def test_a_peer_that_does_not_begin_has_no_result() -> None:
    def course(host: str, limit_s: float) -> None:
        if host == "a":
            raise NotBegun("no value for key")

    *_, last = answers("b", "ac", Links(course), Clock())
    assert errors(last) == {"c": ""}
    assert last.remarks == ("no exchange with the devices of a: no value for key",)


def test_nor_has_one_for_which_no_time_is_left() -> None:
    clock = Clock()

    def late(host: str, limit_s: float) -> None:
        clock.now_s = 29.5

    links = Links(late)
    *_, last = answers("b", "ac", links, clock)
    assert links.calls == [("1/2/a/b", 1)]
    assert errors(last) == {"a": ""}
    assert last.remarks == ("no time was left for an exchange with the devices of c",)


def test_without_devices_the_bytes_have_all_the_time() -> None:
    clock = Clock()
    bytes_only = cast("Exchanges", BytesOnly(clock, "ac", "a"))
    (only,) = exchanged(order("b", "ac"), HealthChecked(1, 2), bytes_only, None, 30.0, clock)
    assert clock.now_s == 30.0
    assert errors(only) == {"a": "timed out", "c": ""}
