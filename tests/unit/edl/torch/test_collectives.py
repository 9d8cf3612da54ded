"""edl tracks torch's collectives, whatever a script does with them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from edl.torch import collectives  # noqa: E402
from edl.torch.collectives import nccl_error  # noqa: E402
from edl.torch.framework import TorchFramework  # noqa: E402
from edl.torch.group import GroupLost, TorchGroup  # noqa: E402
from tests.unit.edl.torch.test_framework import alone  # noqa: E402

pytestmark = pytest.mark.torch
_held_by_torch = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)
"""torch 2.5 or newer tells how many it has."""
LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33184"


def held_by_torch() -> int | None:
    """Number of unawaited works that torch holds, or None if unknown."""
    return None if _held_by_torch is None else _held_by_torch()


@pytest.fixture
def framework() -> Iterator[TorchFramework]:
    made = TorchFramework()
    yield made
    made.prepare(alone(9))


@pytest.fixture
def group(framework: TorchFramework) -> Iterator[TorchGroup]:
    made = framework.prepare(alone(1))
    framework.connect(made, made.seat)
    yield made
    made.abort()
    made.retire()


def fail(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError(LOST)


class Complete:
    """Unawaited work."""

    def is_completed(self) -> bool:
        return True


class OnDevice(dist.Work):
    """Work like NCCL's: waiting for it blocks only the streams."""

    waited: list[str] = []  # noqa: RUF012

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any = None) -> bool:
        self.waited.append("streams")
        return True


def breaking_off(sent: bool) -> Any:
    """A DDP of two layers with a bucket each, whose second pass breaks off at the first layer, which comes last, or at
    the second one."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    ddp(torch.ones(1, 64)).sum().backward()
    model[0 if sent else 1].weight.register_hook(no_room)
    return ddp


def no_room(gradient: Any) -> Any:
    raise ValueError("no room")


def world() -> Any:
    return dist.group.WORLD


def test_what_succeeds_leaves_nothing_behind(group: TorchGroup) -> None:
    for _ in range(200):
        dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), async_op=True)
    dist.barrier()
    group.settle()
    assert group.failure() == ""
    assert not group.watch._open


def test_handles_that_nobody_waits_for_do_not_pile_up(group: TorchGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.torch.collectives._wait", lambda work: None)
    for _ in range(500):
        group.watch.began(Complete(), among_all=True)
        assert len(group.watch._open) <= 3
    dist.all_reduce(torch.ones(2), async_op=True)
    group.settle()
    assert not group.watch._open


def test_a_backward_pass_that_loses_a_peer_counts(group: TorchGroup) -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(fail)
    with pytest.raises(RuntimeError):
        weight.sum().backward()
    assert "Connection closed by peer" in group.failure()
    assert group.aborted


def test_after_a_failure_no_collective_begins(group: TorchGroup) -> None:
    """NCCL would carry it out, and give everybody what a script has computed without a result."""
    model = torch.nn.Linear(2, 2, bias=False)
    ddp, plain = DistributedDataParallel(model), torch.ones(2, requires_grad=True)
    loss = ddp(torch.ones(1, 2)).sum()
    group.has_nccl = True
    group.watch.fail("reset")
    value, everybody = torch.ones(2), world()
    coalesced: Any = dist
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(value),
        lambda: world().send([value], 0, 1),
        lambda: funcol.all_reduce(value, "sum", everybody),
        lambda: coalesced._broadcast_coalesced(everybody, [value], 64),
        loss.backward,
    ]
    for call in calls:
        with pytest.raises(GroupLost, match="round 1: no collective can begin: a collective failed: reset"):
            call()
    assert model.weight.grad is None
    plain.sum().backward()  # sends nothing
    assert plain.grad is not None


def test_the_scripts_own_errors_in_a_backward_pass_do_not(group: TorchGroup) -> None:
    def own(gradient: Any) -> Any:
        raise ValueError("no such thing")

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(own)
    with pytest.raises(ValueError, match="no such thing"):
        weight.sum().backward()
    assert group.failure() == ""


def test_a_call_that_is_refused_does_not(group: TorchGroup) -> None:
    """Scripts find out that way what a backend can do."""
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.all_reduce(torch.ones(2), op="no such operation")
    assert group.failure() == ""


def test_work_that_fails_unseen_is_seen_at_the_next_boundary(
    group: TorchGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.watch.began(Complete(), among_all=True)
    monkeypatch.setattr("edl.torch.collectives._wait", fail)
    assert group.failure() == ""
    group.settle()
    assert "Connection closed by peer" in group.failure()
    assert not group.watch._open


def test_a_round_that_is_over_does_not_count_for_the_next(framework: TorchFramework, group: TorchGroup) -> None:
    old = dist.group.WORLD
    following = framework.prepare(alone(2))
    framework.connect(following, following.seat)
    group.abort()
    assert following.failure() == ""
    assert old is not dist.group.WORLD
    assert not following.has(old)
    following.abort()
    following.retire()


def test_what_an_aborted_group_exchanged_is_not_used(
    framework: TorchFramework, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous backend returns garbage; lengths would be read from it."""
    formed = framework.prepare(alone(1))
    framework.connect(formed, formed.seat)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("edl.torch.framework._gather", lambda data: [b"\xff" * len(data)] * 2)
    formed.abort()
    with pytest.raises(GroupLost, match="round 1: the exchanged data cannot be used: the group was aborted"):
        framework.exchange(b"mine")
    formed.retire()


