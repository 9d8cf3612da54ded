"""Paddle's tensors, optimizers and generators as what ``State`` keeps."""

from __future__ import annotations

import importlib.util
import mmap
import random
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddle is not installed", allow_module_level=True)

import paddle

import edl.paddle
from edl.errors import CheckpointError, StateError
from edl.paddle.arrays import PaddleArrays
from edl.paddle.framework import FRAMEWORK
from edl.paddle.optimizer_state import capture, load
from edl.paddle.state import State
from edl.wire.snapshot import Meta
from edl.worker.first_state import FirstState
from edl.worker.numbers import key
from edl.worker.ring import PeerLost

pytestmark = [pytest.mark.paddle, pytest.mark.filterwarnings("ignore:When training, we now always track")]

KINDS = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2"),
]
nn: Any = paddle.nn
optim: Any = paddle.optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [[], [5], [3, 4], [0, 3]])
def test_a_tensor_becomes_bytes_and_returns(kind: Any, shape: list[int]) -> None:
    arrays = PaddleArrays()
    tensor: Any = (paddle.ones(shape) * 3).astype(kind)
    info = arrays.info(tensor)
    assert info.shape == tuple(shape)
    buffer = bytearray(info.size)
    arrays.copy_out([tensor], [memoryview(buffer)])
    found = arrays.copy(arrays.view(info, memoryview(bytes(buffer))))
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert found.astype("float32").numpy().tolist() == tensor.astype("float32").numpy().tolist()


def test_a_view_shares_memory_and_a_copy_does_not() -> None:
    arrays = PaddleArrays()
    data = bytearray(np.arange(4, dtype=np.float32).tobytes())
    view = arrays.view(arrays.info(paddle.zeros([4])), memoryview(data))
    copy = arrays.copy(view)
    data[:4] = np.float32(9).tobytes()
    assert view.tolist() == [9, 1, 2, 3]
    assert copy.tolist() == [0, 1, 2, 3]


def test_large_parameters_and_strided_tensors_are_copied_out() -> None:
    arrays = PaddleArrays()
    large: Any = nn.Linear(2000, 3000).weight
    strided = paddle.randn([40, 60]).transpose([1, 0])
    plain = np.arange(10)[::2]
    values = [large, strided, plain]
    buffers = [bytearray(arrays.info(value).size) for value in values]
    arrays.copy_out(values, [memoryview(buffer) for buffer in buffers])
    for value, buffer in zip(values, buffers, strict=True):
        expected = value if isinstance(value, np.ndarray) else value.numpy()
        assert bytes(buffer) == np.ascontiguousarray(expected).tobytes()


def test_what_has_no_place_in_a_snapshot_is_refused() -> None:
    arrays = PaddleArrays()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(paddle.to_tensor([1])).sum().backward()
    for value in (embedding.weight.grad, paddle.ones([2]).astype("complex128"), np.array(["text"])):
        assert arrays.is_array(value)
        with pytest.raises(StateError):
            arrays.info(value)


def build(kind: Any = "float32", learning_rate: Any = None) -> tuple[Any, Any]:
    """A model, and an optimizer that has not stepped yet. Names are other ones each time."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1D(8), nn.Linear(8, 2))
    net.to(dtype=kind)
    rate = optim.lr.StepDecay(0.1, 2) if learning_rate is None else learning_rate
    half = net[0].parameters()
    groups = [{"params": half}, {"params": net[3].parameters(), "weight_decay": 0.1}]
    return net, optim.AdamW(rate, parameters=groups, multi_precision=kind != "float32")


def train(net: Any, optimizer: Any, steps: int) -> list[float]:
    for step in range(steps):
        net(paddle.to_tensor(np.linspace(-1, step, 12, dtype=np.float32).reshape(3, 4))).square().sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        if hasattr(optimizer._learning_rate, "step"):
            optimizer._learning_rate.step()
    found = [value for parameter in net.parameters() for value in parameter.numpy().reshape(-1).tolist()]
    return [float(value) for value in found]


def through_memory(state: State, other: State) -> None:
    """Commit one state and restore it into the other, without an agent."""
    for stream in ("state", "own"):
        memory: list[mmap.mmap] = []

        state._write(stream, Meta("job", 1, 1, 1, 0, 1, "paddle"), partial(_room, memory))
        kept = FirstState(memory[0])
        names = [name for name in other._objects if (name == "numbers") == (stream == "own")]
        other._load(kept.parsed, kept.view, frozenset(names))


@pytest.mark.parametrize("stepped", [0, 5])
def test_a_rebuilt_model_goes_on_as_the_first_one(stepped: int) -> None:
    net, optimizer = build()
    state = State(model=edl.paddle.parallel(net), optimizer=optimizer, numbers=edl.paddle.RandomState(), epoch=3)
    train(net, optimizer, 3)
    again, optimizer_again = build()
    train(again, optimizer_again, stepped)
    other = State(model=again, optimizer=optimizer_again, numbers=edl.paddle.RandomState(), epoch=0)
    through_memory(state, other)
    assert other.epoch == 3
    assert train(again, optimizer_again, 4) == train(net, optimizer, 4)
    assert optimizer_again.get_lr() == optimizer.get_lr()


def test_a_model_of_another_type_does_not_fit() -> None:
    model, other = build()[0], build("bfloat16")[0]
    with pytest.raises(
        CheckpointError,
        match=r"state.model does not fit .*0.weight: saved as float32, now bfloat16: build it as float32",
    ):
        through_memory(State(model=model), State(model=other))


def test_a_tensor_of_another_type_does_not_fit() -> None:
    kept, live = (paddle.create_parameter([2], kind) for kind in ("float64", "float32"))
    with pytest.raises(CheckpointError, match=r"state.weight does not fit .* saved as float64, now float32"):
        through_memory(State(weight=kept), State(weight=live))


def test_an_optimizers_values_of_another_type_do_not_fit() -> None:
    net, optimizer = build()
    train(net, optimizer, 1)
    kept = capture(optimizer, {"model": net})
    kept["parameters"]["model.0.bias"]["moment1"] = kept["parameters"]["model.0.bias"]["moment1"].astype("float64")
    with pytest.raises(ValueError, match=r"moment1 of model.0.bias: saved as float64, now float32"):
        load(optimizer, {"model": net}, kept)


class Converting(nn.Layer):  # type: ignore[misc]
    """Its own method takes values of any type."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = self.create_parameter([2], dtype=kind)

    def set_state_dict(self, kept: Any) -> None:
        self.weight.set_value(kept["weight"].astype(self.weight.dtype))


