"""Whoever cannot go through with the averaging of gradients leaves no ring behind that looks whole."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddle is not installed", allow_module_level=True)

import paddle

import edl.paddle
from edl.paddle import ddp, group
from edl.paddle.arrays import memory
from edl.paddle.framework import FRAMEWORK
from edl.worker.ring import OutOfStep, PeerLost, Ring
from tests.unit.edl.worker.test_ring import TOKEN, Ports

pytestmark = pytest.mark.paddle
nn: Any = paddle.nn
autograd: Any = paddle.autograd
WAITS_S = 20


class Pair:
    """This process, as rank 0, and a peer on a thread."""

    def __init__(self) -> None:
        self._ports = Ports(2)
        self.ring, self.peer = (Ring(rank, 2, self._ports.endpoints, TOKEN, 1) for rank in range(2))
        self._thread = ThreadPoolExecutor(1)
        connected = self._thread.submit(self.peer.connect, 10)
        self.ring.connect(10)
        connected.result(10)

    def meanwhile(self, work: Callable[[Ring], object]) -> Callable[[], BaseException | None]:
        """The peer does this; asked later, what it raised."""
        future = self._thread.submit(work, self.peer)
        return lambda: future.exception(WAITS_S)

    def close(self) -> None:
        for ring in (self.ring, self.peer):
            ring.abort()
        self._thread.shutdown()
        for ring in (self.ring, self.peer):
            ring.close()
        self._ports.close()


@pytest.fixture(name="pair")
def _pair() -> Iterator[Pair]:
    before, made = group.current(), Pair()
    group.use(made.ring)
    yield made
    group.use(before)
    made.close()


def with_parameters(pair: Pair) -> Any:
    """A model whose parameters the peer has taken."""
    model = edl.paddle.parallel(nn.Linear(2, 1, bias_attr=False))
    took = pair.meanwhile(lambda ring: ring.broadcast(np.zeros((2, 1), "float32")))
    model(paddle.ones([1, 2]))
    assert took() is None
    return model


def peer_uses(flag: int) -> Callable[[Ring], None]:
    """As a peer does whose gradient is of this kind; it waits for what should follow."""

    def work(ring: Ring) -> None:
        ring.all_reduce(np.array([flag], np.uint8), "max")
        ring.all_reduce(np.ones(2, "float32"), "mean")

    return work


def test_gradients_of_different_kinds_end_the_ring(pair: Pair) -> None:
    model = with_parameters(pair)
    peer = pair.meanwhile(peer_uses(2))  # float16
    with pytest.raises(OutOfStep, match="another type on another rank"):
        model(paddle.ones([1, 2])).sum().backward()
    assert "another type on another rank" in pair.ring.failure()
    assert isinstance(peer(), PeerLost)


def test_a_kind_that_cannot_be_averaged_ends_the_ring(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_parameters(pair)
    monkeypatch.setattr(ddp, "KINDS", ("float16",))
    peer = pair.meanwhile(peer_uses(1))
    with pytest.raises(TypeError, match="cannot be averaged"):
        model(paddle.ones([1, 2])).sum().backward()
    assert "cannot be averaged" in pair.ring.failure()
    assert isinstance(peer(), PeerLost)


def test_no_memory_between_two_calls_ends_the_ring(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_parameters(pair)

    def full(*arguments: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(model, "_average_bucket", full)
    with model.no_sync():
        model(paddle.ones([1, 2])).sum().backward()
    peer = pair.meanwhile(peer_uses(1))
    with pytest.raises(MemoryError):
        model.average_gradients()
    assert "no room" in pair.ring.failure()
    assert isinstance(peer(), PeerLost)


def test_parameters_that_do_not_all_arrive_end_the_ring(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = edl.paddle.parallel(nn.Linear(2, 1, bias_attr=False))

    def full(*arguments: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(ddp, "broadcast", full)
    peer = pair.meanwhile(lambda ring: ring.broadcast(np.zeros((2, 1), "float32")))
    with pytest.raises(MemoryError):
        model(paddle.ones([1, 2]))
    assert "no room" in pair.ring.failure()
    assert isinstance(peer(), PeerLost)


def test_averaging_that_succeeds_leaves_the_ring_whole(pair: Pair) -> None:
    model = with_parameters(pair)
    peer = pair.meanwhile(peer_uses(1))
    model(paddle.full([1, 2], 3.0)).sum().backward()
    assert peer() is None
    assert pair.ring.failure() == ""
    assert model.layer.weight.grad.reshape([-1]).tolist() == [2.0, 2.0]


def test_a_layer_that_was_wrapped_before_is_averaged_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a script that wraps its model in each round. A worker that has joined has one wrapper only, and would wait
    for none but its own average."""
    layer = nn.Linear(2, 1, bias_attr=False)
    calls: list[object] = []
    original = ddp._came

    def came(watch: Any) -> None:
        calls.append(watch)
        original(watch)

    monkeypatch.setattr(ddp, "_came", came)
    group.use(None)
    earlier = [edl.paddle.parallel(layer) for _ in range(3)]
    for one in earlier:
        one(paddle.ones([1, 2])).sum().backward()
    layer.weight.clear_gradient(False)
    calls.clear()
    group.use(pair.ring)
    model = edl.paddle.parallel(layer)
    took = pair.meanwhile(lambda ring: ring.broadcast(np.zeros((2, 1), "float32")))
    loss = model(paddle.full([1, 2], 3.0)).sum()
    assert took() is None
    peer = pair.meanwhile(peer_uses(1))
    loss.backward()
    assert peer() is None
    assert len(calls) == 1, "one hook"
    assert layer.weight.grad.reshape([-1]).tolist() == [2.0, 2.0]


