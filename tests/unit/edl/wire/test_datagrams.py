"""What arrives on a local socket, whatever becomes of its other end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from edl.wire.datagrams import receive

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_messages_and_descriptors_arrive_in_order_until_the_end(pair: Pair) -> None:
    ours, theirs = pair
    reading, writing = os.pipe()
    socket.send_fds(theirs, [b"first"], [writing])
    theirs.send(b"second")
    theirs.close()
    os.close(writing)
    data, (descriptor,) = receive(ours, 1)
    os.write(descriptor, b"x")
    assert (data, os.read(reading, 1), os.get_inheritable(descriptor)) == (b"first", b"x", False)
    assert [receive(ours), receive(ours), receive(ours)] == [(b"second", []), (b"", []), (b"", [])]
    os.close(reading)
    os.close(descriptor)


def test_what_was_sent_arrives_although_the_other_end_has_closed_with_something_unread(pair: Pair) -> None:
    ours, theirs = pair
    ours.send(b"never read")
    theirs.send(b"order")
    theirs.close()
    assert [receive(ours), receive(ours)] == [(b"order", []), (b"", [])]


def test_a_socket_that_does_not_wait_says_so(pair: Pair) -> None:
    ours, _ = pair
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        receive(ours)
    ours.settimeout(0.001)
    with pytest.raises(TimeoutError):
        receive(ours)


def test_a_closed_socket_has_ended(pair: Pair) -> None:
    ours, _ = pair
    ours.close()
    assert receive(ours) == (b"", [])
