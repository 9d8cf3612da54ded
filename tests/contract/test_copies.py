"""Every rule of the ``Copies`` docstrings, on the fake and over TCP, and what TCP has to bear besides."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edl.adapters import range_fetch
from edl.adapters.clock import SystemClock
from edl.adapters.copies import TcpCopies
from edl.adapters.copy_connection import CopyConnection, CopyLimits
from edl.adapters.file_copies import TcpFileCopies
from edl.adapters.range_fetch import RangeFetch
from edl.checkpoint.memory.buffer_table import SnapshotStream
from edl.checkpoint.memory.snapshot_pool import IncomingCopy, Loan, MemorySnapshotPool
from edl.errors import CheckpointError, PortInUse
from edl.ports import Label, Lent, LentFile
from edl.ports import SnapshotPool as SnapshotPoolPort
from edl.testing.memory_copies import Trouble
from edl.testing.snapshots import fill_of
from edl.types import NodeId
from edl.wire.records import Holding, Version
from tests.support.copies_fixture import (
    LIMITS,
    NEW,
    OLD,
    SIZE,
    TOKEN,
    A,
    B,
    Bench,
    TcpBench,
    lent,
    put_in,
    snapshot_pool,
)
from tests.support.spoiling_proxy import HOST, TIMEOUT_S


def content(of: MemorySnapshotPool, holding: Holding = NEW) -> int:
    loan = of.borrow(holding.version, holding.shard)
    assert loan is not None
    try:
        return fill_of(loan.view)
    finally:
        loan.release()


def into(node: MemorySnapshotPool) -> Callable[[Label], IncomingCopy]:
    return lambda label: node.incoming(SnapshotStream.loaded("x"), label)


@dataclasses.dataclass
class Lie:
    """A loan under a false label."""

    loan: Loan
    label: Label
    descriptor: int
    crc32: int

    @property
    def view(self) -> memoryview:
        return self.loan.view

    def release(self) -> None:
        self.loan.release()


def lie(loan: Loan, **changes: Any) -> Lent:
    return Lie(loan, dataclasses.replace(loan.label, **changes), loan.descriptor, loan.crc32)


# --- both kinds ------------------------------------------------------------------------------------------------------


def test_a_copy_arrives_whole(bench: Bench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    port = bench.node().start(there, HOST)
    bench.node().put(HOST, port, lent(here))
    assert there.holdings() == (NEW,)
    assert content(there) == 7
    assert there.usage().replicas > SIZE


def test_what_is_there_already_is_not_sent_again(bench: Bench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    port, client = bench.node().start(there, HOST), bench.node()
    loan = lent(here)
    client.put(HOST, port, loan)
    client.put(HOST, port, lie(loan, size=loan.label.size))
    with pytest.raises(CheckpointError, match="already"):
        client.put(HOST, port, lie(loan, holding=OLD))
    assert there.holdings() == (NEW,)


def test_only_the_newest_copy_of_a_node_stays(bench: Bench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    port, client = bench.node().start(there, HOST), bench.node()
    used = set()
    for commit in range(1, 6):
        loan = lent(here, Holding(Version(1, commit)), commit)
        client.put(HOST, port, loan)
        loan.release()
        used.add(there.usage().replicas)
    assert there.newest() == Holding(Version(1, 5))
    assert content(there, Holding(Version(1, 5))) == 5
    assert max(used) <= 2.1 * SIZE


def test_a_part_is_fetched(bench: Bench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    put_in(there, Holding(Version(1, 2), 3, 4), 9)
    port = bench.node().start(there, HOST)
    bench.node().get(HOST, port, Version(1, 2), 3, into(here))
    assert here.holdings() == (Holding(Version(1, 2), 3, 4),)
    assert content(here, Holding(Version(1, 2), 3, 4)) == 9


def test_what_is_not_there_is_refused(bench: Bench) -> None:
    port = bench.node().start(snapshot_pool(B), HOST)
    with pytest.raises(CheckpointError, match="does not hold shard 0"):
        bench.node().get(HOST, port, Version(1, 2), 0, into(snapshot_pool(A)))


def test_two_fetch_at_once(bench: Bench) -> None:
    there = snapshot_pool(B)
    put_in(there, NEW, 5)
    port = bench.node().start(there, HOST)
    mine = [snapshot_pool(A), snapshot_pool(NodeId("c"))]
    clients = [bench.node() for _ in mine]
    threads = [
        threading.Thread(target=client.get, args=(HOST, port, NEW.version, 0, into(one)))
        for client, one in zip(clients, mine, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [content(one) for one in mine] == [5, 5]


@pytest.mark.parametrize("asked", ["put", "get"])
def test_a_wrong_token_gets_nothing(bench: Bench, asked: str) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    put_in(there, OLD, 1)
    port, stranger = bench.node().start(there, HOST), bench.node("guess")
    with pytest.raises(CheckpointError, match="token"):
        if asked == "put":
            stranger.put(HOST, port, lent(here))
        else:
            stranger.get(HOST, port, OLD.version, 0, into(here))
    assert there.holdings() == (OLD,)
    assert OLD not in here.holdings()


@pytest.mark.parametrize("trouble", Trouble)
def test_a_copy_spoiled_on_the_way_does_not_count(bench: Bench, trouble: Trouble) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    port, client = bench.node().start(there, HOST), bench.node()
    old = lent(here, OLD, 1)
    client.put(HOST, port, old)
    loan = lent(here)
    with pytest.raises(CheckpointError):
        client.put(HOST, bench.spoiled(port, trouble, upwards=True), loan)
    assert there.holdings() == (OLD,)
    assert content(there, OLD) == 1
    bench.mend()
    _until_given(lambda: client.put(HOST, port, loan))
    assert content(there) == 7


@pytest.mark.parametrize("trouble", Trouble)
def test_a_fetch_spoiled_on_the_way_does_not_count(bench: Bench, trouble: Trouble) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    put_in(there, NEW, 7)
    port, client = bench.node().start(there, HOST), bench.node()
    with pytest.raises(CheckpointError):
        client.get(HOST, bench.spoiled(port, trouble, upwards=False), NEW.version, 0, into(here))
    assert here.holdings() == ()
    assert here.usage().total == 0
    bench.mend()
    client.get(HOST, port, NEW.version, 0, into(here))
    assert content(here) == 7


@pytest.mark.parametrize("change", [1_000, -1_000, 10**12])
def test_a_false_size_does_not_count(bench: Bench, change: int) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    port, client = bench.node().start(there, HOST), bench.node()
    loan = lent(here)
    with pytest.raises(CheckpointError):
        client.put(HOST, port, lie(loan, size=loan.label.size + change))
    _until_given(lambda: client.put(HOST, port, loan))
    assert content(there) == 7


def test_a_false_name_does_not_count(bench: Bench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    port, client = bench.node().start(there, HOST), bench.node()
    with pytest.raises(CheckpointError, match="under the label of"):
        client.put(HOST, port, lie(lent(here), holding=Holding(Version(9, 9))))
    assert there.holdings() == ()


def test_what_does_not_fit_is_refused_with_the_numbers(bench: Bench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B, limit_bytes=SIZE // 2)
    port = bench.node().start(there, HOST)
    with pytest.raises(CheckpointError, match="--state-memory"):
        bench.node().put(HOST, port, lent(here))
    assert there.usage().total == 0


def test_nobody_there(bench: Bench) -> None:
    node = bench.node()
    port = node.start(snapshot_pool(B), HOST)
    node.stop()
    with pytest.raises(CheckpointError, match=str(port)):
        bench.node().put(HOST, port, lent(snapshot_pool(A)))


def _until_given(give: Callable[[], None]) -> None:
    """The other side may not yet have noticed that the transfer before is over."""
    for _ in range(200):
        try:
            give()
            return
        except CheckpointError as error:
            if "already arriving" not in str(error):
                raise
            threading.Event().wait(0.02)
    raise AssertionError("never given")


# --- TCP only --------------------------------------------------------------------------------------------------------


def closes(connection: socket.socket) -> bool:
    """True if the peer closes the connection."""
    connection.settimeout(TIMEOUT_S)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


def serves(tcp: TcpBench, port: int, there: MemorySnapshotPool) -> bool:
    """True if the server still accepts copies."""
    put_in(there, NEW, 3, SnapshotStream.of_worker(1, "state"))
    here = snapshot_pool(NodeId("c"))
    tcp.node().get(HOST, port, NEW.version, 0, into(here))
    return content(here) == 3


def admitted(port: int, token: bytes = b"secret") -> socket.socket:
    """A connection that has proved to know the token."""
    connection = socket.create_connection((HOST, port))
    connection.settimeout(TIMEOUT_S)
    connection.sendall(b"edlcopy1" + b"n" * 32)
    answer = connection.recv(64, socket.MSG_WAITALL)
    connection.sendall(hmac.digest(token, b"client" + b"n" * 32 + answer[:32], "sha256"))
    return connection


def frame(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack(">I", len(data)) + data


GOOD = {"op": "put", "owner": "a", "era": 1, "commit": 2, "shard": 0, "shards": 1, "size": 5000, "crc32": 1}


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"e",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
        b"edlcopy1",
        b"edlcopy1" + b"n" * 32,
        b"edlcopy1" + b"n" * 64,
    ],
)
def test_a_stranger_is_hung_up_on(tcp: TcpBench, said: bytes) -> None:
    there = snapshot_pool(B)
    port = tcp.node().start(there, HOST)
    with socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(said)
        assert closes(stranger)
    assert serves(tcp, port, there)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 10) + b"{",
        frame(b"no json"),
        frame([1]),
        frame({}),
        frame({"op": "drop"}),
        frame({"op": "get"}),
        frame({"op": "get", "era": 1, "commit": "2", "shard": 0}),
        frame({"op": "get", "era": 1, "commit": True, "shard": 0}),
        frame(GOOD | {"size": 0}),
        frame(GOOD | {"size": -5}),
        frame(GOOD | {"size": 1 << 60}),
        frame(GOOD | {"size": 1.5}),
        frame(GOOD | {"shard": 1}),
        frame(GOOD | {"owner": ""}),
        frame(GOOD | {"owner": 5}),
        frame(GOOD),
        frame(GOOD) + b"x" * 4999,
        frame(GOOD) + b"x" * 5000,
    ],
)
def test_nonsense_ends_only_its_own_connection(tcp: TcpBench, said: bytes) -> None:
    there = snapshot_pool(B)
    port = tcp.node().start(there, HOST)
    with admitted(port) as peer:
        peer.sendall(said)
        assert closes(peer)
    assert there.holdings() == ()
    assert serves(tcp, port, there)


def test_one_who_creeps_is_given_up(tcp: TcpBench) -> None:
    """A byte now and then, each within the time of one operation, but the whole takes too long."""
    there = snapshot_pool(B)
    port = tcp.node().start(there, HOST)
    with socket.create_connection((HOST, port)) as creeper:
        ended = threading.Event()

        def watch() -> None:
            if closes(creeper):
                ended.set()

        threading.Thread(target=watch, daemon=True).start()
        with contextlib.suppress(OSError):
            while not ended.wait(LIMITS.handshake_s / 5):
                creeper.sendall(b"e")
        assert ended.wait(TIMEOUT_S)


def test_one_who_holds_all_places_does_not_hold_them_for_long() -> None:
    node = TcpCopies(B, lambda: TOKEN, SystemClock(), dataclasses.replace(LIMITS, connections=1))
    there, here = snapshot_pool(B), snapshot_pool(A)
    put_in(there, NEW, 7)
    port = node.start(there, HOST)
    limits = CopyLimits(handshake_s=TIMEOUT_S, silence_s=TIMEOUT_S)
    patient = TcpCopies(A, lambda: TOKEN, SystemClock(), limits)
    with socket.create_connection((HOST, port)):
        patient.get(HOST, port, NEW.version, 0, into(here))
    assert content(here) == 7
    node.stop()


def test_one_client_with_many_connections_does_not_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """When many nodes join at once, they fetch the state from the same few."""
    held, go_on = threading.Semaphore(0), threading.Event()
    fetch = RangeFetch._fetch

    def slow(self: RangeFetch, line: CopyConnection, start: int) -> None:
        held.release()
        assert go_on.wait(TIMEOUT_S)
        fetch(self, line, start)

    monkeypatch.setattr(range_fetch, "RANGE_BYTES", SIZE // 20)
    monkeypatch.setattr(range_fetch, "connections_for", lambda size: 8)
    monkeypatch.setattr(RangeFetch, "_fetch", slow)
    node = TcpCopies(B, lambda: TOKEN, SystemClock(), dataclasses.replace(LIMITS, connections=8))
    there, here = snapshot_pool(B), snapshot_pool(A)
    put_in(there, NEW, 7)
    port = node.start(there, HOST)
    patient = TcpCopies(A, lambda: TOKEN, SystemClock(), CopyLimits(handshake_s=TIMEOUT_S, silence_s=TIMEOUT_S))
    with ThreadPoolExecutor(1) as first:
        fetched = first.submit(patient.get, HOST, port, NEW.version, 0, into(here))
        try:
            for _ in range(3):  # its first connection, and two that help
                assert held.acquire(timeout=TIMEOUT_S)
            assert TcpCopies(A, lambda: TOKEN, SystemClock(), LIMITS).header(HOST, port, NEW.version, 0)[1] > 0
        finally:
            go_on.set()
        fetched.result(TIMEOUT_S)
    assert content(here) == 7
    node.stop()


class HangingFiles:
    """Files on a disk that hangs."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.go_on = threading.Event()

    def report(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        self.asked.release()
        assert self.go_on.wait(TIMEOUT_S)
        return {}, b""

    def lend(self, request: Mapping[str, Any]) -> contextlib.AbstractContextManager[LentFile | None]:
        raise AssertionError("not asked for here")


def test_files_on_a_disk_that_hangs_do_not_take_all_places() -> None:
    """The others ask again and again, and must get the state in between."""
    files, limits = HangingFiles(), dataclasses.replace(LIMITS, connections=4)
    node = TcpCopies(B, lambda: TOKEN, SystemClock(), limits, files=files)
    there, here = snapshot_pool(B), snapshot_pool(A)
    put_in(there, NEW, 7)
    port = node.start(there, HOST)
    asking = TcpFileCopies(lambda: TOKEN, SystemClock(), dataclasses.replace(LIMITS, handshake_s=TIMEOUT_S))
    patient = TcpCopies(A, lambda: TOKEN, SystemClock(), CopyLimits(handshake_s=TIMEOUT_S / 2, silence_s=TIMEOUT_S / 2))
    with ThreadPoolExecutor(6) as others:
        asked = [others.submit(asking.changes, HOST, port, {"node": "c"}) for _ in range(6)]
        try:
            for _ in range(2):
                assert files.asked.acquire(timeout=TIMEOUT_S)
            patient.get(HOST, port, NEW.version, 0, into(here))
        finally:
            files.go_on.set()
        for one in asked:
            assert one.exception(TIMEOUT_S) is None or isinstance(one.exception(), CheckpointError)
    assert content(here) == 7
    node.stop()


class SlowSnapshotPool:
    """Needs longer than the other side's timeout."""

    def __init__(self, inner: MemorySnapshotPool) -> None:
        self._inner = inner

    def borrow(self, version: Version, shard: int) -> Lent | None:
        return self._inner.borrow(version, shard)

    def arriving(self, label: Label) -> IncomingCopy | None:
        threading.Event().wait(3 * LIMITS.silence_s)
        return self._inner.arriving(label)


def test_who_still_works_at_it_is_waited_for(tcp: TcpBench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    slow: SnapshotPoolPort = SlowSnapshotPool(there)
    port, client = tcp.node().start(slow, HOST), tcp.node()
    client.put(HOST, port, lent(here))
    assert content(there) == 7


class Deliberate(Lie):
    """A loan whose checksum takes longer than a node waits for anything, as that of a large state beside training."""

    def __init__(self, loan: Loan) -> None:
        self.loan, self.label, self.descriptor = loan, loan.label, loan.descriptor

    @property
    def crc32(self) -> int:  # type: ignore[override]
        threading.Event().wait(2 * LIMITS.handshake_s)
        return self.loan.crc32


def test_a_checksum_that_takes_long_costs_no_copy(tcp: TcpBench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    port, client = tcp.node().start(there, HOST), tcp.node()
    client.put(HOST, port, Deliberate(lent(here)))
    assert content(there) == 7


def test_a_moment_without_threads_costs_one_connection(tcp: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    port, client, loan = tcp.node().start(there, HOST), tcp.node(), lent(here)

    def never(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", never)
        with pytest.raises(CheckpointError):
            client.put(HOST, port, loan)
    client.put(HOST, port, loan)
    assert content(there) == 7


def test_a_client_that_makes_its_memory_is_waited_for(tcp: TcpBench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    put_in(there, NEW, 7)
    port = tcp.node().start(there, HOST)

    def arriving(label: Label) -> IncomingCopy:
        threading.Event().wait(3 * LIMITS.silence_s)
        return into(here)(label)

    tcp.node().get(HOST, port, NEW.version, 0, arriving)
    assert content(here) == 7


@pytest.mark.parametrize("urgent", [False, True])
def test_an_urgent_copy_is_received_at_normal_priority(tcp: TcpBench, urgent: bool) -> None:
    niceness: list[int] = []

    class Noting(SlowSnapshotPool):
        def arriving(self, label: Label) -> IncomingCopy | None:
            niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return self._inner.arriving(label)

    port = tcp.node().start(Noting(snapshot_pool(B)), HOST)
    tcp.node().put(HOST, port, lent(snapshot_pool(A)), urgent=urgent)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness == [usual] if urgent else niceness[0] > usual


def test_who_hangs_up_while_memory_is_made_leaves_nothing(tcp: TcpBench) -> None:
    there = snapshot_pool(B)
    slow: SnapshotPoolPort = SlowSnapshotPool(there)
    port, client = tcp.node().start(slow, HOST), tcp.node()
    with admitted(port) as peer:
        peer.sendall(frame(GOOD))
        peer.recv(1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _until_given(lambda: client.put(HOST, port, lent(snapshot_pool(A))))
    assert content(there) == 7


def test_a_giver_that_dies_in_the_middle(tcp: TcpBench) -> None:
    here, there = snapshot_pool(A), snapshot_pool(B)
    put_in(there, NEW, 7)
    server, client = tcp.node(), tcp.node()
    port = server.start(there, HOST)

    def arriving(label: Label) -> IncomingCopy:
        server.stop()
        return here.incoming(SnapshotStream.loaded("x"), label)

    with pytest.raises(CheckpointError):
        client.get(HOST, port, NEW.version, 0, arriving)
    assert here.usage().total == 0


def test_stopping_ends_what_one_has_asked_for(tcp: TcpBench) -> None:
    there = snapshot_pool(B)
    put_in(there, NEW, 7)
    port, client = tcp.node().start(there, HOST), tcp.node()

    def arriving(label: Label) -> IncomingCopy:
        client.stop()
        return snapshot_pool(A).incoming(SnapshotStream.loaded("x"), label)

    with pytest.raises(CheckpointError):
        client.get(HOST, port, NEW.version, 0, arriving)
    with pytest.raises(CheckpointError, match="ending"):
        client.get(HOST, port, NEW.version, 0, arriving)


def test_a_port_in_use_is_said(tcp: TcpBench) -> None:
    port = tcp.node().start(snapshot_pool(B), HOST)
    with pytest.raises(PortInUse, match="--local-addr"):
        tcp.node().start(snapshot_pool(B), HOST, port)


def test_no_descriptors_or_threads_stay_behind() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def once() -> None:
        here, there = snapshot_pool(A), snapshot_pool(B)
        server, client = (TcpCopies(node, lambda: TOKEN, SystemClock(), LIMITS) for node in (B, A))
        port = server.start(there, HOST)
        client.put(HOST, port, lent(here))
        with socket.create_connection((HOST, port)) as stranger:
            stranger.sendall(b"x" * 100)
            closes(stranger)
        for one in (server, client):
            one.stop()
        here.close()
        there.close()

    once()
    before = count()
    once()
    assert count() == before
