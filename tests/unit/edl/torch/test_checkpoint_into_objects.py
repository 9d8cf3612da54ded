"""Loading a sharded checkpoint into objects, optimizers and values, and refusals before anything changes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from edl.errors import CheckpointError, StateError  # noqa: E402
from edl.torch import loading, recut, sharded  # noqa: E402
from edl.torch.checkpoint import load_checkpoint  # noqa: E402
from edl.torch.recut import Folder, load_sharded  # noqa: E402
from edl.torch.sharded import DTensor, capture, load_local_parts  # noqa: E402
from edl.torch.state import State  # noqa: E402
from tests.support.sharded_tools import (  # noqa: E402
    ARRAYS,
    Model,
    Replicate,
    assert_same,
    cut,
    keep,
    last_dimension,
    one_dimension,
    optimizer_of,
    own,
    playing,
    write,
)

pytestmark = pytest.mark.torch


# --- models that do not keep the tensors that they have ---------------------------------------------------------------


def _of_hook(model: Any, change: Callable[[Any], Any]) -> None:
    def hook(module: Any, kept: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in kept if isinstance(kept[key], torch.Tensor)]:
            kept[key] = change(kept[key])

    model._register_state_dict_hook(hook)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a change to a tensor, or to the local part of a DTensor without DTensor operations."""
    if not isinstance(value, DTensor):
        return change(value)
    local, mesh, shape = change(value.to_local().detach()), value.device_mesh, value.shape
    return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=shape, stride=value.stride())


def half(model: Any) -> None:
    _of_hook(model, lambda value: _mapped(value, lambda one: one.half() if one.is_floating_point() else one.clone()))


def cloning(model: Any) -> None:
    _of_hook(model, lambda value: _mapped(value, torch.clone))


def scaled(model: Any) -> None:
    """Save doubled values, and halve copies of them when loading."""
    _of_hook(model, lambda value: _mapped(value, lambda one: one * 2))

    def hook(kept: dict[str, Any], *_: Any) -> None:
        for key in [key for key in kept if isinstance(kept[key], torch.Tensor)]:
            kept[key] = _mapped(kept[key], lambda one: (one / 2).to(one.dtype))

    model._register_load_state_dict_pre_hook(hook)