def test_a_layer_that_converts_types_itself_gets_another_one() -> None:
    kept, live = Converting("float64"), Converting("float32")
    through_memory(State(model=kept), State(model=live))
    assert live.weight.tolist() == kept.weight.astype("float32").tolist()


def test_an_optimizer_that_had_not_stepped_is_restored_to_that() -> None:
    net, optimizer = build()
    kept = capture(optimizer, {"model": net})
    assert kept["parameters"] == {}
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    expected = train(net, optimizer, 3)
    kept["scheduler"] = {"last_epoch": 0, "last_lr": 0.1}
    net.set_state_dict(weights)
    load(optimizer, {"model": net}, kept)
    assert train(net, optimizer, 3) == expected


@pytest.mark.parametrize("kind", ["Adam", "Momentum"])
def test_lists_of_an_optimizer_that_had_not_stepped_are_forgotten(kind: str) -> None:
    """With ``use_multi_tensor`` Paddle steps with the tensors that it once put into lists."""
    net, _ = build()
    rate = optim.lr.StepDecay(0.1, 2)
    optimizer = getattr(optim, kind)(rate, parameters=net.parameters(), use_multi_tensor=True)
    state = State(model=net, optimizer=optimizer)
    memory: list[mmap.mmap] = []
    state._write("", Meta("job", 1, 1, 1, 0, 1, "paddle"), partial(_room, memory))
    expected = train(net, optimizer, 3)
    for _ in range(2):
        state._load(FirstState(memory[0]).parsed, memoryview(memory[0]), frozenset(state._objects))
        assert train(net, optimizer, 3) == expected


def _room(memory: list[mmap.mmap], size: int) -> memoryview:
    memory.append(mmap.mmap(-1, size))
    return memoryview(memory[0])


def test_names_are_those_of_the_layers() -> None:
    net, optimizer = build(learning_rate=0.5)
    train(net, optimizer, 1)
    kept = capture(optimizer, {"model": net})
    assert list(kept["parameters"]) == ["model.0.weight", "model.0.bias", "model.3.weight", "model.3.bias"]
    assert sorted(kept["parameters"]["model.0.weight"]) == ["beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2"]
    assert kept["learning_rate"] == 0.5
    assert next(iter(capture(optimizer, {})["parameters"])) == "parameter 0"


def test_master_weights_are_kept() -> None:
    net, optimizer = build("bfloat16")
    program: Any = paddle.static.default_main_program()
    optimizer._create_accumulators(program.global_block(), list(net[0].parameters()))
    for number, master in enumerate(optimizer._master_weights.values()):
        master.set_value(paddle.full(master.shape, number + 0.1))
    kept = capture(optimizer, {"model": net})
    assert sorted(kept["parameters"]["model.0.bias"])[2] == "master_weight"
    again, optimizer_again = build("bfloat16")
    load(optimizer_again, {"model": again}, kept)
    values = capture(optimizer_again, {"model": again})["parameters"]
    assert values["model.0.bias"]["master_weight"][0].item() == pytest.approx(1.1)


def test_an_optimizer_loaded_by_paddle_itself_and_not_stepped_yet() -> None:
    net, _ = build()
    first = optim.Adam(0.1, parameters=net.parameters())
    with paddle.utils.unique_name.guard():
        train(net, first, 2)
    saved = first.state_dict()
    second = optim.Adam(0.1, parameters=net.parameters())
    second.set_state_dict({name: tensor.clone() for name, tensor in saved.items()})
    with paddle.utils.unique_name.guard():
        kept = capture(second, {"model": net})["parameters"]
    assert kept["model.0.bias"]["moment1"].tolist() == first._accumulators["moment1"][net[0].bias.name].tolist()


