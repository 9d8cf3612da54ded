"""``EDLLoop`` with a model that FSDP2 shards, in one process: that it trains as without FSDP2, and what it refuses."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from edl.errors import StateError
from edl.worker import session as sessions
from tests.support.accelerate_on_cpu import shard_on_cpu

pytestmark = [
    pytest.mark.torch,
    # torch's own FSDP2 calls functions that it has deprecated, and Accelerate warns of options
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("edl.integrations.accelerate")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Accelerate chooses one, and warns
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "false")  # restored at the end; Accelerate sets it
    monkeypatch.setattr(module, "is_worker", lambda _: True)
    monkeypatch.setattr(sessions, "_current", None)
    shard_on_cpu(monkeypatch.setattr)
    leave_group(module)  # of another test, whose place is still in the environment
    yield module
    leave_group(module)


def leave_group(module: Any) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    module.forget_world()
    sessions._current = None


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def trained() -> dict[str, Any]:
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": adam, "scheduler": torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)}


def objects(fsdp: bool = True, mixed_precision: str = "no", parallelism: Any = None, **plugin: Any) -> dict[str, Any]:
    """What a script's ``build`` returns."""
    sharding = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **plugin}) if fsdp else None
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=sharding, mixed_precision=mixed_precision, parallelism_config=parallelism
    )
    return {"accelerator": accelerator, **trained()}


def loader() -> Any:
    data = TensorDataset(torch.randn(22, 3, generator=torch.Generator().manual_seed(1)))
    return DataLoader(data, batch_size=2, shuffle=True)


def train(loop: Any, accelerator: Any) -> tuple[list[float], list[float]]:
    """Three epochs of three steps. Returns the weights and the learning rate."""
    model, optimizer, batches, scheduler = loop.prepare(accelerator)
    for _ in loop.epochs(3):
        for (batch,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean())
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.state_dict().values()]
    return [float(number) for tensor in whole for number in tensor.flatten()], scheduler.get_last_lr()


def sharded(loops: Any, build: Callable[[], dict[str, Any]] = objects) -> Any:
    return loops.EDLLoop(build=build, loader=loader(), global_batch=8)


def run(loops: Any, build: Callable[[], dict[str, Any]] = objects) -> Any:
    loop = sharded(loops, build)
    return loop.run(lambda accelerator: train(loop, accelerator))


@pytest.fixture
def plain(loops: Any) -> tuple[list[float], list[float]]:
    """The same training without FSDP2."""
    loop = loops.EDLLoop(loader=loader(), global_batch=8, **trained())
    found: tuple[list[float], list[float]] = loop.run(lambda: train(loop, Accelerator(cpu=True)))
    leave_group(loops)
    return found


def equal(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert found[1] == expected[1]


def test_a_sharded_loop_trains_as_one_that_is_not(loops: Any, plain: Any) -> None:
    seen = []

    def build() -> dict[str, Any]:
        seen.append(objects())
        return seen[-1]

    equal(run(loops, build), plain)
    assert len(seen) == 1
    assert isinstance(seen[0]["model"], FSDPModule)


def test_the_first_worker_may_load_the_weights_for_all(loops: Any, plain: Any) -> None:
    equal(run(loops, lambda: objects(cpu_ram_efficient_loading=True)), plain)


def test_layers_may_be_sharded_one_by_one(loops: Any, plain: Any) -> None:
    equal(run(loops, lambda: objects(auto_wrap_policy="size_based_wrap", min_num_params=4)), plain)


def test_with_bf16_the_weights_stay_in_fp32(loops: Any, plain: Any) -> None:
    found = run(loops, lambda: objects(mixed_precision="bf16"))
    assert found[0] == pytest.approx(plain[0], rel=0.2, abs=0.1)
    assert found[0] != plain[0]


def test_without_a_launcher_it_is_built_once(loops: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "is_worker", lambda _: False)
    equal(run(loops, lambda: objects(fsdp=False)), plain)


def test_the_model_of_the_last_world_is_freed_before_the_next_is_built(loops: Any) -> None:
    alive: list[Any] = []
    counts = []

    def build() -> dict[str, Any]:
        counts.append(sum(one() is not None for one in alive))
        made = objects()
        alive.append(weakref.ref(made["model"]))
        return made

    loop = sharded(loops, build)

    class Over(Exception):
        pass

    def interrupted(accelerator: Any) -> None:
        loop.prepare(accelerator)
        raise Over

    for _ in range(2):
        with pytest.raises(Over):
            loop.run(interrupted)
        loop.state._session.underway = False  # as in another world
        gc.collect()
    assert counts == [0, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fsdp_version": 1}, "fsdp_version=1: use 2"),
        ({"cpu_offload": True}, "cpu_offload: set it to False"),
        ({"activation_checkpointing": True}, "activation_checkpointing by Accelerate: set it to False"),
        ({"ignored_modules": []}, "ignored_modules, whose gradients nobody averages"),
        ({"parallelism": ParallelismConfig(dp_shard_size=1)}, "a parallelism_config: leave it out"),
    ],
)
def test_a_kind_of_sharding_that_cannot_be_kept_is_refused(loops: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError, match=f"EDLLoop cannot keep a sharded model with .*{text}"):
        run(loops, lambda: objects(**options))


def test_build_without_a_plugin_is_refused(loops: Any) -> None:
    with pytest.raises(StateError, match=r"Accelerate does not shard here \(MULTI_CPU\): give it an fsdp_plugin"):
        run(loops, lambda: objects(fsdp=False))


def test_fsdp_without_build_is_refused(loops: Any) -> None:
    model = net()
    loop = loops.EDLLoop(model=model, optimizer=torch.optim.Adam(model.parameters()), loader=loader())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(StateError, match=r"give EDLLoop a function build in place of model and optimizer"):
        loop.run(lambda: loop.prepare(Accelerator(cpu=True, fsdp_plugin=plugin)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": None}, "build returned a NoneType as model: it must be a Module"),
        ({"optimizer": 3}, "build returned a int as optimizer: it must be a Optimizer"),
        ({"ema": 1}, r"it must return accelerator, model, optimizer and, if there is one, scheduler"),
    ],
)
def test_a_wrong_result_of_build_is_refused(loops: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError, match=text):
        run(loops, lambda: {**objects(), **changes})


def test_build_must_not_prepare(loops: Any) -> None:
    def build() -> dict[str, Any]:
        made = objects()
        made["accelerator"].prepare(made["model"], made["optimizer"])
        return made

    with pytest.raises(StateError, match="a model that is prepared already"):
        run(loops, build)


def test_it_is_prepared_once_with_its_own_accelerator(loops: Any) -> None:
    loop = sharded(loops)

    def twice(accelerator: Any) -> None:
        loop.prepare(accelerator)
        loop.prepare(accelerator)

    with pytest.raises(StateError, match=r"prepare\(accelerator\) was called twice in a world"):
        loop.run(twice)


def test_either_a_model_or_build_is_given(loops: Any) -> None:
    model = net()
    with pytest.raises(StateError, match=r"EDLLoop\(build=..., model=...\): build returns them; leave these out"):
        loops.EDLLoop(build=objects, model=model, loader=loader())
    with pytest.raises(StateError, match="EDLLoop needs model and optimizer, or for FSDP2 build"):
        loops.EDLLoop(model=model, loader=loader())
