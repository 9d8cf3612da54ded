"""What local steps read and write of a layer, and what they refuse. Between workers: tests/process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

import edl.paddle as edl  # noqa: E402
from edl.errors import StateError  # noqa: E402
from edl.paddle.outer import PaddleReplica  # noqa: E402

pytestmark = pytest.mark.paddle


def model() -> Any:
    paddle.seed(0)
    made = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.BatchNorm1D(4), paddle.nn.Linear(4, 2))
    made[0].weight.stop_gradient = True
    return made


def test_trained_parameters_and_statistics_are_exchanged() -> None:
    replica = PaddleReplica(model())
    assert replica.names == ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert [one.shape for one in replica.read_buffers()] == [(4,), (4,)], "not the frozen matrix"


def test_what_is_written_is_read() -> None:
    replica = PaddleReplica(model())
    before = replica.read()
    changed = [one + 1 for one in before]
    replica.write(changed)
    for array, read in zip(changed, replica.read(), strict=True):
        assert array.tobytes() == read.tobytes()
    assert before[0].tobytes() != changed[0].tobytes(), "read() has copied"


@pytest.mark.filterwarnings("ignore:When training, we now always track")
def test_everything_is_copied_and_put_back() -> None:
    trained = model()
    replica = PaddleReplica(trained)
    before = {name: one.numpy().copy() for name, one in trained.state_dict().items()}
    saved = replica.copy()
    trained(paddle.randn([5, 3]))
    replica.write([one + 1 for one in replica.read()])
    replica.set(saved)
    assert all((one.numpy() == before[name]).all() for name, one in trained.state_dict().items())


def test_a_parameter_that_is_trained_from_now_on_is_named() -> None:
    trained = model()
    replica = PaddleReplica(trained)
    trained[0].weight.stop_gradient = False
    with pytest.raises(StateError, match=r"local steps: 0\.weight is trained, and was frozen"):
        replica.read()


def test_sums_come_back_to_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ring:
        world_size = 2
        calls: list[Any] = []  # noqa: RUF012

        def all_reduce(self, flat: Any) -> None:
            self.calls.append((str(flat.dtype), flat.size))
            flat *= 2

    ring = Ring()
    monkeypatch.setattr("edl.paddle.outer.group.current", lambda: ring)
    arrays = [np.ones((2, 3), np.float32), np.full((), 2.0), np.full(4, 5.0, np.float32)]
    summed = PaddleReplica(model()).sum_over_workers(arrays, "")
    assert ring.calls == [("float32", 10), ("float64", 1)]
    assert [float(one.max()) for one in summed] == [2, 4, 10]
    assert [one.shape for one in summed] == [(2, 3), (), (4,)]


def test_what_cannot_be_trained_in_local_steps_is_refused() -> None:
    with pytest.raises(StateError, match="without trained parameters"):
        edl.LocalSGD(paddle.nn.ReLU(), every=2)
    with pytest.raises(StateError, match=r"the result of edl\.parallel, whose workers communicate"):
        edl.DiLoCo(edl.parallel(model()))
    with pytest.raises(StateError, match=r"0\.bias is trained in bfloat16.*auto_cast"):
        edl.DiLoCo(model().to(dtype="bfloat16"))


def test_the_state_holds_the_layer_and_not_the_inner_optimizer() -> None:
    trained = model()
    local = edl.DiLoCo(trained)
    with pytest.raises(StateError, match=r"missing in the State: State\(model=model, outer=outer"):
        local.before_restore(edl.State(outer=local)._objects, True)
    for parameters in (trained.parameters(), [{"params": trained.parameters()}]):
        inner = paddle.optimizer.AdamW(parameters=parameters)
        with pytest.raises(StateError, match=r"state\.optimizer: with local steps each worker has an inner optimizer"):
            local.before_restore(edl.State(outer=local, model=trained, optimizer=inner)._objects, True)
    other = paddle.optimizer.AdamW(parameters=model().parameters())
    local.before_restore(edl.State(outer=local, model=trained, optimizer=other)._objects, True)


def test_a_difference_in_the_outer_state_is_a_fault() -> None:
    trained = model()
    held = edl.State(outer=edl.DiLoCo(trained), model=trained)._held()
    assert held.must_equal("outer.momentum.0.bias")
