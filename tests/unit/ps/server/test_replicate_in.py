"""Streams of other pservers: for which number and history they were opened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ps.net.caller import EndpointPeer
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.server.replicate_in import ReplicationIn
from ps.store.store import RowStore


class Peer:
    """The connection of a sender."""

    def __init__(self, number: int) -> None:
        self.number, self.data, self.closed = number, None, False

    def hang_up(self) -> None:
        self.closed = True


def test_a_new_number_closes_the_streams_that_were_opened_for_the_previous_one() -> None:
    """A stream for the new number may come before the old rows are dropped: its sender has heard of it first."""
    shell: Any = SimpleNamespace(number=3, history=1, version=5)
    replication = ReplicationIn(shell, RowStore(kernels="numpy"))

    def send(peer: Peer, number: int, history: int) -> FrameOp:
        head = pack_head({"to": number, "history": history, "items": []})
        frame = Frame(FrameOp.STREAM, 1, bytes(head), memoryview(b""))
        return replication.take(cast(EndpointPeer, peer), frame).op

    old, unused, new = Peer(1), Peer(2), Peer(4)
    assert send(old, 3, 1) is FrameOp.OK
    assert send(unused, 4, 1) is FrameOp.REFUSED
    shell.number, shell.history = 4, 2
    assert send(new, 4, 2) is FrameOp.OK
    replication.reset()
    assert (old.closed, unused.closed, new.closed) == (True, False, False)