def test_gradients_of_an_interrupted_step_do_not_last(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a layer that is not in the state."""
    layer = nn.Linear(2, 1, bias_attr=False)
    group.use(None)
    monkeypatch.setattr(ddp, "broadcast", lambda tensor: None)
    earlier = Ring(0, 1, [""], TOKEN, 0)
    for ring, expected in ((earlier, 1.0), (earlier, 2.0), (pair.ring, 1.0)):
        group.use(ring)
        model = edl.paddle.parallel(layer)
        with model.no_sync():
            model(paddle.ones([1, 2])).sum().backward()
        assert layer.weight.grad.reshape([-1]).tolist() == [expected] * 2


def test_parameters_that_were_frozen_for_a_while_have_one_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(ddp, "_came", calls.append)
    layer = nn.Sequential(nn.Linear(2, 2, bias_attr=False), nn.Linear(2, 1, bias_attr=False))
    model = edl.paddle.parallel(layer)
    for frozen, expected in ((False, 2), (True, 1), (False, 2)):
        layer[0].weight.stop_gradient = frozen
        calls.clear()
        model(paddle.ones([1, 2])).sum().backward()
        assert len(calls) == expected


def test_a_copy_of_a_wrapped_layer_has_hooks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(ddp, "_came", calls.append)
    layer = nn.Linear(2, 1, bias_attr=False)
    edl.paddle.parallel(layer)(paddle.ones([1, 2])).sum().backward()
    twin = edl.paddle.parallel(copy.deepcopy(layer))
    calls.clear()
    twin(paddle.ones([1, 2])).sum().backward()
    assert len(calls) == 1
    assert "edl" not in str(layer.state_dict())


def test_rows_that_only_the_peer_has_used_can_be_averaged_after_no_sync(pair: Pair) -> None:
    model = edl.paddle.parallel(nn.Embedding(4, 2, sparse=True))
    took = pair.meanwhile(lambda ring: ring.broadcast(np.zeros((4, 2), "float32")))
    model(paddle.to_tensor([1]))
    assert took() is None

    def work(ring: Ring) -> None:
        ring.all_reduce(np.array([1 | 128], np.uint8), "max")
        ring.all_gather_bytes(np.array([3], np.int64).tobytes())
        ring.all_gather_bytes(np.full(2, 4.0, "float32").tobytes())

    peer = pair.meanwhile(work)
    model.average_gradients()
    assert peer() is None
    assert list(model.layer.weight.grad.rows()) == [3]
    assert model.layer.weight.grad.numpy().tolist() == [[2.0, 2.0]]


class Fails(autograd.PyLayer):  # type: ignore[misc]
    """Its backward pass fails before that of the model begins."""

    @staticmethod
    def forward(context: Any, tensor: Any) -> Any:
        return tensor * 1.0

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        raise MemoryError("no room")


def fail_in_backward(model: Any) -> None:
    with pytest.raises(Exception, match="no room"):
        Fails.apply(model(paddle.ones([1, 2]))).sum().backward()


def test_a_backward_pass_that_failed_must_be_repeated_before_the_next_boundary(pair: Pair) -> None:
    """The script may swallow the exception; the peer waits for the gradients."""
    model = with_parameters(pair)
    peer = pair.meanwhile(peer_uses(1))
    fail_in_backward(model)
    assert pair.ring.failure() == "", "the script may repeat it"
    pair.ring.settle()
    assert "a backward pass failed and was not repeated" in pair.ring.failure()
    assert isinstance(peer(), PeerLost)


def test_it_must_be_repeated_before_the_workers_exchange_anything(pair: Pair) -> None:
    model = with_parameters(pair)
    peer = pair.meanwhile(peer_uses(1))
    fail_in_backward(model)
    with pytest.raises(PeerLost, match="was not repeated"):
        FRAMEWORK.exchange(b"vote")
    assert isinstance(peer(), PeerLost)


@pytest.mark.parametrize("later", [False, True])
def test_a_backward_pass_that_is_repeated_is_not_owed(pair: Pair, later: bool) -> None:
    """Either all of it, or with one average after several passes."""
    model = with_parameters(pair)
    peer = pair.meanwhile(peer_uses(1))
    fail_in_backward(model)
    with model.no_sync() if later else contextlib.nullcontext():
        model(paddle.full([1, 2], 3.0)).sum().backward()
    if later:
        model.average_gradients()
    assert peer() is None
    pair.ring.settle()
    assert pair.ring.failure() == ""


def test_a_failure_that_no_peer_waits_for_is_not_owed(pair: Pair) -> None:
    """A pass without averaging, and one of another layer after the model's own."""
    model = with_parameters(pair)
    with model.no_sync():
        fail_in_backward(model)
    peer = pair.meanwhile(peer_uses(1))
    model(paddle.ones([1, 2])).sum().backward()
    assert peer() is None
    fail_in_backward(nn.Linear(2, 1))
    pair.ring.settle()
    assert pair.ring.failure() == ""


def peer_averages(count: int) -> Callable[[Ring], None]:
    return lambda ring: ring.all_reduce(np.full(count, 3.0, "float32"), "mean")


def test_buckets_of_any_size_share_one_buffer(pair: Pair) -> None:
    """Their size changes with the parameters that a step uses."""
    model = edl.paddle.parallel(nn.Linear(2, 1))
    sizes = [(2,), (2, 1), (1,)]
    for size in sizes:
        bucket = ddp._Bucket()
        for count in size:
            bucket.gradients.append(paddle.ones([count]))
            bucket.arrays.append(memory(bucket.gradients[-1]))
            bucket.size += bucket.arrays[-1].nbytes
        peer = pair.meanwhile(peer_averages(sum(size)))
        model._average_bucket(pair.ring, "float32", bucket)
        assert peer() is None
        assert [one.tolist() for one in bucket.gradients] == [[2.0] * count for count in size]
    assert [(name, one.size) for name, one in model._flat.items()] == [("float32", 3)]
