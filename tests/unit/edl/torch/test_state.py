"""State of modules, optimizers and generators is kept, and no part keeps the snapshot's memory alive."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402

from edl.errors import StateError  # noqa: E402
from edl.torch.loading import load_module, load_optimizer  # noqa: E402
from edl.torch.random_state import RandomState  # noqa: E402
from edl.torch.sharded import load_local_parts, local_parts  # noqa: E402
from edl.torch.state import State  # noqa: E402
from edl.worker import tree  # noqa: E402
from edl.worker.building import _Initial  # noqa: E402
from edl.worker.numbers import key  # noqa: E402
from tests.support.torch_memory import Memory  # noqa: E402

pytestmark = pytest.mark.torch


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def kept(value: Any) -> Any:
    return tree.map_arrays(value, is_tensor, lambda one: one.detach().clone())


def trained(kind: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).view(4, 3)).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("AdamW", {}), ("Adagrad", {})],
)
def test_loaded_training_goes_on_the_same_and_forgets_the_snapshot(kind: str, options: dict[str, Any]) -> None:
    model, optimizer = trained(getattr(torch.optim, kind), **options)
    snapshot = kept({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    pointers = [parameter.data_ptr() for parameter in model.parameters()]

    load_module(model, snapshot["model"], kept)
    load_optimizer(optimizer, snapshot["optimizer"], kept)
    tree.map_arrays(snapshot, is_tensor, lambda one: one.zero_())  # the memory is gone
    step(model, optimizer)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, wanted)


def test_tensors_in_lists_of_an_optimizer_are_copied_too() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0, 1.0]))
    optimizer = torch.optim.LBFGS([weight], max_iter=4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    snapshot = kept(optimizer.state_dict())
    load_optimizer(optimizer, snapshot, kept)
    tree.map_arrays(snapshot, is_tensor, lambda one: one.zero_())
    directions = optimizer.state_dict()["state"][0]["old_dirs"]
    assert directions and all(tensor.abs().sum() > 0 for tensor in directions)


def test_without_dtensors_local_parts_are_the_state_itself() -> None:
    model, optimizer = trained(torch.optim.Adam)
    snapshot = kept({"model": local_parts(model.state_dict()), "optimizer": local_parts(optimizer.state_dict())})
    step(model, optimizer)
    expected = model[0].weight.detach().clone()
    load_local_parts("model", model, snapshot["model"], kept)
    load_local_parts("optimizer", optimizer, snapshot["optimizer"], kept)
    step(model, optimizer)
    assert torch.equal(model[0].weight, expected)


def numbers() -> list[Any]:
    numpy = pytest.importorskip("numpy")
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand(2).tolist()]


def test_random_numbers_go_on_where_they_were() -> None:
    numbers()
    holder = RandomState()
    flat, leaves = tree.flatten(holder.state_dict(), lambda one: is_tensor(one) or type(one).__name__ == "ndarray")
    found = {name: value.copy() if hasattr(value, "copy") else value.clone() for name, value in leaves}
    expected = numbers()
    numbers()
    holder.load_state_dict(tree.unflatten(flat, lambda name, _: found[name]))
    assert numbers() == expected


def test_numbers_depend_on_the_key_alone() -> None:
    """The script's own generators too."""
    numpy = pytest.importorskip("numpy")
    own, theirs = torch.Generator(), numpy.random.default_rng(1)
    holder = RandomState(own, theirs)

    def drawn(key: bytes) -> list[Any]:
        holder.edl_reseed(key)
        return [*numbers(), torch.rand(2, generator=own).tolist(), theirs.random(2).tolist()]

    one, other = key("step", "seed", 0, 1), key("step", "seed", 0, 2)
    first = drawn(one)
    assert all(here != there for here, there in zip(first, drawn(other), strict=True))
    assert drawn(one) == first
    with pytest.raises(StateError, match="a list cannot be set"):
        RandomState([])


def test_the_seed_is_what_the_script_has_seeded_torch_with_or_what_it_says() -> None:
    seeds = []
    for number in (5, 6, 5):
        torch.manual_seed(number)
        torch.rand(3)
        random.random()  # seeded by nobody as a rule
        seeds.append(RandomState().edl_seed())
    assert seeds[0] == seeds[2] != seeds[1]
    said = RandomState(seed=3).edl_seed()
    torch.rand(3)
    assert RandomState(seed=3).edl_seed() == said != RandomState(seed=4).edl_seed()


def test_ranks_that_share_numbers_are_at_least_one() -> None:
    assert RandomState(model_parallel=2).edl_model_parallel == 2
    with pytest.raises(StateError, match=r"model_parallel=0"):
        RandomState(model_parallel=0)


def test_a_worker_that_has_not_trained_yet_knows_how_large_its_commits_will_be() -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    state = State(model=model, optimizer=optimizer, step=0)
    expected = state._expected_bytes()
    model(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    size = len(Memory(state).view)
    assert size <= expected + expected // 64 and expected <= 1.1 * size, "what a buffer of this size holds"
    assert State(build=lambda mesh: {}, step=0)._expected_bytes() == 0

    class Unready:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("there is no world yet")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    assert State(unready=Unready(), step=0)._expected_bytes() == 0


def test_an_interrupted_evaluation_does_not_reach_the_next_world() -> None:
    """Else a survivor trains on without dropout, and its DDP has other parameters than that of a new worker."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[1].eval()  # as the script has set it up
    model[2].weight.requires_grad_(False)
    state = State(model=model)
    state._model_modes.run(state._modes())
    model.eval().requires_grad_(False)
    state._model_modes.set_back(state._modes())
    assert [part.training for part in model.modules()] == [True, True, False, True]
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["2.weight"]
    model.eval()
    state._model_modes.run(state._modes())  # the script calls another function that trains
    state._model_modes.set_back(state._modes())
    assert not any(part.training for part in model.modules())


def test_beside_build_a_world_that_begins_from_nothing_forgets_the_interrupted_step() -> None:
    model, factor, scaler = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu")
    state = State(build=lambda mesh: {}, model=model, factor=factor, scaler=scaler)
    initial = _Initial(state)
    weight = model.weight.detach().clone()
    optimizer = torch.optim.SGD([*model.parameters(), factor], lr=0.1)
    scaler.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    initial.restore(state)
    assert torch.equal(model.weight, weight) and model.weight.grad is None
    assert state.factor is factor and factor.tolist() == [1, 1] and factor.grad is None
    scaler.unscale_(optimizer)


def test_parameters_of_a_module_with_activation_checkpointing_must_be_equal_as_well() -> None:
    held = State(model=torch.nn.Sequential(checkpoint_wrapper(torch.nn.BatchNorm1d(2))))._held()
    assert [path for path, _ in held.leaves if held.must_equal(path)] == ["model.0.weight", "model.0.bias"]