class Copying(Model):
    """Copies tensors when saving and loading, as torchmetrics does."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in [key for key in destination if isinstance(destination[key], torch.Tensor)]:
            destination[key] = _mapped(destination[key], torch.clone)

    def _load_from_state_dict(self, kept: Any, prefix: str, *rest: Any) -> None:
        tensors: dict[str, Any] = {**self._parameters, **self._buffers}
        for name, mine in tensors.items():
            with torch.no_grad():
                theirs = kept[prefix + name]
                cut = isinstance(theirs, DTensor)
                (mine.to_local() if cut else mine).copy_(theirs.to_local() if cut else theirs)
        self.extra = kept[f"{prefix}_extra_state"]


@pytest.mark.parametrize("kind", [half, cloning, scaled, Copying])
def test_weights_come_back_where_a_state_dict_holds_copies(tmp_path: Path, kind: Any) -> None:
    def built(*, trained: bool) -> Any:
        model = (kind if kind is Copying else Model)(one_dimension, trained=trained)
        if kind is not Copying:
            kind(model)
        return model

    workers: list[Any] = []
    for rank in range(2):
        with playing(rank, 2):
            kept = built(trained=True)
            parts = own(capture("model", kept, {}))
            workers.append(({"model": parts}, {}))
            model = built(trained=False)
            load_local_parts("model", model, parts, own)
            assert_same(list(model.parameters()), list(kept.parameters()))
            assert_same((model.seen, model.extra), (kept.seen, kept.extra))
    folder = write(ARRAYS, tmp_path, workers)[1]
    for world in (2, 3):
        with playing(1, world):
            model, right = built(trained=False), built(trained=True)
            load_sharded({"model": model}, Folder(str(folder)))
            assert_same(list(model.parameters()), list(right.parameters()))
            assert_same((model.seen, model.extra), (right.seen, right.extra))


def test_a_name_that_nobody_takes_is_no_success(tmp_path: Path) -> None:
    def renaming(model: Any) -> Any:
        def hook(module: Any, kept: dict[str, Any], prefix: str, metadata: Any) -> None:
            kept["other"] = kept.pop("w0")

        model._register_state_dict_hook(hook)
        return model

    with playing(0, 1):
        parts = own(capture("model", renaming(Model(one_dimension, trained=True)), {}))
        with pytest.raises(
            ValueError, match=r"state_dict\(\) has \['other'\], which load_state_dict\(\) does not take"
        ):
            load_local_parts("model", renaming(Model(one_dimension, trained=False)), parts, own)
        folder = write(ARRAYS, tmp_path, [({"model": parts}, {})])[1]
        with pytest.raises(ValueError, match="other"):
            load_sharded({"model": renaming(Model(one_dimension, trained=False))}, Folder(str(folder)))


def _without_w1(model: Any) -> None:
    def hook(module: Any, kept: dict[str, Any], prefix: str, metadata: Any) -> None:
        del kept["w1"]

    model._register_state_dict_hook(hook)


def test_what_a_hook_takes_out_may_be_missing_and_a_part_in_place_of_the_whole_is_refused_at_the_commit() -> None:
    with playing(1, 2):
        model = Model(one_dimension, trained=True)
        _without_w1(model)
        parts = own(capture("model", model, {}))
        again = Model(one_dimension, trained=False)
        _without_w1(again)
        load_local_parts("model", again, parts, own)
        assert_same(again.w0, model.w0)
        assert (again.w1.to_local() == -1).all()
        _of_hook(model, lambda value: value.to_local() if isinstance(value, DTensor) else value)
        with pytest.raises(StateError, match=r"state\.model: state_dict\(\) has w0 as \(3, 5\), .* of \(7, 5\)"):
            capture("model", model, {})


def test_a_part_of_another_place_is_not_taken() -> None:
    """It may have the right shape."""
    with playing(0, 2):
        parts = own(capture("model", Model(last_dimension, trained=True), {}))["w2"]
    with playing(1, 2):
        model = Model(last_dimension, trained=False)
        mixed = {**own(capture("model", model, {})), "w2": parts}
        with pytest.raises(
            ValueError, match=r"w2: saved as the part \(4, 3, 1\) at \(0, 0, 0\), now .* at \(0, 0, 1\)"
        ):
            load_local_parts("model", model, mixed, own)


def test_dtensors_are_made_of_what_has_been_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator they are copies of it."""
    folder = keep(tmp_path, 2, one_dimension)
    made: list[Any] = []
    like = sharded.like

    def noted(live: Any, part: Any) -> Any:
        made.append(part.clone())
        return like(live, part)

    monkeypatch.setattr(recut, "like", noted)
    with playing(0, 2):
        model = Model(one_dimension, trained=False)
        optimizer = optimizer_of(model, trained=False)
        load_sharded({"model": model, "optimizer": optimizer}, Folder(str(folder)))
        assert len(made) == 6 and all(float(one.sum()) for one in made)