def test_an_error_that_nccl_has_found_by_itself() -> None:
    def group_with(error: Any, kind: str = "nccl") -> Any:
        backend = SimpleNamespace(get_error=lambda: error, name=lambda: kind)
        return SimpleNamespace(_get_backend=lambda device: backend)

    fine, bad = SimpleNamespace(name="SUCCESS"), SimpleNamespace(name="COMM_ERROR")
    assert nccl_error([group_with(fine), group_with(bad, "gloo")]) == ""
    assert nccl_error([group_with(fine), group_with(bad)]) == "NCCL reports COMM_ERROR"


def test_work_on_a_device_is_waited_for_at_the_next_boundary(
    group: TorchGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its handle was dropped; NCCL runs on a stream of its own."""
    monkeypatch.setattr(OnDevice, "waited", [])
    begin = collectives._observed_call(True, lambda group, tensors: OnDevice())
    begin(world(), [torch.ones(2, device="meta")])
    assert OnDevice.waited == []
    group.settle()
    assert OnDevice.waited == ["streams"]
    assert not group.watch._open


def test_what_goes_between_two_ranks_is_not_held(group: TorchGroup) -> None:
    work = Complete()
    group.watch.began(work, among_all=False)
    dropped = weakref.ref(work)
    del work
    gc.collect()
    assert dropped() is None
    assert not group.watch._open


def test_many_open_handles_are_not_all_looked_at_each_time(group: TorchGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    class Slow(Complete):
        def is_completed(self) -> bool:
            looks.append(self)
            return False

    monkeypatch.setattr("edl.torch.collectives._wait", lambda work: None)
    for _ in range(2000):
        group.watch.began(Slow(), among_all=True)
    assert len(looks) < 10 * 2000
    group.settle()


def test_a_communication_hooks_buckets_are_released_after_its_pass(group: TorchGroup) -> None:
    """gloo completes the future that DDP waits for shortly before the work itself. A pass that ends in between leaves
    its last bucket for the next look, so not every pass must release all of them."""
    sent = []

    def send(bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer().clone(), async_op=True)
        sent.append(weakref.ref(work))
        return work.get_future().then(lambda future: future.value()[0])

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, lambda state, bucket: send(bucket))
    released = 0
    for number in range(200):
        model(torch.ones(1, 4)).sum().backward()
        assert len(sent) > number
        # The backend's own thread may drop its reference a moment after the pass.
        deadline = time.monotonic() + 0.2
        while any(work() for work in sent) and time.monotonic() < deadline:
            os.sched_yield()
        released += not any(work() for work in sent)
        if released == 3:
            return
    raise AssertionError(f"{released} of {len(sent)} passes have released their buckets")


def test_functional_collectives_are_waited_for_at_the_next_boundary(group: TorchGroup) -> None:
    held = [funcol.all_reduce(torch.ones(2), "sum", world()) for _ in range(3)]
    held += funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", world())
    assert held_by_torch() in (None, len(held))
    group.settle()
    assert not held_by_torch()
    assert not collectives._promised_to(group.watch)
    assert (held[0] + 1).tolist() == [2.0, 2.0]
    assert group.failure() == ""


def test_results_of_functional_collectives_do_not_pile_up(group: TorchGroup) -> None:
    collectives._promised.clear()
    for _ in range(500):
        assert (funcol.all_reduce(torch.ones(2), "sum", world()) + 1).tolist() == [2.0, 2.0]
    assert not collectives._promised
    for _ in range(500):
        collectives._promise([torch.ones(2)], group.watch)  # dropped at once
    assert len(collectives._promised) <= 130
    for _ in range(500):
        funcol.all_reduce(torch.ones(2), "sum", world())  # held by torch, together with its work
    group.settle()
    assert not held_by_torch()
    assert not collectives._promised_to(group.watch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_functional_collectives_are_traced_as_ever(group: TorchGroup) -> None:
    name = world().group_name

    def reduce(values: Any) -> Any:
        return funcol.all_reduce(values * 2, "sum", name) + 1

    reduced = torch.compile(reduce, fullgraph=True, backend="aot_eager")
    values = torch.ones(3, requires_grad=True)
    result = reduced(values)
    assert result.tolist() == [3.0] * 3
    if result.requires_grad:  # since torch 2.5
        result.sum().backward()
        assert values.grad is not None and values.grad.tolist() == [2.0] * 3
    assert group.failure() == ""


def break_off(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of one of two ranks."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="no room"):
        model(torch.ones(1, 64)).sum().backward()


def test_a_pass_that_breaks_off_after_it_has_sent_gradients_counts(
    group: TorchGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = breaking_off(sent=True)
    break_off(model, monkeypatch)
    assert "failed in the middle: no room" in group.failure()
    assert group.aborted


def test_a_pass_that_breaks_off_before_may_be_made_again(group: TorchGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scripts do that look for the largest batch that fits, with a DDP for each try."""
    model = breaking_off(sent=False)
    break_off(model, monkeypatch)
    assert group.failure() == ""
    again = DistributedDataParallel(torch.nn.Linear(2, 2))
    again(torch.ones(1, 2)).sum().backward()
    group.settle()
    assert group.failure() == ""


def test_a_pass_that_broke_off_and_was_not_made_again_counts(
    group: TorchGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = breaking_off(sent=False)
    break_off(model, monkeypatch)
    torch.ones(2, requires_grad=True).sum().backward()
    group.settle()
    assert "was not repeated: no room" in group.failure()


def test_after_a_pass_that_broke_off_nothing_is_exchanged(
    framework: TorchFramework, group: TorchGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would take a vote for gradients, or wait for them for ever."""
    model = breaking_off(sent=False)
    monkeypatch.setattr("edl.torch.framework._gather", lambda data: pytest.fail("it has begun"))
    break_off(model, monkeypatch)
    with pytest.raises(GroupLost, match="was not repeated: no room"):
        framework.exchange(b"vote")
    assert group.aborted


def test_a_pass_that_breaks_off_without_the_others_does_not(group: TorchGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in ``no_sync``, or beside the DDP."""
    alone, together = breaking_off(sent=True), breaking_off(sent=True)
    with pytest.raises(ValueError, match="no room"):
        alone(torch.ones(1, 64)).sum().backward()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with together.no_sync(), pytest.raises(ValueError, match="no room"):
        together(torch.ones(1, 64)).sum().backward()
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(no_room)
    with pytest.raises(ValueError, match="no room"):
        weight.sum().backward()
    group.settle()
    assert group.failure() == ""


TWO_RANKS = """
import os, sys, traceback
from dataclasses import replace
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed._tensor import Shard, distribute_tensor, init_device_mesh
from edl.torch.framework import TorchFramework
from tests.unit.edl.worker.test_ring import Ports
from tests.unit.edl.torch.test_framework import alone

def lose_a_peer(way):
    ports = Ports(1)
    rank = 0 if os.fork() else 1
    torch.set_num_threads(1)
    seat = replace(alone(1), rank=rank, world_size=2, master=ports.endpoints[0])
    framework = TorchFramework()
    group = framework.prepare(seat)
    framework.connect(group, seat)
    spread = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    dist.barrier()
    if rank == 1:
        os._exit(0)
    os.wait()
    try:
        if way == "held":
            held = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        elif way == "compiled":
            torch.compile(lambda values: funcol.all_reduce(values, "sum", "0") + 1, backend="aot_eager")(torch.ones(2))
        else:
            spread.full_tensor()
    except Exception as error:
        print("swallowed", type(error).__name__)
    if way == "held":
        assert group.failure() == ""
        group.settle()
    print("failed:", group.watch.failed, group.aborted)

for way in sys.argv[1:]:
    print("==", way, flush=True)
    if os.fork() == 0:
        try:
            lose_a_peer(way)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
WAYS = ["full_tensor", "held", "compiled"]


@pytest.fixture(scope="module")
def said_after_a_loss() -> dict[str, str]:
    """Of two ranks each way: processes of their own, forked from one that has imported torch."""
    program = [sys.executable, "-W", "ignore", "-c", TWO_RANKS, *WAYS]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    parts = (part.partition("\n") for part in done.stdout.split("== ")[1:])
    said = {way: text for way, _, text in parts}
    assert list(said) == WAYS, done.stdout + done.stderr
    return said


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_functional_collectives_that_lose_a_peer_count(said_after_a_loss: dict[str, str], way: str) -> None:
    said = said_after_a_loss[way]
    assert "failed: a collective failed: " in said, said
    assert said.endswith("True\n")
    assert ("swallowed" in said) == (way != "held")
