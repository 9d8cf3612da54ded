"""Checkpoints that earlier versions of edl wrote are read, value by value; those of unknown newer ones are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edl import __version__  # noqa: E402
from edl.adapters.files import PlainFiles  # noqa: E402
from edl.errors import CheckpointError  # noqa: E402
from edl.torch.checkpoint import load_checkpoint  # noqa: E402
from edl.torch.recut import Folder, load_sharded  # noqa: E402
from edl.torch.state import State  # noqa: E402
from edl.wire import snapshot  # noqa: E402
from tests.data.checkpoints.torch_script import STEPS, advance, model_and_optimizer  # noqa: E402
from tests.support.checkpoint_tools import Memory, open_checkpoint_storage  # noqa: E402
from tests.support.old_checkpoints import NEWER, STORED, VERSIONS, of_newer_format  # noqa: E402
from tests.support.sharded_tools import assert_same, filled, one_dimension, playing  # noqa: E402

pytestmark = pytest.mark.torch
VALUES = {"step": STEPS, "seen": {"steps": [1, 2, 3], "name": "größe", "limit": None}}
COMMIT = f"commit-{STEPS:010d}.era-0000000001"


def trained() -> tuple[Any, Any]:
    """What the script trained, in this process and without edl."""
    made = model_and_optimizer()
    for _ in range(STEPS):
        advance(made["model"], made["optimizer"])
    return made["model"], made["optimizer"]


def test_this_version_has_its_checkpoints() -> None:
    lines = [version.split(".")[:2] for version in VERSIONS]
    assert __version__.split(".")[:2] in lines, "run tests/data/checkpoints/make.py, see docs/release.md"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_script_reads_them_without_a_job(version: str) -> None:
    model, optimizer = trained()
    for kind in ("whole", "sharded"):
        found = load_checkpoint(STORED / version / kind)
        assert {name: found.pop(name) for name in VALUES} == VALUES
        assert_same(found.pop("model"), model.state_dict())
        momentum = found.pop("optimizer")["state"]
        right = optimizer.state_dict()["state"].values()
        assert_same([one["momentum_buffer"] for one in momentum.values()], [one["momentum_buffer"] for one in right])
        assert not found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_goes_on_from_a_state_in_one_file(version: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STORED / version / "whole", tmp_path / "saved"))
    memory = Memory()
    open_checkpoint_storage(PlainFiles(folder), "another run", job="whole").read(None, memory)
    state = State(**model_and_optimizer(), step=0, seen={})
    view = memoryview(memory.data)
    state._load(snapshot.parse(view), view, frozenset(state._objects))
    model, optimizer = trained()
    assert_same(state.model.state_dict(), model.state_dict())
    assert_same(state.optimizer.state_dict(), optimizer.state_dict())
    assert {"step": state.step, "seen": state.seen} == VALUES


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_of_any_size_goes_on_from_a_sharded_state(version: str) -> None:
    right, right_optimizer = trained()
    for world in (1, 2, 3):
        with playing(world - 1, world):
            model = model_and_optimizer()["model"]
            for name, parameter in list(model.named_parameters()):
                part = filled(one_dimension(parameter.detach()), -1.0)
                model.register_parameter(name, torch.nn.Parameter(part))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
            objects = {"model": model, "optimizer": optimizer, "step": 0, "seen": {}}
            _, values = load_sharded(objects, Folder(str(STORED / version / "sharded" / COMMIT)))
            assert values == VALUES
            for name, parameter in right.named_parameters():
                mine = dict(model.named_parameters())[name]
                assert_same(mine.detach(), one_dimension(parameter.detach()))
                kept = right_optimizer.state[parameter]["momentum_buffer"]
                assert_same(optimizer.state[mine]["momentum_buffer"], one_dimension(kept))


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_one_of_an_unknown_newer_format_is_refused_and_stays(kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STORED / VERSIONS[-1] / kind, tmp_path / "saved"))
    manifest = folder / COMMIT / "DONE"
    of_newer_format(manifest)
    before = manifest.read_bytes()
    advice = rf"{COMMIT}.*the manifest has format {NEWER}, newer than this edl knows \(2\): upgrade edl"
    with pytest.raises(CheckpointError, match=advice):
        load_checkpoint(folder)
    storage = open_checkpoint_storage(PlainFiles(folder), "another run", job=kind)
    with pytest.raises(CheckpointError, match=advice):
        storage.load(Memory())
    assert manifest.read_bytes() == before


def test_a_directory_of_an_unknown_newer_format_is_not_written_to(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STORED / VERSIONS[-1] / "whole", tmp_path / "saved"))
    of_newer_format(folder / "edl.json")
    with pytest.raises(
        CheckpointError, match=rf"edl.json has format {NEWER}, newer than this edl knows \(1\): upgrade"
    ):
        open_checkpoint_storage(PlainFiles(folder), "another run", job="whole").check()
