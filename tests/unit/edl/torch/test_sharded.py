"""Sharded states: what each worker keeps, and that any number of workers gets exactly that back.

One process plays all workers, one after another, in a group that exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402

from edl.errors import CheckpointError, StateError  # noqa: E402
from edl.torch.checkpoint import load_checkpoint  # noqa: E402
from edl.torch.recut import Folder, load_sharded  # noqa: E402
from edl.torch.sharded import DTensor, capture, load_local_parts  # noqa: E402
from edl.torch.state import State  # noqa: E402
from edl.worker.modes import CHANGED  # noqa: E402
from edl.worker.verify import Difference, Held  # noqa: E402
from tests.support.sharded_tools import (  # noqa: E402
    ARRAYS,
    Model,
    Partial,
    Shard,
    Spreading,
    assert_same,
    filled,
    hybrid,
    keep,
    last_dimension,
    one_dimension,
    optimizer_of,
    own,
    playing,
    two_dimensions,
    write,
)
from tests.support.verifying import together  # noqa: E402
from tests.torch_release import since  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.slow
@pytest.mark.parametrize("reading", [one_dimension, last_dimension, two_dimensions])
@pytest.mark.parametrize("writing", [one_dimension, two_dimensions, hybrid])
@pytest.mark.parametrize("world", [2, 4, 6])
def test_any_number_of_workers_gets_what_four_have_kept(
    tmp_path: Path, world: int, writing: Spreading, reading: Spreading
) -> None:
    folder = keep(tmp_path, 4, writing)
    for rank in range(world):
        with playing(rank, world):
            model, right = Model(reading, trained=False), Model(reading, trained=True)
            optimizer, right_optimizer = optimizer_of(model, trained=False), optimizer_of(right, trained=True)
            objects = {"model": model, "optimizer": optimizer, "epoch": 0, "rank": 0}
            _, values = load_sharded(objects, Folder(str(folder)))
            assert_same(model.state_dict(), right.state_dict())
            assert_same(optimizer.state_dict(), right_optimizer.state_dict())
            assert values == {"epoch": 4, "rank": rank if world == 4 else 0}


def test_from_memory_a_worker_gets_its_own_part_back_and_whatever_a_module_keeps_beside_its_tensors() -> None:
    with playing(1, 4):
        kept = Model(one_dimension, trained=True)
        objects = {"model": kept, "optimizer": optimizer_of(kept, trained=True)}
        parts = {name: own(capture(name, obj, objects)) for name, obj in objects.items()}
        model = Model(one_dimension, trained=False)
        optimizer = optimizer_of(model, trained=False)
        load_local_parts("model", model, parts["model"], own)
        load_local_parts("optimizer", optimizer, parts["optimizer"], own)
        assert_same(model.state_dict(), kept.state_dict())
        assert_same(optimizer.state_dict(), objects["optimizer"].state_dict())


class Average:
    """An object of the script's own with sharded tensors."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Places:
    """An object of which every worker has entries of its own."""

    edl_union = True

    def __init__(self, **entries: int) -> None:
        self.entries = entries

    def state_dict(self) -> dict[str, Any]:
        return {"entries": self.entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state["entries"]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_in_a_world_of_another_size_each_worker_gets_the_entries_of_all(tmp_path: Path, world: int) -> None:
    kept = [Places(**{f"of{rank}": rank}) for rank in range(3)]
    _, folder = write(ARRAYS, tmp_path, [({"places": capture("places", one, {"places": one})}, {}) for one in kept])
    for rank in range(world):
        with playing(rank, world):
            places = Places()
            load_sharded({"places": places}, Folder(str(folder)))
            assert places.entries == ({f"of{rank}": rank} if world == 3 else {"of0": 0, "of1": 1, "of2": 2})


def test_other_objects_may_hold_sharded_tensors(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    workers: list[tuple[dict[str, Any], dict[str, Any]]] = []
    parts: Any = None
    for rank in range(2):
        with playing(rank, 2):
            average = Average(one_dimension(whole))
            parts = own(capture("average", average, {}))
            workers.append(({"average": parts}, {}))
            average.value = filled(average.value, 0.0)
            load_local_parts("average", average, parts, own)
            assert_same(average.value, one_dimension(whole))
    folder = write(ARRAYS, tmp_path, workers)[1]
    with playing(2, 3):
        average = Average(filled(one_dimension(whole), 0.0))
        load_sharded({"average": average}, Folder(str(folder)))
        assert_same(average.value, one_dimension(whole))
        with pytest.raises(ValueError, match=r"state\.average\.value was a sharded tensor"):
            load_local_parts("average", Average(torch.ones(3)), parts, own)


def total(model: Model) -> Any:
    return torch.stack([one.full_tensor().sum() for one in model.parameters()]).sum()  # type: ignore[attr-defined]


def test_what_an_interrupted_step_left_does_not_survive_a_restore_from_parts(tmp_path: Path) -> None:
    with playing(0, 1):
        model, scaler = Model(one_dimension, trained=True), torch.amp.GradScaler("cpu")
        objects = {"model": model, "scaler": scaler}
        _, folder = write(
            ARRAYS, tmp_path, [({name: capture(name, obj, objects) for name, obj in objects.items()}, {})]
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler.scale(total(model)).backward()
        scaler.unscale_(optimizer)  # and the step does not follow
        State(sharded=True, model=model, scaler=scaler)._restore_sharded(str(folder))
        assert all(one.grad is None for one in model.parameters())
        scaler.scale(total(model)).backward()
        scaler.unscale_(optimizer)


def stages(folder: Path, same_names: bool, *, value: Callable[[int], float] = float) -> Path:
    """Two stages of a pipeline, each with a layer of its own."""
    workers = []
    for rank in range(2):
        with playing(rank, 2):
            model = stage(rank, same_names, value(rank + 1))
            objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)}
            for parameter in model.parameters():
                objects["optimizer"].state[parameter] = {
                    "momentum_buffer": torch.full_like(parameter, 10.0 * (rank + 1))
                }
            workers.append(({name: own(capture(name, obj, objects)) for name, obj in objects.items()}, {"stage": rank}))
    return write(ARRAYS, folder, workers)[1]


def stage(number: int, same_names: bool, value: float) -> Any:
    name = "layer" if same_names else f"layer{number}"
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False)})
    torch.nn.init.constant_(model[name].weight, value)
    return model


