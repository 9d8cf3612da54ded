"""Reserved ports stay reserved, and the workers get them all the same."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from edl.agent.workers.ports import PortReservation


@pytest.fixture
def reservation() -> Iterator[PortReservation]:
    made = PortReservation()
    yield made
    made.release()


@contextlib.contextmanager
def bound(port: int, *, reuse: bool, family: socket.AddressFamily = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        if reuse:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", port))
        yield taken


def test_all_ports_differ(reservation: PortReservation) -> None:
    ports = reservation.ports(20)
    assert len(set(ports)) == 20
    assert all(1024 <= port <= 65535 for port in ports)


def test_the_same_ports_are_named_until_a_round_uses_them(reservation: PortReservation) -> None:
    assert reservation.ports(3) == reservation.ports(3)


def test_nobody_else_gets_one_who_does_not_know_it(reservation: PortReservation) -> None:
    port = reservation.ports(1)[0]
    with pytest.raises(OSError, match="in use"), bound(port, reuse=False):
        pass
    other = PortReservation()
    assert not set(other.ports(200)) & {port}
    other.release()


def test_a_worker_takes_its_port_over_while_it_is_held(reservation: PortReservation) -> None:
    port = reservation.ports(1)[0]
    with bound(port, reuse=True) as served:
        served.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
            accepted, _ = served.accept()
            accepted.sendall(b"hello")
            assert client.recv(5) == b"hello"
            accepted.close()


def test_a_worker_may_serve_both_families(reservation: PortReservation) -> None:
    """torch's store listens on the IPv6 wildcard, for IPv4 too."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    port = reservation.ports(1)[0]
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as served:
        served.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        served.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        served.bind(("::", port))
        served.listen()


def test_nobody_listens_before_the_worker_does(reservation: PortReservation) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", reservation.ports(1)[0]), timeout=1)


def test_the_next_round_gets_other_ports(reservation: PortReservation) -> None:
    seen: set[int] = set()
    for _ in range(20):
        ports = reservation.ports(5)
        assert not seen & set(ports)
        seen = set(ports)
        reservation.use()


def test_another_number_of_slots_gets_another_set(reservation: PortReservation) -> None:
    assert len(reservation.ports(2)) == 2
    assert len(reservation.ports(4)) == 4


def test_released_ports_are_free(reservation: PortReservation) -> None:
    port = reservation.ports(1)[0]
    reservation.release()
    with bound(port, reuse=False):
        pass


def test_used_ports_are_let_go_when_the_next_are_reserved(reservation: PortReservation) -> None:
    port = reservation.ports(1)[0]
    reservation.use()
    reservation.ports(1)
    with bound(port, reuse=False):
        pass


def test_a_host_without_ports_says_so_and_keeps_nothing(
    reservation: PortReservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = reservation.ports(1)
    made: list[socket.socket] = []

    class Scarce(socket.socket):
        def bind(self, address: object, /) -> None:
            made.append(self)
            if len(made) == 3:
                raise OSError(98, "Address already in use")
            super().bind(("", 0))

    monkeypatch.setattr(socket, "socket", Scarce)
    with pytest.raises(OSError, match="in use"):
        reservation.ports(5)
    assert [scarce.fileno() for scarce in made] == [-1, -1, -1]
    assert reservation.ports(1) == before
