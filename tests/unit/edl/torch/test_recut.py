"""What the optimizers and schedulers of a pipeline's stages get when its workers are divided in another way.

One process plays all workers, one after another, in a group that exchanges nothing. More of ``edl.torch.recut`` is in
``test_sharded.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edl.errors import CheckpointError  # noqa: E402
from edl.torch.recut import Folder, load_sharded  # noqa: E402
from edl.torch.sharded import capture  # noqa: E402
from tests.support.sharded_tools import ARRAYS, own, playing, write  # noqa: E402

pytestmark = pytest.mark.torch

Group = tuple[Any, Sequence[int]]
"""A rate, and the layers that are trained with it."""


def stage(*groups: Group, layers: Sequence[int] = (), scheduled: bool = False) -> dict[str, Any]:
    """A worker's part of a pipeline. ``layers``: more, which are not trained."""
    numbers = [*layers, *(number for _, trained in groups for number in trained)]
    model = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(2, 2, bias=False) for number in numbers})
    given = [{"params": [model[f"layer{one}"].weight for one in trained], "lr": rate} for rate, trained in groups]
    optimizer = torch.optim.SGD(given, lr=7.0, momentum=0.5)
    schedulers = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)} if scheduled else {}
    return {"model": model, **schedulers, "optimizer": optimizer}


def keep(folder: Path, *workers: dict[str, Any]) -> Folder:
    """What these workers save."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for rank, objects in enumerate(workers):
        with playing(rank, len(workers)):
            saved.append(({name: own(capture(name, obj, objects)) for name, obj in objects.items()}, {}))
    return Folder(str(write(ARRAYS, folder, saved)[1]))


def restored(folder: Folder, rank: int, world: int, objects: dict[str, Any]) -> dict[str, Any]:
    """One of a world's workers, after it has restored this."""
    with playing(rank, world):
        load_sharded(objects, folder)
    return objects


def rates(objects: dict[str, Any]) -> list[float]:
    return [round(float(group["lr"]), 3) for group in objects["optimizer"].param_groups]


def two_stages(folder: Path, **options: Any) -> Folder:
    return keep(folder, stage((0.1, [0]), **options), stage((0.2, [1]), **options))


@pytest.mark.parametrize("world", [4, 3, 2])
def test_the_options_of_a_group_are_those_of_its_own_stage(tmp_path: Path, world: int) -> None:
    """Also at the size that saved them, where a worker may have another stage now."""
    folder = two_stages(tmp_path)
    for rank in range(world):
        number = 1 - rank % 2
        objects = restored(folder, rank, world, stage((9.0, [number])))
        assert rates(objects) == [[0.1], [0.2]][number]
        assert objects["optimizer"].param_groups[0]["params"] == list(objects["model"].parameters())


@pytest.mark.parametrize("world", [4, 2])
def test_so_are_the_rates_of_a_scheduler(tmp_path: Path, world: int) -> None:
    folder = two_stages(tmp_path, scheduled=True)
    for rank in range(world):
        number = 1 - rank % 2
        objects = restored(folder, rank, world, stage((9.0, [number]), scheduled=True))
        objects["optimizer"].step()
        objects["scheduler"].step()
        assert rates(objects) == [[0.05], [0.1]][number]
        assert objects["scheduler"].base_lrs == [[0.1], [0.2]][number]


def test_stages_that_one_worker_has_now_keep_their_options_in_groups_of_their_own(tmp_path: Path) -> None:
    folder = keep(tmp_path, stage((0.1, [0]), (0.2, [1])), stage((0.3, [2]), (0.4, [3])))
    groups: list[Group] = [(9.0, [3]), (9.0, [2]), (9.0, [0]), (9.0, [1])]
    assert rates(restored(folder, 0, 1, stage(*groups))) == [0.4, 0.3, 0.1, 0.2]
    for rank, (_, layers) in enumerate(groups):
        expected = [0.1, 0.2, 0.3, 0.4][layers[0]]
        assert rates(restored(folder, rank, 4, stage(groups[rank]))) == [expected], "and a stage may be divided"


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_one_group_cannot_have_the_options_of_two_stages(tmp_path: Path, kind: Any) -> None:
    alike = keep(tmp_path / "alike", stage((kind(0.1), [0])), stage((kind(0.1), [1])))
    assert rates(restored(alike, 0, 1, stage((kind(9.0), [1, 0])))) == [0.1]
    differing = keep(tmp_path / "differing", stage((kind(0.1), [0])), stage((kind(0.2), [1])))
    why = (
        r"state\.optimizer: workers 1 and 0 of the checkpoint .* differ in lr, and one group now has parameters of "
        r"both \(model\.layer1\.weight, model\.layer0\.weight\): give those of each stage a group of their own"
    )
    objects = stage((kind(9.0), [1, 0]))
    before = [one.detach().clone() for one in objects["model"].parameters()]
    with pytest.raises(CheckpointError, match=why):
        restored(differing, 0, 1, objects)
    assert all(map(torch.equal, before, objects["model"].parameters())), "nothing of it is used"


