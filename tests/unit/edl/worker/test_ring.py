"""The ring: each rank is a thread, the sockets are real."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from edl.worker import ring as ring_module
from edl.worker.ring import OutOfStep, PeerLost, Ring

SIZES = [1, 2, 3, 5]
TOKEN = "secret"


class Ports:
    """Held as a launcher holds them: bound, not listening."""

    def __init__(self, count: int) -> None:
        self._held = [socket.socket() for _ in range(count)]
        for held in self._held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
        self.endpoints = [f"127.0.0.1:{held.getsockname()[1]}" for held in self._held]

    def close(self) -> None:
        for held in self._held:
            held.close()


class Ranks:
    """A connected ring, and a thread for each rank."""

    def __init__(self, size: int) -> None:
        self._ports = Ports(size)
        self.rings = [Ring(rank, size, self._ports.endpoints, TOKEN, 1) for rank in range(size)]
        self._threads = ThreadPoolExecutor(size)
        self.each(lambda ring: ring.connect(10))

    def each(self, work: Callable[[Ring], Any]) -> list[Any]:
        """Results of all ranks' calls. Raises the first exception."""
        return [future.result(20) for future in [self._threads.submit(work, ring) for ring in self.rings]]

    def errors(self, work: Callable[[Ring], Any]) -> list[BaseException | None]:
        """Exceptions of all ranks' calls."""
        return [future.exception(20) for future in [self._threads.submit(work, ring) for ring in self.rings]]

    def close(self) -> None:
        for ring in self.rings:
            ring.abort()
        self._threads.shutdown()
        for ring in self.rings:
            ring.close()
        self._ports.close()


@pytest.fixture(name="ranks")
def _ranks() -> Iterator[Callable[[int], Ranks]]:
    made: list[Ranks] = []

    def make(size: int) -> Ranks:
        made.append(Ranks(size))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def values(rank: int, count: int, dtype: str) -> Any:
    """Small whole numbers, so that the order of adding does not matter."""
    return ((np.arange(count) * 3 + rank * 5) % 7 + 1).astype(dtype)


COMBINE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda all_values: all_values.sum(0),
    "mean": lambda all_values: all_values.mean(0),
    "max": lambda all_values: all_values.max(0),
    "min": lambda all_values: all_values.min(0),
    "prod": lambda all_values: all_values.prod(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 1000, 100_003])
@pytest.mark.parametrize(
    ("dtype", "operation"),
    [
        *(("float32", "sum"), ("float32", "mean"), ("float64", "max"), ("int64", "min"), ("int32", "prod")),
        *(("uint8", "sum"), ("float16", "mean"), ("complex64", "sum")),
    ],
)
def test_all_reduce(ranks: Callable[[int], Ranks], size: int, count: int, dtype: str, operation: str) -> None:
    def work(ring: Ring) -> Any:
        array = values(ring.rank, count, dtype)
        ring.all_reduce(array, operation)
        return array

    everyones = np.stack([values(rank, count, dtype) for rank in range(size)])
    expected = COMBINE[operation](everyones.astype("float32") if dtype == "float16" else everyones)
    found = ranks(size).each(work)
    for array in found:
        assert array.dtype == np.dtype(dtype)
        np.testing.assert_allclose(array, expected.astype(dtype), rtol=1e-6 if dtype != "float16" else 1e-3)
        assert array.tobytes() == found[0].tobytes()


@pytest.mark.parametrize("count", [100, 300_000])
def test_all_ranks_get_the_same_bits(ranks: Callable[[int], Ranks], count: int) -> None:
    def work(ring: Ring) -> Any:
        array = np.random.default_rng(ring.rank).standard_normal(count).astype(np.float32)
        ring.all_reduce(array, "mean")
        return array.tobytes()

    assert len(set(ranks(4).each(work))) == 1


def test_bfloat16_is_added_up_in_32_bits(ranks: Callable[[int], Ranks]) -> None:
    def work(ring: Ring) -> Any:
        numbers = np.array([1.0, 256.0, np.nan, np.inf, -3.0], np.float32)
        array = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        ring.all_reduce(array, "sum", bfloat16=True)
        return (array.astype(np.uint32) << 16).view(np.float32)

    for found in ranks(3).each(work):
        np.testing.assert_array_equal(found, [3.0, 768.0, np.nan, np.inf, -9.0])


