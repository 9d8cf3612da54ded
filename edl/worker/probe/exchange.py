"""Exchanges data with other nodes over TCP: each side sends a block of known bytes, and both compare.

Of two nodes, the one whose name comes first listens. Before anything else, both prove that they belong to the same
check of the same job (``edl.wire.proof``). All exchanges of a node run at once, each in a thread; one that does
not end in time fails.
"""

from __future__ import annotations

import functools
import hashlib
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from edl.types import NodeId
from edl.wire.address import address
from edl.wire.health import HealthPeer, LinkFinding
from edl.wire.health_records import ProbeOrder
from edl.wire.proof import CALLED, CALLER, NONCE_BYTES, PROOF_BYTES, draw, holds, prove

BLOCK_BYTES = 16 << 20
PINGS = 21
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""Bounds of the pause between two attempts to connect: the other probe may not have started yet."""
LONGEST_HELLO = 4096
_MAGIC = b"edl-probe-1\n"
_RIGHT, _WRONG = b"\1", b"\0"


class DeviceLinks(Protocol):
    """Exchanges data between the devices of two nodes, through the communicator of the workers' framework."""

    store_port: int
    """Port on which it serves the framework's store, for exchanges with nodes that call this one."""

    def exchange(self, name: str, rank: int, host: str, port: int, limit_s: float) -> None:
        """Exchange data with another node. ``name``: of this exchange, the same on both sides. ``rank``: 0 on the side
        whose store is used, of which the other side (1) needs ``host`` and ``port``. ``limit_s``: most seconds of each
        of its steps. Raises ``NotBegun``, ``ExchangeFailed``, or whatever the framework raises."""
        ...


class ExchangeFailed(Exception):
    """The exchange with a node failed."""


class NotBegun(Exception):
    """The other side has not begun the exchange between devices, which says nothing about the devices."""


def block_of(number: int, stage: int, sender: str, size: int = BLOCK_BYTES) -> bytes:
    """The bytes that a node sends in a stage of a check."""
    return hashlib.shake_256(f"{number}/{stage}/{sender}".encode()).digest(size)


