"""``edl.parallel`` leaves out the broadcast of parameters only where all workers have restored them."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._C._distributed_c10d import HashStore  # noqa: E402

from edl.errors import StateError  # noqa: E402
from edl.torch import ddp  # noqa: E402
from edl.torch.accumulation import TorchModel  # noqa: E402
from edl.torch.state import State  # noqa: E402
from edl.worker import session as sessions  # noqa: E402
from edl.worker.session import Session  # noqa: E402

pytestmark = pytest.mark.torch


class OfItsOwn(torch.nn.Linear):  # type: ignore[misc,name-defined]
    edl_per_rank = True


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    made = Session(None, {})
    monkeypatch.setattr(sessions, "_current", made)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield made
    gc.collect()  # wrappers should not outlive their group
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("restored", [False, True])
def test_what_is_not_in_the_state_is_sent_from_the_first(
    session: Session, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    layer = torch.nn.Linear
    whole, other, own = torch.nn.Sequential(layer(2, 3), layer(3, 2)), layer(2, 2), OfItsOwn(2, 2)
    weight = torch.nn.Parameter(torch.ones(2))
    bare, beside = torch.nn.ParameterList([weight]), torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))])
    session.state = State(model=whole, optimizer=torch.optim.SGD(whole.parameters()), own=own, weight=weight)
    monkeypatch.setattr(ddp, "_equal", restored)
    sent: list[Any] = []
    monkeypatch.setattr(
        "torch.nn.parallel.distributed._sync_module_states", lambda *args, module, **options: sent.append(module)
    )
    models = [whole, whole[0], bare, other, torch.nn.Sequential(whole[0], other), own, beside]
    for model in models:
        ddp.parallel(model)
    assert [id(one) for one in sent] == [id(one) for one in (models[3:] if restored else models)]
    ddp.parallel(other, init_sync=False)
    assert len(sent) == (4 if restored else 7), "the script's word counts"


def test_gradients_of_an_interrupted_step_do_not_last_in_a_model_outside_of_the_state(session: Session) -> None:
    kept, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    session.state = State(model=kept)
    for model in (kept, other):
        model(torch.ones(1, 2)).sum().backward()
    wrapper = ddp.parallel(other)
    wrapper(torch.ones(1, 2)).sum().backward()
    assert other.weight.grad.tolist() == [[1.0] * 2] * 2
    ddp.parallel(kept)
    assert kept.weight.grad is not None, "restoring clears these"


def test_a_parameter_that_is_trained_from_now_on_has_to_be_wrapped_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker would train it on its own."""
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "__init__", _without_arming())
    monkeypatch.setattr(ddp, "_armed", weakref.WeakSet())
    ddp.arm(begins_from_nothing=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    state, wrappers = State(model=model), [ddp.parallel(model)]

    def commit(workers: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(torch.distributed.ProcessGroup, "size", lambda self: workers)
            state._check_equal("commit()")

    commit(2)
    model[0].bias.requires_grad_(True)
    commit(1)
    with pytest.raises(StateError, match=r"commit\(\): 0.bias is trained, and was frozen .* wrap the model again"):
        commit(2)
    wrappers.append(ddp.parallel(model))
    commit(2)
    model[0].weight.requires_grad_(True)
    with pytest.raises(StateError, match="weight is trained"):
        commit(2)
    ddp.disarm(1)  # before the group ends: the errors keep the wrappers for a while


def _without_arming() -> Any:
    original = torch.nn.parallel.DistributedDataParallel.__init__
    return getattr(original, "__wrapped__", original)


@pytest.mark.parametrize("name", ["mixed_precision", "delay_all_reduce_named_params"])
def test_options_whose_hooks_outlive_the_world_are_refused(name: str) -> None:
    with pytest.raises(StateError, match=rf"edl.parallel\({name}=…\)"):
        ddp.parallel(torch.nn.Linear(2, 2), **{name: []})


@pytest.mark.skipif(
    "forward_sync_buffers" not in inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters,
    reason="this torch has no such option",
)
def test_buffers_that_no_state_keeps_are_sent_where_forward_passes_do_not(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(ddp, "_equal", True)
    monkeypatch.setattr(
        "torch.nn.parallel.distributed._sync_module_states", lambda *args, module, **options: sent.append(module)
    )
    model = torch.nn.Linear(2, 2)
    session.state = State(model=model)
    ddp.parallel(model, forward_sync_buffers=False)
    model.register_buffer("noise", torch.ones(2), persistent=False)
    ddp.parallel(model)
    assert not sent
    ddp.parallel(model, forward_sync_buffers=False)
    assert sent == [model]


def test_accumulate_finds_the_wrapper_inside_a_compiled_model(session: Session) -> None:
    wrapper = ddp.parallel(torch.nn.Linear(2, 2))
    model = TorchModel(torch.compile(wrapper, backend="eager"))
    assert model.plain is wrapper.module
    with model.apart():
        assert not wrapper.require_backward_grad_sync
