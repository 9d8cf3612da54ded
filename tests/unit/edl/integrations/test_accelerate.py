"""``EDLLoop`` in one process: what it refuses, and that a loop continues as if nobody had interrupted it."""

from __future__ import annotations

import copy
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, TensorDataset

import edl.torch
from edl.errors import StateError
from edl.worker import session as sessions
from edl.worker.state import BaseState
from tests.support.saved_steps import saved_boundaries

pytestmark = pytest.mark.torch
MODULE = "edl.integrations.accelerate"


def test_without_the_package_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == MODULE or name.split(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"pip install 'edl\[accelerate\]'"):
        importlib.import_module(MODULE)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("accelerate")
    module = importlib.import_module(MODULE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Accelerate chooses one, and warns
    monkeypatch.setattr(module, "is_worker", lambda _: True)
    monkeypatch.setattr(sessions, "_current", None)
    yield module
    leave_group(module)


def leave_group(module: Any) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    module.forget_world()
    sessions._current = None


class Training:
    """A loop as one writes it, over 22 samples: three steps an epoch, the last of them smaller."""

    def __init__(self, loops: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        adam = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
        data = TensorDataset(torch.randn(22, 3, generator=torch.Generator().manual_seed(1)))
        loader = DataLoader(data, batch_size=2, shuffle=True)
        self.loop = loops.EDLLoop(
            model=self.net, optimizer=adam, scheduler=self.decay, loader=loader, global_batch=8, seen=0, **options
        )

    def train(self, **options: Any) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, **options)
        model, optimizer, batches, scheduler = self.loop.prepare(accelerator)
        for _ in self.loop.epochs(3):
            for (batch,) in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                self.loop.state.seen += len(batch)

    def result(self) -> tuple[Any, ...]:
        weights = [float(number) for tensor in self.net.state_dict().values() for number in tensor.flatten()]
        return weights, self.decay.get_last_lr(), self.loop.state.seen, self.loop._progress.state_dict()


def test_each_step_is_the_mean_over_its_samples(loops: Any) -> None:
    """Against a loop without Accelerate, over whole steps."""
    made = Training(loops)
    made.loop.run(made.train)
    order = made.loop._loader
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    rows = order.dataset.tensors[0]
    for epoch in range(3):
        order.set_epoch(epoch)
        places = order.batches.sampler.order().take(range(22))
        for first in range(0, 22, 8):
            batch = rows[places[first : first + 8]]
            ((net(batch) - batch.sum(1, keepdim=True)) ** 2).mean().backward()
            adam.step()
            decay.step()
            adam.zero_grad()
    weights = [float(number) for tensor in net.state_dict().values() for number in tensor.flatten()]
    assert made.result()[0] == pytest.approx(weights, rel=1e-5, abs=1e-6)
    assert made.result()[1] == decay.get_last_lr()
    assert made.result()[2] == 66


class Gone(BaseException):
    pass


@pytest.mark.parametrize("at", [1, 3, 5, 8])
def test_another_loop_continues_from_what_was_kept(loops: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = Training(loops)
    undisturbed.loop.run(undisturbed.train)
    leave_group(loops)

    first = Training(loops)
    kept: dict[str, Any] = {}

    def committing(state: BaseState) -> None:
        if first.loop._progress.step == at:
            kept.update({name: copy.deepcopy(obj.state_dict()) for name, obj in state._objects.items()})
            kept["seen"] = first.loop.state.seen
            raise Gone

    with monkeypatch.context() as patched, pytest.raises(Gone):
        patched.setattr(BaseState, "commit", committing)
        first.loop.run(first.train)
    leave_group(loops)

    second = Training(loops)
    for name, obj in second.loop.state._objects.items():
        obj.load_state_dict(kept[name])
    second.loop.state.seen = kept["seen"]
    second.loop.run(second.train)
    assert second.result() == undisturbed.result()


def test_restored_state_of_an_optimizer_keeps_its_types(loops: Any) -> None:
    """Accelerate loads it once more, with which torch converts it to the parameters' type."""
    from accelerate import Accelerator

    net = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
    nadam = torch.optim.NAdam(net.parameters())
    net(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    nadam.step()
    before = [state["mu_product"].clone() for state in nadam.state.values()]
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2)
    loop = loops.EDLLoop(model=net, optimizer=nadam, loader=loader, global_batch=8)
    loop.run(lambda: loop.prepare(Accelerator(cpu=True)))
    kept = [state["mu_product"] for state in nadam.state.values()]
    assert {one.dtype for one in kept} == {torch.float32}
    assert kept == before


def test_an_optimizer_that_loads_in_its_own_way_is_left_to_accelerate(loops: Any) -> None:
    from accelerate import Accelerator

    class Own(torch.optim.SGD):
        loaded = 0

        def load_state_dict(self, state_dict: Any) -> None:
            self.loaded += 1
            super().load_state_dict(state_dict)

    net = torch.nn.Linear(3, 1)
    own = Own(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2)
    loop = loops.EDLLoop(model=net, optimizer=own, loader=loader, global_batch=8)
    loop.run(lambda: loop.prepare(Accelerator(cpu=True)))
    assert own.loaded == 1


def test_models_of_a_world_of_one_are_wrapped_in_the_next_world(loops: Any) -> None:
    """On a GPU alone Accelerate marks the models themselves, and returns marked ones as they are."""
    from accelerate import Accelerator

    critic = torch.nn.Linear(3, 1)
    made = Training(loops, critic=critic)
    for model in (made.net, critic):
        vars(model)["_is_accelerate_prepared"] = True

    def train() -> tuple[Any, Any]:
        accelerator = Accelerator(cpu=True)
        return made.loop.prepare(accelerator)[0], accelerator.prepare(critic)

    for model in made.loop.run(train):
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)


def test_with_save_every_the_end_is_saved(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = saved_boundaries(monkeypatch)
    made = Training(loops, save_every=4)
    made.loop.run(made.train)
    assert [step for step, save in enumerate(saved, 1) if save] == [4, 8, 9]


def test_a_loop_that_has_finished_trains_no_more(loops: Any) -> None:
    made = Training(loops)
    made.loop.run(made.train)
    before = made.result()
    made.loop.run(made.train)  # as in a world after the last one
    assert made.result() == before


def test_an_accelerator_that_cannot_be_continued_is_refused(loops: Any) -> None:
    from accelerate.utils import DataLoaderConfiguration

    made = Training(loops)
    options = {"dataloader_config": DataLoaderConfiguration(split_batches=True)}
    with pytest.raises(StateError, match="EDLLoop cannot continue a loop with split_batches=True"):
        made.loop.run(lambda: made.train(**options))


def test_an_accelerator_without_the_other_workers_is_refused(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    made = Training(loops)
    loops.forget_world()
    accelerator = Accelerator()
    monkeypatch.setattr(edl.torch, "context", lambda: SimpleNamespace(world_size=2))
    with pytest.raises(StateError, match=r"found 1 process\(es\) .* has 2 workers: .* Accelerator\(cpu=True\)"):
        made.loop.prepare(accelerator)


def test_an_accelerator_of_another_world_is_refused(loops: Any) -> None:
    from accelerate import Accelerator

    made = Training(loops)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(StateError, match=r"created before this world: create it in the function"):
        made.loop.run(lambda: made.loop.prepare(accelerator))


def test_epochs_need_a_prepared_loader(loops: Any) -> None:
    made = Training(loops)
    with pytest.raises(StateError, match=r"epochs\(\) was called before EDLLoop.prepare"):
        made.loop.run(lambda: next(made.loop.epochs(1)))


def test_without_a_launcher_the_loop_runs_once(
    loops: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Training(loops)
    expected.loop.run(expected.train)
    leave_group(loops)
    monkeypatch.setattr(loops, "is_worker", lambda _: False)
    made = Training(loops)
    assert "EDLLoop keeps nothing, because edl-run has not started this process" in capsys.readouterr().err
    made.loop.run(made.train)
    assert made.result()[:3] == expected.result()[:3]


@pytest.mark.parametrize(("name", "value"), [("global_batch", -1), ("copy_every", 0), ("save_every", -5)])
def test_wrong_arguments_are_refused(loops: Any, name: str, value: int) -> None:
    with pytest.raises(StateError, match=rf"EDLLoop\({name}={value}\): it must be at least"):
        loops.EDLLoop(model=None, optimizer=None, loader=None, **{name: value})