def test_an_array_that_is_not_dense(ranks: Callable[[int], Ranks]) -> None:
    def work(ring: Ring) -> Any:
        array = np.full((300, 40), ring.rank, np.float32).T[::2]
        ring.all_reduce(array)
        other = np.full((300, 40), ring.rank, np.float32).T[::2]
        ring.broadcast(other, 2)
        return float(array.min()), float(array.max()), float(other.min()), float(other.max())

    assert ranks(3).each(work) == [(3.0, 3.0, 2.0, 2.0)] * 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 5, 200_000])
def test_broadcast_from_every_root(ranks: Callable[[int], Ranks], size: int, count: int) -> None:
    def work(ring: Ring) -> list[bytes]:
        found = []
        for root in range(size):
            array = values(ring.rank, count, "float32")
            ring.broadcast(array, root)
            found.append(array.tobytes())
        return found

    expected = [values(root, count, "float32").tobytes() for root in range(size)]
    assert ranks(size).each(work) == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
@pytest.mark.parametrize("each", [(1, 0, 3, 0, 2), (0, 0, 0, 0, 1), (40_000, 3, 0, 70_000, 5)])
def test_parts_are_combined_for_their_ranks_and_gathered(
    ranks: Callable[[int], Ranks], size: int, dtype: str, each: tuple[int, ...]
) -> None:
    counts = each[-size:]
    total = sum(values(rank, sum(counts), dtype) for rank in range(size))
    ends = np.cumsum(counts)

    def work(ring: Ring) -> None:
        array = values(ring.rank, sum(counts), dtype)
        ring.reduce_scatter(array, counts)
        own = slice(ends[ring.rank] - counts[ring.rank], ends[ring.rank])
        assert np.array_equal(array[own], total[own])
        array[: own.start], array[own.stop :] = 0, 0
        ring.gather_parts(array, counts)
        assert np.array_equal(array, total)

    ranks(size).each(work)


def test_the_mean_of_parts_of_bfloat16_is_computed_in_32_bits(ranks: Callable[[int], Ranks]) -> None:
    def work(ring: Ring) -> None:
        one, step = 0x3F80, 0x3B80  # 1.0, and half a unit in its last place
        array = np.array([one if ring.rank == 0 else step] * 3, np.uint16)
        ring.reduce_scatter(array, [1, 1, 1], "sum", bfloat16=True)
        assert array[ring.rank] == 0x3F81, "both steps count"

    ranks(3).each(work)


def test_parts_that_do_not_fit_are_refused_and_break_nothing(ranks: Callable[[int], Ranks]) -> None:
    def work(ring: Ring) -> None:
        for array, counts in ((np.ones(3), [1, 1]), (np.ones(3), [1, 1, 1]), (np.ones((1, 3)), [1, 2])):
            with pytest.raises(ValueError, match="parts of"):
                ring.gather_parts(array, counts)
        array = np.ones(3)
        ring.reduce_scatter(array, [1, 2], "mean")
        assert array[ring.rank] == 1

    ranks(2).each(work)


@pytest.mark.parametrize("size", SIZES)
def test_the_other_operations(ranks: Callable[[int], Ranks], size: int) -> None:
    def work(ring: Ring) -> Any:
        ring.barrier()
        gathered = ring.all_gather(np.full((2, 3), ring.rank, np.int64))
        texts = ring.all_gather_bytes(b"x" * (ring.rank * 50_000))
        nothing = ring.all_gather_bytes(b"")
        last = ring.broadcast_bytes(bytes([ring.rank]) * 9, size - 1)
        return gathered[:, 1, 2].tolist(), [len(text) for text in texts], nothing, last

    expected = (
        list(range(size)),
        [50_000 * other for other in range(size)],
        [b""] * size,
        bytes([size - 1]) * 9,
    )
    assert ranks(size).each(work) == [expected] * size


@pytest.mark.parametrize(
    ("array", "operation", "error"),
    [
        (np.ones(3, np.int32), "mean", TypeError),
        (np.ones(3, np.bool_), "sum", TypeError),
        (np.ones(3, np.complex64), "max", TypeError),
        (np.array(["a"]), "sum", TypeError),
        (np.ones(3, np.float32), "average", ValueError),
    ],
)
def test_what_makes_no_sense_is_refused_and_breaks_nothing(
    ranks: Callable[[int], Ranks], array: Any, operation: str, error: type[Exception]
) -> None:
    made = ranks(2)
    assert [type(found) for found in made.errors(lambda ring: ring.all_reduce(array, operation))] == [error] * 2
    made.each(lambda ring: ring.barrier())