def test_a_changed_model_is_refused() -> None:
    net, optimizer = build()
    train(net, optimizer, 1)
    kept = capture(optimizer, {"model": net})
    other = nn.Sequential(nn.Linear(4, 9))
    with pytest.raises(ValueError, match=r"no longer has the parameters model.3.bias"):
        load(optim.AdamW(0.1, parameters=other.parameters()), {"model": other}, kept)


def numbers() -> tuple[Any, Any, float]:
    return paddle.randn([3]).tolist(), np.random.rand(2).tolist(), random.random()


def test_generators_go_on_where_they_stood() -> None:
    generators = edl.paddle.RandomState()
    numbers()
    kept = generators.state_dict()
    expected = numbers()
    generators.load_state_dict(kept)
    assert numbers() == expected


def test_numbers_depend_on_the_key_alone() -> None:
    """The script's own generators too."""
    own = np.random.default_rng(1)
    holder = edl.paddle.RandomState(own)

    def drawn(key: bytes) -> list[Any]:
        holder.edl_reseed(key)
        return [*numbers(), own.random(2).tolist()]

    one, other = key("step", "seed", 0, 1), key("step", "seed", 0, 2)
    first = drawn(one)
    assert all(here != there for here, there in zip(first, drawn(other), strict=True))
    assert drawn(one) == first
    with pytest.raises(StateError, match="a list cannot be set"):
        edl.paddle.RandomState([])


def test_the_seed_is_what_the_script_has_seeded_paddle_with_or_what_it_says() -> None:
    seeds = []
    for number in (5, 6, 5):
        paddle.seed(number)
        paddle.rand([3])
        random.random()  # seeded by nobody as a rule
        seeds.append(edl.paddle.RandomState().edl_seed())
    assert seeds[0] == seeds[2] != seeds[1]
    said = edl.paddle.RandomState(seed=3).edl_seed()
    paddle.rand([3])
    assert edl.paddle.RandomState(seed=3).edl_seed() == said != edl.paddle.RandomState(seed=4).edl_seed()


def test_a_lost_peer_is_known_behind_other_exceptions() -> None:
    try:
        try:
            raise PeerLost("gone")
        except PeerLost as error:
            raise SystemError("a call returned a result with an exception set") from error
    except SystemError as error:
        assert FRAMEWORK.lost_peers(error)
    assert not FRAMEWORK.lost_peers(RuntimeError("gone"))


def test_the_wrapper_is_as_the_layer() -> None:
    net, _ = build()
    model: Any = edl.paddle.parallel(net)
    assert edl.paddle.parallel(model) is model
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    model.eval()
    assert not (model.training or net.training or net[2].training)
    model.train()
    assert model.training and net.training and net[2].training
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.nothing_like_it
    inputs = paddle.ones([2, 4])
    model.eval()
    assert model(inputs).tolist() == net(inputs).tolist()
    model.extra = nn.Linear(1, 1)
    assert model.layer is net
    assert "extra.weight" in net.state_dict()


def test_importing_starts_no_thread_and_the_launchers_part_no_framework() -> None:
    program = (
        "import sys, edl.paddle, edl.paddle.startup; assert 'paddle' not in sys.modules;"
        "from edl.paddle import *; from edl.paddle import parallel; import os, threading, paddle;"
        "assert callable(parallel) and callable(run), parallel; print(threading.active_count())"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert found.stdout == "1\n", found.stderr


def test_an_interrupted_evaluation_does_not_reach_the_next_world() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 2))
    model[1].eval()  # as the script has set it up
    model[2].weight.stop_gradient = True
    frozen = ["1._mean", "1._variance", "2.weight"]
    state = State(model=model)
    state._model_modes.run(state._modes())
    model.eval()
    for parameter in model.parameters():
        parameter.stop_gradient = True
    state._model_modes.set_back(state._modes())
    assert [part.training for part in model.sublayers(include_self=True)] == [True, True, False, True]
    assert [name for name, one in model.named_parameters() if one.stop_gradient] == frozen


def test_an_interrupted_evaluation_of_a_wrapped_layer_does_not_either() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.Dropout())
    model = edl.paddle.parallel(layer)
    state = State(model=model)
    state._model_modes.run(state._modes())
    model.eval()
    state._model_modes.set_back(state._modes())
    assert [part.training for part in (model, layer, *layer.sublayers())] == [True] * 4


def test_the_statistics_of_batch_norm_may_differ_between_workers() -> None:
    """Each worker has those of its own batches. To Paddle they are parameters without a gradient."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 2))
    model[0].weight.stop_gradient = True
    held = State(model=model)._held()
    strict = {path for path, _ in held.leaves if held.must_equal(path)}
    assert {path for path, _ in held.leaves} - strict == {"model.1._mean", "model.1._variance"}
