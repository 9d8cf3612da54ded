"""Finding the connections of a process group."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from edl.torch.addresses import Addresses, endpoint, published
from edl.torch.group import NotingStore, TorchGroup, forget_default_group
from edl.torch.sockets import connections, listeners
from edl.wire.local import Seat
from tests.torch_release import installed

pytestmark = pytest.mark.torch


def said(family: int, rest: bytes) -> bytes:
    address = (struct.pack("=H", family) + rest).ljust(136, b"\x7f")
    return struct.pack("=Q", 2) + b"vm" + struct.pack("=Q", len(address)) + address + bytes(24)


V4 = said(socket.AF_INET, struct.pack("!H", 38491) + bytes([10, 0, 0, 7]))
V6 = said(socket.AF_INET6, struct.pack("!HI", 4567, 0) + socket.inet_pton(socket.AF_INET6, "fd00::7"))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (V4, ("10.0.0.7", 38491)),
        (V6, ("fd00::7", 4567)),
        (said(socket.AF_UNIX, b"/tmp/gloo"), None),
        (V4[:40], None),
        (b"", None),
        (b"\xff" * 200, None),
        (struct.pack("=QQ", 0, 4) + b"abcd", None),
    ],
)
def test_what_gloo_publishes(data: bytes, found: tuple[str, int] | None) -> None:
    assert published(data) == found


def test_one_host_is_one_whatever_socket_it_is_seen_through() -> None:
    assert endpoint("::ffff:10.0.0.7", 1) == endpoint("10.0.0.7", 1)
    assert endpoint("fe80::1%eth0", 1) == ("fe80::1", 1)


ME, PEER, STORE, OTHER = ("10.0.0.7", 38491), ("10.0.0.8", 40000), ("10.0.0.9", 29500), ("10.0.0.7", 51000)


@pytest.mark.parametrize(
    ("here", "there", "member", "rank_0"),
    [
        (ME, OTHER, True, True),  # a peer has called
        (ME, None, True, True),  # and gone
        (OTHER, PEER, True, True),  # this one has called
        (OTHER, STORE, True, False),
        ((ME[0], 29500), OTHER, False, True),  # at rank 0, somebody has called the store
        (OTHER, (OTHER[0], 29500), False, True),  # that is rank 0 itself
        (OTHER, ("10.0.0.1", 29500), False, False),  # another host, the same port
        (OTHER, ("10.0.0.8", 443), False, False),  # the same host, another port
        (OTHER, (ME[0], 5432), False, False),
        (OTHER, None, False, False),
    ],
)
def test_a_connection_belongs_to_the_group_by_its_ends(
    here: tuple[str, int], there: tuple[str, int] | None, member: bool, rank_0: bool
) -> None:
    for serves, expected in ((False, member), (True, rank_0)):
        group = Addresses(29500, serves)
        group.store_hosts = frozenset() if serves else frozenset({STORE[0]})
        group.note_own(V4)
        group.note_other(said(socket.AF_INET, struct.pack("!H", PEER[1]) + socket.inet_aton(PEER[0])))
        assert (group.accepted(here) or group.called(here, there)) is expected


@contextmanager
def a_connection(server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_connection(server.getsockname()) as here, server.accept()[0] as there:
        yield here, there


def numbers(*opened: socket.socket) -> set[int]:
    return {one.fileno() for one in opened}


def test_only_those_of_the_group_are_found() -> None:
    def publish(server: socket.socket) -> bytes:
        host, port = server.getsockname()
        return said(socket.AF_INET, struct.pack("!H", port) + socket.inet_aton(host))

    with (
        socket.create_server(("127.0.0.1", 0)) as mine,
        socket.create_server(("127.0.0.1", 0)) as peers,
        socket.create_server(("127.0.0.1", 0)) as store,
        socket.create_server(("127.0.0.1", 0)) as scripts,
        a_connection(mine) as (_, accepted),
        a_connection(peers) as (called, _),
        a_connection(store) as (asking, _),
        a_connection(scripts),
        socket.socket() as nothing_yet,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(type=socket.SOCK_DGRAM),
    ):
        group = Addresses(store.getsockname()[1], serves=False)
        group.note_own(publish(mine))
        group.note_other(publish(peers))
        assert {number for number, _ in connections(group)} == numbers(accepted, called)
        group.store_hosts = frozenset({"127.0.0.1"})
        assert {number for number, _ in connections(group)} == numbers(accepted, called, asking)
        assert {number for number, _ in listeners(group)} == numbers(mine)
        assert nothing_yet.fileno() >= 0 and local.fileno() >= 0


@pytest.mark.parametrize("of_the_store", [False, True])
def test_a_port_is_anybodys_once_its_listener_is_closed(of_the_store: bool) -> None:
    """As when a group could not be formed: the script's next connection may be from that port."""
    with socket.create_server(("127.0.0.1", 0)) as mine, socket.create_server(("127.0.0.1", 0)) as scripts:
        host, port = mine.getsockname()
        group = Addresses(port if of_the_store else 1, serves=of_the_store)
        if not of_the_store:
            group.note_own(said(socket.AF_INET, struct.pack("!H", port) + socket.inet_aton(host)))
        with a_connection(mine) as (_, accepted):
            assert accepted.fileno() in {number for number, _ in connections(group)}
        mine.close()
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            caller.bind((host, port))
            caller.connect(scripts.getsockname())
            assert connections(group) == frozenset()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_call_that_nobody_answers_is_found_too(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as full, socket.socket(family) as other:
        for server in (full, other):
            server.bind((host, 0))
            server.listen(0)
        with socket.create_connection(full.getsockname()[:2]), socket.create_connection(other.getsockname()[:2]):
            callers = [socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(2)]
            for caller, server in zip(callers, (full, other), strict=True):
                assert caller.connect_ex(server.getsockname()[:2])
            rest = struct.pack("!H", full.getsockname()[1]) + (b"" if family == socket.AF_INET else bytes(4))
            group = Addresses(1, serves=False)
            group.note_other(said(family, rest + socket.inet_pton(family, host)))
            found = {number for number, _ in connections(group)}
            assert callers[0].fileno() in found and callers[1].fileno() not in found
            for caller in callers:
                caller.close()


def test_gloo_of_this_torch_publishes_what_is_understood_and_an_abort_ends_its_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edl.torch.group._watching", None)  # the aborted group must not watch the next test's
    seat = Seat(
        round=1, rank=0, local_rank=0, world_size=1, local_world_size=1, node="n", nodes=1, position=0,
        endpoints=("h:1",), master="127.0.0.1:1", era=1, restore_era=0, restore_commit=0, shards=1, stored=False,
        checkpoint_dir="", token="",
    )  # fmt: skip
    group = TorchGroup(seat)
    group.connect("gloo")
    try:
        (found,) = group.addresses.own
        if installed() >= (2, 6):  # before that a rank that is alone has nothing to read
            assert found in group.addresses.others, "each rank reads all, its own as well"
        assert len(listeners(group.addresses)) == 1
        more = dist.new_group([0], backend="gloo")
        assert more is not None and len(listeners(group.addresses)) == 2, "groups within the group as well"
        (noting, *_) = [one for one in group._held if isinstance(one, NotingStore)]
        assert noting.add("count", 1) == 1
        group.abort()
        with pytest.raises(ConnectionError, match="round 1 was aborted"):
            noting.get("anything")
    finally:
        forget_default_group()  # or the next test in this process finds it
        group.retire()