def test_what_fully_shard_and_activation_checkpointing_make_is_filled_in_place() -> None:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # up to torch 2.5
        from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if torch.__version__.startswith("2.4."):
        pytest.skip("torch 2.4 runs fully_shard on CUDA alone")
    with playing(1, 2):
        inner = torch.nn.Sequential(torch.nn.Linear(4, 4), checkpoint_wrapper(torch.nn.Linear(4, 4)))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(inner[1], mesh=mesh)
        model = fully_shard(inner, mesh=mesh)
        assert loading.places(model).keys() == model.state_dict().keys()
        parts = own(capture("model", model, {}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(-1)
        copied: list[Any] = []

        def copy(value: Any) -> Any:
            copied.append(value)
            return value

        load_local_parts("model", model, parts, copy)
        assert not copied
        assert_same(own(capture("model", model, {})), parts)


# --- containers -------------------------------------------------------------------------------------------------------


def containers() -> dict[str, Any]:
    return {
        "counter": Counter(a=2),
        "default": defaultdict(list, {"x": [torch.ones(2)]}),
        "ordered": OrderedDict([(2, torch.ones(1)), (1, 0)]),
        "queue": deque([torch.ones(2), (torch.zeros(1), {"y": 1})], 5),
    }


def assert_containers(found: Any) -> None:
    right = containers()
    assert_same(found, right)
    for key, value in right.items():
        assert type(found[key]) is type(value), key
    assert (found["default"].default_factory, found["queue"].maxlen) == (list, 5)
    assert_same(found["queue"][0], right["queue"][0])
    assert_same(found["queue"][1], right["queue"][1])


class Holder:
    """An object of the script's own."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


def test_containers_come_back_as_they_were(tmp_path: Path) -> None:
    workers: list[Any] = []
    for rank in range(2):
        with playing(rank, 2):
            kept = {**containers(), "cut": deque([one_dimension(torch.arange(5.0))])}
            parts = own(capture("holder", Holder(kept), {}))
            holder = Holder({"cut": deque([one_dimension(torch.zeros(5))])})
            load_local_parts("holder", holder, parts, own)
            assert_same(holder.kept.pop("cut")[0], one_dimension(torch.arange(5.0)))
            assert_containers(holder.kept)
            workers.append(({"holder": parts}, {"value": containers()}))
    folder = write(ARRAYS, tmp_path, workers)[1]
    for world in (2, 3):
        with playing(1, world):
            holder = Holder({"cut": deque([one_dimension(torch.zeros(5))])})
            _, values = load_sharded({"holder": holder, "value": None}, Folder(str(folder)))
            assert_same(holder.kept.pop("cut")[0], one_dimension(torch.arange(5.0)))
            assert_containers(holder.kept)
            assert_containers(values["value"])
    found = load_checkpoint(folder)
    assert_same(found["holder"].pop("cut")[0], torch.arange(5.0))
    assert_containers(found["holder"])
    assert_containers(found["value"])


def test_containers_come_out_of_a_replicated_checkpoint_as_they_were(tmp_path: Path) -> None:
    found = load_checkpoint(write(ARRAYS, tmp_path, [({"holder": containers()}, {"value": containers()})])[1])
    assert_containers(found["holder"])
    assert_containers(found["value"])


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("d", lambda: one_dimension(torch.ones(9)), r"d of model\.w1 is a sharded tensor of shape \(9,\), .* \(3,\)"),
        (
            "old_dirs",
            lambda: [one_dimension(torch.ones(3))],
            r"old_dirs of model\.w1 is a sharded tensor inside another object",
        ),
        (
            "turned",
            lambda: cut(torch.ones(3), init_device_mesh("cpu", (2,)), [Replicate()]),
            "distributed in another way",
        ),
    ],
)
def test_state_of_an_optimizer_that_could_not_come_back_is_refused_at_the_first_commit(
    key: str, value: Callable[[], Any], why: str
) -> None:
    """LBFGS has the first two."""
    with playing(0, 2):
        model = Model(one_dimension, trained=True)
        optimizer = optimizer_of(model, trained=True)
        optimizer.state[model.w1][key] = value()
        with pytest.raises(StateError, match=rf"state\.optimizer: .*{why}.*cannot be kept by a sharded State: use"):
            capture("optimizer", optimizer, {"model": model, "optimizer": optimizer})


def test_a_sharded_tensor_among_the_options_of_an_optimizer_is_refused_too() -> None:
    with playing(0, 2):
        model = Model(one_dimension, trained=True)
        optimizer = optimizer_of(model, trained=True)
        optimizer.param_groups[0]["mask"] = one_dimension(torch.ones(7))
        with pytest.raises(StateError, match="param_groups of the optimizer as a whole"):
            capture("optimizer", optimizer, {"model": model})


def test_what_an_optimizer_keeps_beside_its_parameters_comes_back(tmp_path: Path) -> None:
    workers: list[Any] = []
    for rank in range(2):
        with playing(rank, 2):
            model = Model(one_dimension, trained=True)
            optimizer = optimizer_of(model, trained=True)
            optimizer.state["all"] = {"seen": torch.tensor(4.0)}
            objects = {"model": model, "optimizer": optimizer}
            parts = {name: own(capture(name, obj, objects)) for name, obj in objects.items()}
            optimizer.state["all"] = {}
            load_local_parts("optimizer", optimizer, own(parts["optimizer"]), own)
            assert optimizer.state["all"]["seen"] == 4
            workers.append((parts, {}))
    folder = write(ARRAYS, tmp_path, workers)[1]
    with playing(0, 3):
        model = Model(one_dimension, trained=False)
        optimizer = optimizer_of(model, trained=False)
        load_sharded({"model": model, "optimizer": optimizer}, Folder(str(folder)))
        assert optimizer.state["all"]["seen"] == 4
        assert_same(model.w0, Model(one_dimension, trained=True).w0)


# --- as State does it -------------------------------------------------------------------------------------------------


def test_values_are_taken_as_from_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A leaf that is trained is filled, others are as the script's; one that is gone is told."""
    values = {"scale": torch.tensor([3.0]), "gone": 1, "epoch": 4}
    folder = write(ARRAYS, tmp_path, [({}, values)])[1]
    with playing(0, 1):
        scale = torch.zeros(1, requires_grad=True)
        state = State(sharded=True, scale=scale, epoch=0, new=7)
        state._restore_sharded(str(folder))
        assert state.scale is scale and float(scale.detach()) == 3
        assert (state.epoch, state.new) == (4, 7)
        assert "that this script's state lacks: gone" in capsys.readouterr().err
        other = State(sharded=True, scale=torch.zeros(2, requires_grad=True))
        with pytest.raises(CheckpointError, match=r"state\.scale does not fit commit 1 \(era 1\)"):
            other._restore_sharded(str(folder))


def test_an_object_that_is_gone_or_new_is_named(tmp_path: Path) -> None:
    part = ({"model": {"weight": torch.ones(1)}, "ema": {"x": 1}}, {"epoch": 1})
    folder = write(ARRAYS, tmp_path, [part, part])[1]
    for world in (1, 2):
        with playing(0, world):
            with pytest.raises(
                CheckpointError, match=r"commit 1 \(era 1\) holds ema, which this script's state does not"
            ):
                State(sharded=True, model=Holder({}), epoch=0)._restore_sharded(str(folder))
            with pytest.raises(CheckpointError, match=r"commit 1 \(era 1\) does not contain more, which this script's"):
                State(sharded=True, model=Holder({}), ema=Holder({}), more=Holder({}))._restore_sharded(str(folder))
            with pytest.raises(CheckpointError, match="does not contain epoch"):
                State(sharded=True, model=Holder({}), ema=Holder({}), epoch=Holder({}))._restore_sharded(str(folder))


class Failing(Holder):
    def load_state_dict(self, state: Any) -> None:
        raise self.kept


def test_errors_while_an_object_is_restored_name_it_and_the_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(ARRAYS, tmp_path, [({"holder": {"x": torch.ones(1)}}, {})])[1]
    with playing(0, 1):
        failing = State(sharded=True, holder=Failing(KeyError("y")))
        with pytest.raises(CheckpointError, match=r"state\.holder does not fit commit 1 \(era 1\).*KeyError: 'y'"):
            failing._restore_sharded(str(folder))
        with pytest.raises(StateError, match=r"state\.holder cannot load its saved value of commit 1 .*: no"):
            State(sharded=True, holder=Failing(StateError("no")))._restore_sharded(str(folder))
        with pytest.raises(MemoryError):
            State(sharded=True, holder=Failing(MemoryError()))._restore_sharded(str(folder))
        assert "out of memory while restoring state.holder from commit 1" in capsys.readouterr().err
