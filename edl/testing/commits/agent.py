"""An agent in the same thread as its worker: messages are delivered at once, in an order that a schedule decides."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from edl.wire import local
from edl.wire.local import Seat
from edl.wire.memory_file import write_memory
from edl.worker.framework import Communicator
from edl.worker.link import Link

Idle = Callable[[], bool]
"""Called when the worker waits: triggers the next event; returns False if there is none."""
Key = tuple[str, int, int, int]
"""Stream, era, commit, shard."""


class Stuck(AssertionError):
    """The worker waits for something that will never come."""


class Agent:
    """An agent that stores everything that its worker commits."""

    def __init__(self, idle: Idle) -> None:
        self.kept: dict[Key, bytes] = {}
        self.said: list[local.ToAgent] = []
        self.sent = 0
        """Messages to the worker so far."""
        self._files: dict[int, int] = {}
        self.link = DirectLink(self, idle)

    def close(self) -> None:
        """Free the memory of the agent and of its link."""
        self.link.end()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def tell(self, message: local.ToWorker, *descriptors: int) -> None:
        """Deliver a message to the worker's side thread, now."""
        self.sent += 1
        self.link._take(message, list(descriptors))

    def place(self, seat: Seat) -> None:
        """Give the worker this place in a world."""
        self._tell_memory(local.Place(seat.round), json.dumps(dataclasses.asdict(seat)).encode())

    def take(self, message: local.ToAgent) -> None:
        """Handle a message from the worker."""
        self.said.append(message)
        match message:
            case local.Want(stream, size):
                self._offer(stream, size)
            case local.Committed():
                data = os.pread(self._files[message.buffer], message.size, 0)
                self.kept[message.stream, message.era, message.commit, message.shard] = data
                self._offer(message.stream, message.size)
            case local.Fetch(stream, era, commit, shard, number):
                piece = self.kept.get((stream, era, commit, shard))
                if piece is None:
                    self.tell(local.NoPiece(stream, "nobody has it", number))
                else:
                    self._tell_memory(local.Piece(stream, len(piece)), piece)

    def _offer(self, stream: str, size: int) -> None:
        number = len(self._files)
        self._files[number] = descriptor = os.memfd_create("edl-testing")
        os.ftruncate(descriptor, size)
        self.tell(local.Buffer(stream, number, size), descriptor)

    def _tell_memory(self, message: local.ToWorker, data: bytes) -> None:
        descriptor = write_memory("edl-testing", data)
        try:
            self.tell(message, descriptor)
        finally:
            os.close(descriptor)


class DirectLink(Link):
    """A link without a socket and without a side thread."""

    def __init__(self, agent: Agent, idle: Idle) -> None:
        self._unused = socket.socketpair()
        super().__init__(self._unused[0], lambda: None)
        self._agent = agent
        self._idle = idle
        self._interrupt = self._disconnect
        self._interrupted: list[Communicator] = []

    def _disconnect(self, group: Communicator) -> None:
        group.disconnect()
        self._interrupted.append(group)

    def end_grace(self) -> None:
        """Abort the interrupted groups; see ``edl.worker.interruption``."""
        while self._interrupted:
            self._interrupted.pop().abort()

    @property
    def busy(self) -> bool:
        """Whether the training thread holds the lock, so that the side thread would have to wait."""
        held: bool = self._changed._is_owned()  # type: ignore[attr-defined]
        return held

    def end(self) -> None:
        """Unmap all memory and close the sockets."""
        for stream in self._streams.values():
            for memory in stream.maps.values():
                memory.close()
        self._drop_pieces()
        for one in self._unused:
            one.close()

    def send(self, message: local.ToAgent) -> None:
        """Hand the message to the agent."""
        self._agent.take(message)

    def _wait(self, ask: Callable[[], Any], longest_s: float | None = None) -> Any:
        while True:
            sent = self._agent.sent
            with self._changed:
                answer = ask()
            if answer is not None and answer is not False:
                return answer
            if sent == self._agent.sent and not self._idle():
                if longest_s is not None:
                    return None
                raise Stuck("the worker waits, and nothing more will happen")