def test_one_scheduler_cannot_have_the_rates_of_two_stages(tmp_path: Path) -> None:
    alike = keep(tmp_path / "alike", stage((0.1, [0]), scheduled=True), stage((0.1, [1]), scheduled=True))
    assert restored(alike, 0, 1, stage((9.0, [0, 1]), scheduled=True))["scheduler"].base_lrs == [0.1]
    differing = two_stages(tmp_path / "differing", scheduled=True)
    why = r"state\.scheduler: workers 0 and 1 of .* differ in base_lrs, .*: divide the stages as they were"
    with pytest.raises(CheckpointError, match=why):
        restored(differing, 0, 1, stage((9.0, [0, 1]), scheduled=True))
    for folder in (alike, differing):
        why = r"state\.scheduler does not fit .* kept for 1 groups of parameters, and state\.optimizer now has 2"
        with pytest.raises(CheckpointError, match=why):
            restored(folder, 0, 1, stage((9.0, [0]), (9.0, [1]), scheduled=True))


def test_what_an_optimizer_keeps_beside_its_parameters_is_that_of_its_own_stage(tmp_path: Path) -> None:
    workers = [stage((0.1, [0])), stage((0.1, [1]))]
    for rank, objects in enumerate(workers):
        objects["optimizer"].state["all"] = {"seen": torch.tensor(3.0 + rank)}
    folder = keep(tmp_path, *workers)
    assert restored(folder, 3, 4, stage((9.0, [1])))["optimizer"].state["all"]["seen"] == 4
    with pytest.raises(CheckpointError, match=r"state\.optimizer: workers 0 and 1 of .* differ in state, and this"):
        restored(folder, 0, 1, stage((9.0, [0, 1])))


def test_a_parameter_that_has_moved_to_another_group_takes_the_options_there(tmp_path: Path) -> None:
    folder = keep(tmp_path, stage((0.1, [0, 2]), (0.2, [1])))
    for world in (1, 2):
        assert rates(restored(folder, 0, world, stage((9.0, [0]), (9.0, [2, 1])))) == [0.1, 0.2]


@pytest.mark.parametrize("world", [1, 2])
def test_another_number_of_groups_for_the_same_parameters_is_refused(tmp_path: Path, world: int) -> None:
    two = keep(tmp_path / "two", stage((0.1, [0]), (0.2, [1])))
    with pytest.raises(ValueError, match=r"it has 1 groups of parameters, 2 were kept: give an optimizer all of its"):
        restored(two, 0, world, stage((9.0, [0]), layers=[1]))
    with pytest.raises(ValueError, match="it has 1 groups of parameters, 2 were kept"):
        restored(two, 0, world, stage((9.0, [0, 1])))
    one = keep(tmp_path / "one", stage((0.1, [0, 1])))
    with pytest.raises(ValueError, match="it has 2 groups of parameters, 1 were kept"):
        restored(one, 0, world, stage((9.0, [0]), (9.0, [1])))


def named(number: int, value: float) -> dict[str, Any]:
    """A stage whose objects have names of their own."""
    layer = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    optimizer = torch.optim.SGD(layer.parameters(), lr=value, momentum=0.5)
    return {f"stage{number}": layer, f"optimizer{number}": optimizer}


@pytest.mark.parametrize("world", [4, 2])
def test_stages_may_have_objects_of_their_own_names(tmp_path: Path, world: int) -> None:
    """Also at the size that saved them, where a worker may have another stage now."""
    folder = keep(tmp_path, named(0, 1.0), named(1, 2.0))
    for rank in range(world):
        number = 1 - rank % 2
        objects = restored(folder, rank, world, named(number, 9.0))
        assert float(objects[f"stage{number}"].weight.detach().mean()) == number + 1
        assert objects[f"optimizer{number}"].param_groups[0]["lr"] == number + 1


@pytest.mark.parametrize("world", [4, 2])
def test_an_object_that_no_stage_had_is_named(tmp_path: Path, world: int) -> None:
    folder = keep(tmp_path, named(0, 1.0), named(1, 2.0))
    with pytest.raises(CheckpointError, match="does not contain stage7"):
        restored(folder, 0, world, named(7, 9.0))