@pytest.mark.parametrize("same_names", [False, True])
def test_each_stage_of_a_pipeline_gets_its_own_back(tmp_path: Path, same_names: bool) -> None:
    folder = stages(tmp_path, same_names)
    for rank in range(2):
        with playing(rank, 2):
            model = stage(rank, same_names, 0.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            _, values = load_sharded({"model": model, "optimizer": optimizer, "stage": -1}, Folder(str(folder)))
            (parameter,) = model.parameters()
            assert_same(parameter.detach(), torch.full((2, 2), rank + 1.0))
            assert_same(optimizer.state[parameter]["momentum_buffer"], torch.full((2, 2), 10.0 * (rank + 1)))
            assert values == {"stage": rank}


def test_stages_that_are_told_apart_by_their_names_may_be_divided_in_another_way(tmp_path: Path) -> None:
    folder = stages(tmp_path, same_names=False)
    with playing(0, 1):
        model = torch.nn.ModuleDict({**stage(1, False, 0.0), **stage(0, False, 0.0)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        load_sharded({"model": model, "optimizer": optimizer, "stage": -1}, Folder(str(folder)))
        assert [float(one.detach().sum()) for one in model.parameters()] == [8.0, 4.0]
        assert [float(optimizer.state[one]["momentum_buffer"].sum()) for one in model.parameters()] == [80.0, 40.0]


@pytest.mark.parametrize("world", [1, 2])
def test_what_each_stage_has_unfrozen_is_known_to_all_at_another_size(tmp_path: Path, world: int) -> None:
    kept = [{"run": 1, "parameters": {f"model.layer{rank}.weight": True}} for rank in range(2)]
    folder = write(ARRAYS, tmp_path, [({}, {CHANGED: one}) for one in kept])[1]
    with playing(world - 1, world):
        _, values = load_sharded({CHANGED: {}}, Folder(str(folder)))
    both = {"run": 1, "parameters": {"model.layer0.weight": True, "model.layer1.weight": True}}
    assert values[CHANGED] == (both if world == 1 else kept[1])


def test_stages_may_be_elsewhere_in_a_world_of_the_same_size(tmp_path: Path) -> None:
    folder = stages(tmp_path, same_names=False)
    for rank in range(2):
        with playing(rank, 2):
            model = stage(1 - rank, False, 0.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            load_sharded({"model": model, "optimizer": optimizer, "stage": -1}, Folder(str(folder)))
            (parameter,) = model.parameters()
            assert_same(parameter.detach(), torch.full((2, 2), 2.0 - rank))
            assert_same(optimizer.state[parameter]["momentum_buffer"], torch.full((2, 2), 20.0 - 10.0 * rank))


def test_stages_of_the_same_names_are_never_taken_for_one_another(tmp_path: Path) -> None:
    folder = stages(tmp_path, same_names=True)
    refusing = []
    for rank in range(3):
        with playing(rank, 3):
            try:
                load_sharded({"model": stage(0, True, 0.0)}, Folder(str(folder)))
            except CheckpointError as error:
                assert "model.layer.weight differs between workers 0 and 1" in str(error)
                refusing.append(rank)
    assert len(refusing) == 1, "each copy is read by one worker, and without that one there is no world"
    again = stages(tmp_path / "again", same_names=True, value=lambda _: 3.0)
    with playing(2, 3):
        model = stage(0, True, 0.0)
        load_sharded({"model": model}, Folder(str(again)))
        assert_same(model["layer"].weight.detach(), torch.full((2, 2), 3.0))


def test_stages_of_a_pipeline_are_not_taken_for_copies_that_differ() -> None:
    """Else the job would end at the first change of its world."""

    def held(rank: int, value: float) -> Held:
        with playing(rank, 4):
            model = stage(rank // 2, False, value)
            optimizer = torch.optim.SGD(
                [{"params": [one], "lr": 0.1 * (rank // 2 + 1)} for one in model.parameters()], momentum=0.5
            )
            for parameter in model.parameters():
                optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, value)}
            return State(sharded=True, model=model, optimizer=optimizer, epoch=0)._held()

    alike = [held(0, 1.0), held(1, 1.0), held(2, 2.0), held(3, 2.0)]
    assert together(ARRAYS.digest, *alike) == [[]] * 4
    differing = together(ARRAYS.digest, *alike[:3], held(3, 3.0))
    paths = ["model.layer1.weight", "optimizer.state.model.layer1.weight.momentum_buffer"]
    assert differing == [[Difference(path, (2, 3), strict=True) for path in paths]] * 4


@pytest.mark.parametrize("world", [4, 2])
def test_a_worker_looks_at_every_byte_that_it_uses(tmp_path: Path, world: int) -> None:
    folder = keep(tmp_path, 4, one_dimension)
    path = folder / "state-00001-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with playing(1 if world == 4 else 0, world):
        model = Model(one_dimension, trained=False)
        with pytest.raises(
            CheckpointError, match=r"checksum of .*state-00001-of-00004\.safetensors from byte 0 on differs"
        ):
            load_sharded({"model": model}, Folder(str(folder)))
        assert (model.w0.to_local() == -1).all(), "nothing of it is used"


def test_a_model_with_other_layers_is_named(tmp_path: Path) -> None:
    folder = keep(tmp_path, 4, one_dimension)
    with playing(0, 2):
        other = torch.nn.Linear(2, 2)
        with pytest.raises(CheckpointError, match=r"state\.model does not fit .*weight.*which were not kept"):
            load_sharded({"model": other}, Folder(str(folder)))
        with pytest.raises(CheckpointError, match="does not contain ema"):
            load_sharded({"ema": other}, Folder(str(folder)))


def test_what_is_no_box_is_refused_at_the_first_commit() -> None:
    with playing(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        unreduced = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(StateError, match="not summed up yet"):
            capture("average", Average(unreduced), {})
        lone = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        with pytest.raises(StateError, match="needs its model in the same State"):
            capture("optimizer", lone, {})


def test_a_worker_outside_of_a_tensors_mesh_is_told() -> None:
    with playing(1, 2):
        other = DTensor.from_local(torch.ones(0), DeviceMesh("cpu", [0]), [Shard(0)], run_check=False)
        with pytest.raises(StateError, match="this worker is not in its mesh"):
            capture("average", Average(other), {})


def normalizing(checkpointed: bool, value: float) -> Any:
    """A model that uses one normalization in two places, perhaps with activation checkpointing."""
    norm = torch.nn.BatchNorm1d(2)
    norm.running_mean.fill_(value)
    layer = checkpoint_wrapper(norm) if checkpointed else norm
    return torch.nn.ModuleDict({"before": layer, "after": layer})


@pytest.mark.parametrize("later", [True, False])
def test_buffers_may_differ_wherever_they_are_and_activation_checkpointing_may_be_switched(
    tmp_path: Path, later: bool
) -> None:
    workers: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for rank in range(2):
        with playing(rank, 2):
            model = normalizing(not later, rank + 1.0)
            objects = {"model": model, "optimizer": optimizer_of(model, trained=True)}
            workers.append(({name: own(capture(name, obj, objects)) for name, obj in objects.items()}, {}))
    folder = write(ARRAYS, tmp_path, workers)[1]
    with playing(2, 3):
        model = normalizing(later, 0.0)
        optimizer = optimizer_of(model, trained=False)
        load_sharded({"model": model, "optimizer": optimizer}, Folder(str(folder)))
        assert model.state_dict()["after.running_mean"].tolist() == [1, 1]
        assert [optimizer.state[one]["exp_avg"].tolist() for one in model.parameters()] == [[7, 7], [0, 0]]


def test_a_part_of_an_offloaded_model_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``CPUOffloadPolicy``: the tensors of a mesh of GPUs are in the host's memory."""
    with playing(1, 2):
        model = Model(one_dimension, trained=True)
        parameters: list[Any] = list(model.parameters())
        optimizer = optimizer_of(model, trained=True)
        parts = own(capture("optimizer", optimizer, {"model": model, "optimizer": optimizer}))
        for parameter in parameters:
            monkeypatch.setattr(parameter.device_mesh, "_device_type", "meta")  # what is moved there is lost
        load_local_parts("optimizer", optimizer, parts, own)
        for number, parameter in enumerate(parameters):
            moment = optimizer.state[parameter]["exp_avg"]
            assert_same(moment.to_local(), parameter.to_local().detach() * (7.0 + number))
            assert (moment.shape, moment.placements) == (parameter.shape, parameter.placements)


@since("2.6", "FSDP2 works on GPUs alone")
def test_an_optimizer_may_come_before_its_model_which_is_whole_after_an_evaluation() -> None:
    from torch.distributed.fsdp import fully_shard

    with playing(0, 2):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.unshard()
        assert not any(isinstance(one, DTensor) for one in model.parameters())
        kept = capture("optimizer", optimizer, {"optimizer": optimizer, "model": model})
        assert kept["edl_names"] == ["model.0.weight", "model.0.bias"]


# --- from Python, without a job --------------------------------------------------------------------------------------


def test_a_program_reads_whole_tensors_and_plain_values(tmp_path: Path) -> None:
    folder = keep(tmp_path, 4, two_dimensions)
    right = Model(None, trained=True)
    for path in (folder, tmp_path):
        found = load_checkpoint(path)
        assert sorted(found) == ["epoch", "model", "noise", "optimizer", "rank"]
        assert_same(found["model"], dict(right.state_dict()))
        assert_same(found["optimizer"], optimizer_of(right, trained=True).state_dict())
        assert (found["epoch"], found["rank"], found["noise"].tolist()) == (4, 0, [0, 1, 2])
    assert load_checkpoint(folder, worker=3)["noise"].tolist() == [3, 4, 5]


def test_objects_of_a_program_take_theirs(tmp_path: Path) -> None:
    folder = keep(tmp_path, 4, one_dimension)
    model, right = Model(None, trained=False), Model(None, trained=True)
    optimizer = optimizer_of(model, trained=False)
    rest = load_checkpoint(folder, into={"model": model, "optimizer": optimizer})
    assert sorted(rest) == ["epoch", "noise", "rank"]
    assert_same(model.state_dict(), right.state_dict())
    assert_same(optimizer.state_dict(), optimizer_of(right, trained=True).state_dict())
    with pytest.raises(CheckpointError, match="does not contain ema; it has epoch, model"):
        load_checkpoint(folder, into={"ema": model})
    with pytest.raises(CheckpointError, match="model does not fit"):
        load_checkpoint(folder, into={"model": torch.nn.Linear(2, 2)})


def test_a_program_is_told_of_damage_and_gets_the_older_one(tmp_path: Path) -> None:
    state = ({"a": {"x": torch.ones(4)}}, {"epoch": 1})
    write(ARRAYS, tmp_path, [state, state], commit=1)
    newest = write(ARRAYS, tmp_path, [state, state], commit=2)[1]
    path = newest / "state-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.warns(RuntimeWarning, match=r"reading an older checkpoint: the checksum of .*commit-0000000002"):
        assert load_checkpoint(tmp_path)["epoch"] == 1
    with pytest.raises(CheckpointError, match="differs"):
        load_checkpoint(newest)
    with pytest.raises(CheckpointError, match="it holds none"):
        load_checkpoint(_empty(tmp_path))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def test_a_program_says_whose_when_workers_had_different_ones(tmp_path: Path) -> None:
    folder = stages(tmp_path, same_names=True)
    with pytest.raises(CheckpointError, match=r"model\.layer\.weight differs between workers 0 and 1"):
        load_checkpoint(folder)
    assert load_checkpoint(folder, worker=1)["model"]["layer.weight"].sum() == 8
    other = stages(tmp_path / "other", same_names=False)
    with pytest.raises(CheckpointError, match="pipeline stages"):
        load_checkpoint(other)
    assert list(load_checkpoint(other, worker=1)["model"]) == ["layer1.weight"]
    with pytest.raises(CheckpointError, match=r"worker=2: .* was written by 2 workers"):
        load_checkpoint(other, worker=2)


def test_a_program_gets_what_the_script_had_in_its_state(tmp_path: Path) -> None:
    """Without what edl keeps beside it."""
    values = {"epoch": 2, "_random_seed": "7", "_changed_modes": {"run": 1, "parameters": {"model.w": False}}}
    folder = write(ARRAYS, tmp_path, [({"model": {"w": torch.ones(2)}}, values)])[1]
    assert sorted(load_checkpoint(folder)) == ["epoch", "model"]


def test_values_cannot_be_loaded_into_values(tmp_path: Path) -> None:
    folder = write(ARRAYS, tmp_path, [({}, {"epoch": 2})])[1]
    with pytest.raises(CheckpointError, match=r"into: nothing can be loaded into epoch, .* the result holds"):
        load_checkpoint(folder, into={"epoch": 0})


def test_a_replicated_checkpoint_is_read_the_same_way(tmp_path: Path) -> None:
    right = Model(None, trained=True)
    folder = write(ARRAYS, tmp_path, [({"model": dict(right.state_dict())}, {"epoch": 2})])[1]
    model = Model(None, trained=False)
    assert load_checkpoint(folder, into={"model": model}) == {"epoch": 2}
    assert_same(model.state_dict(), right.state_dict())
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"the checksum of .*state\.safetensors differs"):
        load_checkpoint(folder)