class Exchanges:
    """All exchanges of one node. It listens from its creation on, so that others can connect while its own part
    runs; they are answered in ``run``. Raises ``OSError`` if the port is taken."""

    def __init__(self, ordered: ProbeOrder) -> None:
        self._ordered = ordered
        self._order = ordered.order
        both = socket.has_dualstack_ipv6()  # the others may have an address of either family
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", ordered.order.port), family=family, backlog=16, dualstack_ipv6=both)
        self.store_port = 0
        """Port of ``DeviceLinks``, which the others learn; 0: this node has none."""
        self.stores: dict[str, int] = {}
        """Their ports, by node, as far as they have some."""
        self._found: dict[str, LinkFinding] = {}
        self._changed = threading.Condition()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listener.getsockname()[1])

    def run(self, until_s: float) -> tuple[LinkFinding, ...]:
        """Exchange data with all peers, until this time of the monotonic clock at most."""
        own = block_of(self._order.number, self._order.stage, self._ordered.node)
        peers = {peer.node: peer for peer in self._order.peers}
        called = [peer for peer in peers.values() if peer.node < self._ordered.node]
        callers = {str(node) for node in peers if node > self._ordered.node}
        for peer in called:
            self._in_thread(functools.partial(self._call, peer, own, until_s))
        if callers:
            self._in_thread(functools.partial(self._accept, callers, own, until_s))
        with self._changed:
            self._changed.wait_for(lambda: len(self._found) == len(peers), max(0.0, until_s - time.monotonic()))
            found = dict(self._found)
        self._listener.close()
        return tuple(found.get(node, LinkFinding(node, "it did not connect in time")) for node in peers)

    def _in_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def _put(self, found: LinkFinding) -> None:
        with self._changed:
            self._found[found.node] = found
            self._changed.notify_all()

    # --- who calls whom ----------------------------------------------------------------------------------------------

    def _call(self, peer: HealthPeer, own: bytes, until_s: float) -> None:
        with self._reported(peer.node):
            connection = _connected(peer, until_s)
            with connection:
                self.stores[peer.node] = self._introduce(connection, until_s)
                self._put(self._exchange(connection, peer.node, own, until_s, first=True))

    def _accept(self, callers: set[str], own: bytes, until_s: float) -> None:
        while len(callers) > sum(node in callers for node in self._found):
            self._listener.settimeout(max(0.01, until_s - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # too late, or closed
            self._in_thread(functools.partial(self._answer, connection, callers, own, until_s))

    def _answer(self, connection: socket.socket, callers: set[str], own: bytes, until_s: float) -> None:
        with connection:
            try:
                node = self._identify(connection, until_s)
            except (OSError, ExchangeFailed, ValueError):
                return  # a stranger
            if node not in callers:
                return
            with self._reported(node):
                self._put(self._exchange(connection, node, own, until_s, first=False))

    @contextmanager
    def _reported(self, node: str) -> Iterator[None]:
        """Report a failure as the result of the exchange with a node."""
        try:
            yield
        except ExchangeFailed as error:
            self._put(LinkFinding(NodeId(node), str(error)))
        except TimeoutError:
            self._put(LinkFinding(NodeId(node), "timed out"))
        except OSError as error:
            self._put(LinkFinding(NodeId(node), error.strerror or str(error)))

    # --- the messages ------------------------------------------------------------------------------------------------

    def _introduce(self, connection: socket.socket, until_s: float) -> int:
        """The caller's side of the introduction; returns the other's store port."""
        nonce = draw()
        hello = json.dumps([self._order.number, self._order.stage, self._ordered.node, self.store_port]).encode()
        _send(connection, _MAGIC + nonce + struct.pack("!I", len(hello)) + hello, until_s)
        answer = _receive(connection, NONCE_BYTES + PROOF_BYTES, until_s)
        other, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not holds(proof, self._ordered.secret, CALLED, nonce, other):
            raise ExchangeFailed("another program listens on its port")
        _send(connection, prove(self._ordered.secret, CALLER, nonce, other), until_s)
        (store_port,) = struct.unpack("!I", _receive(connection, 4, until_s))
        return int(store_port)

    def _identify(self, connection: socket.socket, until_s: float) -> str:
        """The callee's side; returns the caller's name. Raises ``ExchangeFailed`` for a stranger."""
        nonce = draw()
        if _receive(connection, len(_MAGIC), until_s) != _MAGIC:
            raise ExchangeFailed("not a probe")
        theirs = _receive(connection, NONCE_BYTES, until_s)
        (length,) = struct.unpack("!I", _receive(connection, 4, until_s))
        if length > LONGEST_HELLO:
            raise ExchangeFailed("not a probe")
        number, stage, node, store_port = json.loads(_receive(connection, length, until_s))
        secret = self._ordered.secret
        _send(connection, nonce + prove(secret, CALLED, theirs, nonce), until_s)
        if not holds(_receive(connection, PROOF_BYTES, until_s), secret, CALLER, theirs, nonce):
            raise ExchangeFailed("a stranger")
        if (number, stage) != (self._order.number, self._order.stage):
            raise ExchangeFailed("a probe of another check")
        _send(connection, struct.pack("!I", self.store_port), until_s)
        self.stores[str(node)] = int(store_port)
        return str(node)

    def _exchange(
        self, connection: socket.socket, node: str, own: bytes, until_s: float, *, first: bool
    ) -> LinkFinding:
        """Measure the round trip, one side after the other; then send and receive at the same time, and compare."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if first:
            latency_s = _ping(connection, until_s)
            _pong(connection, until_s)
        else:
            _pong(connection, until_s)
            latency_s = _ping(connection, until_s)
        expected = block_of(self._order.number, self._order.stage, node)
        failed: list[OSError] = []
        began_s = time.monotonic()
        sending = threading.Thread(target=_send_or_note, args=(connection, own, until_s, failed), daemon=True)
        sending.start()
        arrived = _receive(connection, len(expected), until_s)
        sending.join(max(0.0, until_s - time.monotonic()))
        took_s = time.monotonic() - began_s
        if failed:
            raise failed[0]
        right = arrived == expected
        _send(connection, _RIGHT if right else _WRONG, until_s)
        if _receive(connection, 1, until_s) != _RIGHT:
            raise ExchangeFailed("bytes arrived there that were not sent here")
        if not right:
            raise ExchangeFailed("bytes arrived here that were not sent there")
        return LinkFinding(NodeId(node), "", latency_s, len(expected) / max(took_s, 1e-9))


def _connected(peer: HealthPeer, until_s: float) -> socket.socket:
    """A connection to a probe, which may still be about to start."""
    pause_s, last = FIRST_PAUSE_S, "timed out"
    waiting = threading.Event()
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            return socket.create_connection((peer.host, peer.port), timeout=left_s)
        except OSError as error:
            last = error.strerror or str(error)
        waiting.wait(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise ExchangeFailed(f"cannot connect to {address(peer.host, peer.port)}: {last}")


def _left(connection: socket.socket, until_s: float) -> None:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)


def _send(connection: socket.socket, data: bytes, until_s: float) -> None:
    _left(connection, until_s)
    connection.sendall(data)


def _send_or_note(connection: socket.socket, data: bytes, until_s: float, failed: list[OSError]) -> None:
    try:
        _send(connection, data, until_s)
    except OSError as error:
        failed.append(error)


def _receive(connection: socket.socket, size: int, until_s: float) -> bytes:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        _left(connection, until_s)
        got = connection.recv_into(view[have:])
        if not got:
            raise ExchangeFailed("it closed the connection")
        have += got
    return bytes(data)


def _ping(connection: socket.socket, until_s: float) -> float:
    took = []
    for _ in range(PINGS):
        before_s = time.monotonic()
        _send(connection, _RIGHT, until_s)
        _receive(connection, 1, until_s)
        took.append(time.monotonic() - before_s)
    return statistics.median(took)


def _pong(connection: socket.socket, until_s: float) -> None:
    for _ in range(PINGS):
        _send(connection, _receive(connection, 1, until_s), until_s)