CALLS: list[tuple[Callable[[Ring], Any], Callable[[Ring], Any], Sequence[str]]] = [
    (
        lambda ring: ring.all_reduce(np.ones(10, np.float32)),
        lambda ring: ring.broadcast(np.ones(10, np.float32)),
        ("all_reduce(sum, 10 of float32) as call 1", "broadcast(10 of float32, from rank 0) as call 1"),
    ),
    (
        lambda ring: ring.all_reduce(np.ones(500_000, np.float32)),
        lambda ring: ring.all_reduce(np.ones(10, np.float32)),
        ("500000 of float32", "10 of float32"),
    ),
    (lambda ring: ring.barrier(), lambda ring: ring.all_reduce(np.ones(10, np.int32), "max"), ("barrier()", "max")),
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("one", "others", "texts"), CALLS)
def test_different_calls_are_told_apart(
    ranks: Callable[[int], Ranks],
    size: int,
    one: Callable[[Ring], Any],
    others: Callable[[Ring], Any],
    texts: Sequence[str],
) -> None:
    errors = ranks(size).errors(lambda ring: one(ring) if ring.rank == 1 else others(ring))
    # Whoever has done its part before the others find out returns in peace; who waits for them is told so.
    assert all(error is None or isinstance(error, OutOfStep | PeerLost) for error in errors)
    found = [str(error) for error in errors if isinstance(error, OutOfStep)]
    assert found
    assert all(text in found[0] for text in texts), found


def test_abort_from_another_thread_ends_a_call_at_every_rank(ranks: Callable[[int], Ranks]) -> None:
    made = ranks(5)
    entered = threading.Barrier(5)

    def work(ring: Ring) -> None:
        entered.wait(10)
        if ring.rank == 0:
            ring.abort("enough")
        while True:
            ring.all_reduce(np.ones(100_000, np.float32))

    errors = made.errors(work)
    assert [type(error) for error in errors] == [PeerLost] * 5
    assert "enough" in str(errors[0])
    assert [type(error) for error in made.errors(lambda ring: ring.barrier())] == [PeerLost] * 5


def test_abort_ends_a_call_that_waits_for_a_silent_peer(ranks: Callable[[int], Ranks]) -> None:
    made = ranks(2)
    waiting = ThreadPoolExecutor(1).submit(made.rings[0].barrier)
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    made.rings[0].abort()
    assert isinstance(waiting.exception(1), PeerLost)


def test_abort_before_and_while_connecting() -> None:
    ports = Ports(2)
    ring = Ring(0, 2, ports.endpoints, TOKEN)
    ring.abort()
    with pytest.raises(PeerLost):
        ring.connect()
    ring.close()
    ring = Ring(0, 2, ports.endpoints, TOKEN)
    connecting = ThreadPoolExecutor(1).submit(ring.connect)
    with pytest.raises(TimeoutError):
        connecting.result(0.2)
    ring.abort()
    assert isinstance(connecting.exception(1), PeerLost)
    ring.close()
    ports.close()


def test_peers_that_do_not_come() -> None:
    ports = Ports(2)
    with Ring(0, 2, ports.endpoints, TOKEN) as ring, pytest.raises(PeerLost, match=r"rank 1 at .*no connection in 0 s"):
        ring.connect(0.1)
    ports.close()


@pytest.mark.parametrize("difference", ["token", "round", "rank", "size"])
def test_strangers_are_not_let_in(difference: str) -> None:
    ports = Ports(3)
    ends = ports.endpoints
    ring = Ring(0, 2, ends[:2], TOKEN, 5)
    stranger = {
        "token": lambda: Ring(1, 2, ends[:2], "other", 5),
        "round": lambda: Ring(1, 2, ends[:2], TOKEN, 4),
        "rank": lambda: Ring(0, 2, [ends[1], ends[0]], TOKEN, 5),
        "size": lambda: Ring(1, 3, [ends[0], ends[1], ends[0]], TOKEN, 5),
    }[difference]()
    with ThreadPoolExecutor(2) as threads:
        for error in [threads.submit(each.connect, 0.5).exception(5) for each in (ring, stranger)]:
            assert isinstance(error, PeerLost)
    ring.close()
    stranger.close()
    ports.close()


def test_a_ring_forms_among_strangers_that_say_nothing_or_nonsense() -> None:
    ports = Ports(2)
    rings = [Ring(rank, 2, ports.endpoints, TOKEN) for rank in range(2)]
    host, _, port = ports.endpoints[0].partition(":")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(rings[0].connect, 10)
        strangers: list[socket.socket] = []
        while len(strangers) < 100:
            try:
                strangers.append(socket.create_connection((host, int(port))))
            except ConnectionRefusedError:
                continue
            if len(strangers) % 2:
                strangers[-1].send(b"GET / HTTP/1.1\r\n\r\n" * 50)
        threads.submit(rings[1].connect, 10).result(10)
        first.result(10)
        list(threads.map(lambda ring: ring.barrier(), rings))
    for stranger in strangers:
        stranger.close()
    for ring in rings:
        ring.close()
    ports.close()


@pytest.mark.parametrize(
    ("named", "other", "there"),
    [("127.0.0.1", "127.0.0.2", False), ("192.0.2.1", "127.0.0.2", True), ("localhost", "127.0.0.2", True)],
    ids=["the address that others call", "none of this host's", "a name"],
)
def test_a_rank_listens_where_it_is_called(named: str, other: str, there: bool) -> None:
    ports = Ports(2)
    port = int(ports.endpoints[0].rpartition(":")[2])
    ring = Ring(0, 2, [f"{named}:{port}", ports.endpoints[1]], TOKEN)
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(ring.connect, 10)
        while not connecting.done():
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                continue
        try:
            socket.create_connection((other, port)).close()
            found = True
        except ConnectionRefusedError:
            found = False
        ring.abort()
        assert isinstance(connecting.exception(10), PeerLost)
    ring.close()
    ports.close()
    assert found == there


@pytest.mark.parametrize(
    "listed", [[("127.0.0.1", 1), ("127.0.0.1", 0)], [("::1", 0)]], ids=["one refuses", "only IPv6"]
)
def test_a_ring_forms_among_hosts_with_names(monkeypatch: pytest.MonkeyPatch, listed: list[tuple[str, int]]) -> None:
    """``listed``: the addresses of the name, and a port instead of the right one."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "a-name"
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, other or port))
            for one, other in listed
        ]

    ports = Ports(2)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    rings = [Ring(rank, 2, [one.replace("127.0.0.1", "a-name") for one in ports.endpoints], TOKEN) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda ring: ring.connect(10), rings))
        assert list(threads.map(lambda ring: ring.all_gather_bytes(b"%d" % ring.rank), rings)) == [[b"0", b"1"]] * 2
    for ring in rings:
        ring.close()
    ports.close()


def test_a_peer_that_ends_in_good_order_after_the_last_call_harms_nobody(ranks: Callable[[int], Ranks]) -> None:
    def work(ring: Ring) -> float:
        array = np.full(200_000, ring.rank, np.float32)
        ring.broadcast(array, 1)
        ring.all_reduce(array)
        ring.close()
        return float(array[0])

    for _ in range(20):
        assert ranks(4).each(work) == [4.0] * 4


def test_rounds_leave_no_descriptors() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    Ranks(3).close()
    before = descriptors()
    for number in range(20):
        made = Ranks(3)
        if number % 2:
            made.rings[0].abort()
        made.close()
    assert descriptors() == before


def test_two_threads_at_once_are_an_error(ranks: Callable[[int], Ranks]) -> None:
    made = ranks(2)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(made.rings[0].barrier)
        with pytest.raises(TimeoutError):
            first.result(0.2)
        with pytest.raises(OutOfStep, match="two threads"):
            made.rings[0].barrier()
        made.rings[1].abort()
        assert isinstance(first.exception(5), PeerLost)


def test_the_number_of_a_call_wraps() -> None:
    ring = Ring(0, 1, ["127.0.0.1:1"], TOKEN)
    ring._number = 0xFFFFFFFF
    assert len(ring._header("barrier", "uint8", "", 0, 0)) == ring_module._HEADER.size
    ring.close()


def test_the_time_in_calls_is_that_of_waiting(ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.worker.ring.now", lambda: (time.monotonic(), 0.0))

    def work(ring: Ring) -> list[float]:
        found = [ring.waits().waited_s]
        for call in (ring.barrier, lambda: ring.all_gather_bytes(b"x" * 100_000)):
            call()
            found.append(ring.waits().waited_s)
        assert ring.waits().idle_s == found[-1]
        return found

    for first, second, third in ranks(2).each(work):
        assert first == 0
        assert first < second < third
