"""``edl.integrations.torchtitan`` in one process."""

from __future__ import annotations

import importlib
import sys
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from edl.errors import StateError

pytestmark = pytest.mark.torch
MODULE = "edl.integrations.torchtitan"


def test_without_the_package_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == MODULE or name.split(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ImportError, match=r"pip install 'edl\[torchtitan\]'"):
        importlib.import_module(MODULE)


@pytest.fixture
def streams() -> Any:
    pytest.importorskip("torchtitan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the package about itself
        return importlib.import_module("edl.integrations.titan_streams")


@pytest.fixture
def loader(streams: Any) -> Any:
    """A configuration of a loader that counts: stream v of n gives v, v + n, v + 2n and so on."""
    base = streams.BaseDataLoader

    class Counting(base):  # type: ignore[misc, valid-type]
        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc, name-defined]
            length: int = 10**6

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, snapshot_every_n_steps: int,
                     local_batch_size: int) -> None:  # fmt: skip
            self.at, self.by, self.length = dp_rank, dp_world_size, config.length
            self.size = local_batch_size

        def __iter__(self) -> Any:
            while self.at < self.length:
                at, self.at = self.at, self.at + self.by
                yield {"input": torch.full((self.size,), at)}, torch.full((self.size,), at)

        def state_dict(self) -> Any:
            return {"at": self.at}

        def load_state_dict(self, state_dict: Any) -> None:
            self.at = state_dict["at"]

    return Counting.Config


def workers(streams: Any, loader: Any, world: int, count: int = 4) -> list[Any]:
    config = streams.DataStreams.Config(loader=loader(), count=count)
    return [config.build(dp_world_size=world, dp_rank=rank, local_batch_size=2) for rank in range(world)]


def one_step(streams: Any, worker: Any, batches: Any) -> list[int]:
    found = [next(batches) for _ in range(worker._turns)]
    return [int(labels[0]) for _, labels in found if int(labels[0]) != streams.IGNORE_INDEX]


def test_each_step_takes_the_next_batch_of_every_stream_in_any_chain_of_worlds(streams: Any, loader: Any) -> None:
    kept: dict[str, Any] = {}
    step = 0
    for world in (2, 3, 1, 4, 3):
        all_workers = workers(streams, loader, world)
        for worker in all_workers:
            if kept:
                streams.Positions(worker).load_state_dict({"count": 4, "streams": kept})
        iterators = [iter(worker) for worker in all_workers]
        for _ in range(3):
            taken = [one_step(streams, worker, one) for worker, one in zip(all_workers, iterators, strict=True)]
            assert sorted(at for one in taken for at in one) == list(range(step * 4, step * 4 + 4))
            step += 1
        kept = {}
        for worker in all_workers:
            kept |= streams.Positions(worker).state_dict()["streams"]
        assert sum(worker.tokens for worker in all_workers) == step * 4 * 2


def test_what_fills_up_has_no_valid_label(streams: Any, loader: Any) -> None:
    first, *_ = workers(streams, loader, 3)  # it has one stream, the last one has two
    batches = iter(first)
    (_, real), (inputs, labels) = next(batches), next(batches)
    assert real.tolist() == [0, 0]
    assert inputs["input"].shape == (2,)
    assert labels.tolist() == [streams.IGNORE_INDEX] * 2


def test_labels_that_cannot_be_left_out_are_refused(streams: Any) -> None:
    with pytest.raises(StateError, match="--node-unit"):
        streams._empty(({"input": torch.zeros(2)}, torch.zeros(2)))


def test_the_end_of_a_stream_ends_the_data(streams: Any, loader: Any) -> None:
    config = streams.DataStreams.Config(loader=loader(length=8), count=4)
    assert len(list(config.build(dp_world_size=1, dp_rank=0, local_batch_size=2))) == 8


def test_another_number_of_streams_is_refused_with_both_numbers(streams: Any, loader: Any) -> None:
    (worker,) = workers(streams, loader, 1)
    with pytest.raises(StateError, match=r"2 streams .* is now 4"):
        streams.Positions(worker).load_state_dict({"count": 2, "streams": {}})


def test_a_missing_position_is_named(streams: Any, loader: Any) -> None:
    (worker,) = workers(streams, loader, 1)
    with pytest.raises(StateError, match="data stream 0"):
        streams.Positions(worker).load_state_dict({"count": 4, "streams": {}})


def test_torchtitans_own_checkpoint_has_an_entry_for_each_loader(streams: Any, loader: Any) -> None:
    first, second = workers(streams, loader, 2)
    assert first.state_dict().keys() == {"world_size", "at"}
    second.load_state_dict({"at": 9})
    assert all(one.at == 9 for one in second._loaders.values())


def test_tokens_of_the_steps_before_a_checkpoint_are_counted_once(streams: Any, loader: Any) -> None:
    (worker,) = workers(streams, loader, 1)
    worker.count_steps_before(10)
    batches = iter(worker)
    for _ in range(2):
        one_step(streams, worker, batches)
    assert worker.tokens == 12 * 4 * 2


class Boundaries:
    """The state of a training, which notes what is committed."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.seen = trainer, []  # type: ignore[var-annotated]

    def commit(self) -> None:
        self.seen.append(("commit", self.trainer.step))

    def save(self) -> None:
        self.seen.append(("save", self.trainer.step))


class Titan:
    """Trains as torchtitan's trainer does, until there is no data left for the next step."""

    def __init__(self, steps: int, data: int) -> None:
        self.step, self._steps, self._data = 0, steps, data
        self.checkpointer = SimpleNamespace(load=None)
        self.dataloader = SimpleNamespace(tokens=0)
        self.parallel_dims = SimpleNamespace(cp=1)

    def should_continue_training(self) -> bool:
        return self.step < self._steps

    def train(self) -> None:
        while self.should_continue_training():
            self.step += 1
            if self.step > self._data:
                return

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("steps", "data"), [(3, 9), (9, 3)])
def test_the_end_is_saved_once_whether_steps_or_data_end(streams: Any, steps: int, data: int) -> None:
    module = importlib.import_module("edl.integrations.titan_training")
    numbers = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    training = object.__new__(module.TitanTraining)
    training._trainer = trainer = Titan(steps, data)
    training._boundary = module.StepBoundary(numbers, 10)
    training._state = Boundaries(trainer)
    assert training._in_world() is trainer
    last = [("save", 3)] if steps == 3 else [("commit", 3), ("save", 3)]
    assert training._state.seen == [("commit", 1), ("commit", 2), *last]
    assert trainer.step == 3


@pytest.mark.parametrize("degree", [1, 4])
def test_tensor_parallel_ranks_draw_the_same_numbers(
    streams: Any, monkeypatch: pytest.MonkeyPatch, degree: int
) -> None:
    module = importlib.import_module("edl.integrations.titan_training")
    kept: dict[str, Any] = {}
    monkeypatch.setattr(module, "refuse", lambda config: None)
    monkeypatch.setattr(module.edl, "State", lambda **named: kept.update(named))
    config = SimpleNamespace(parallelism=SimpleNamespace(tensor_parallel_degree=degree))
    module.TitanTraining(config, copy_every=1, save_every=0)
    assert kept["random"].edl_model_parallel == degree


class Recording:
    """As torchtitan's configuration and trainer."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def build(self) -> Recording:
        self.calls.append("build")
        return self

    def train(self) -> None:
        self.calls.append("train")

    def close(self) -> None:
        self.calls.append("close")


def test_without_a_launcher_torchtitan_trains_alone(streams: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = Recording()
    assert importlib.import_module(MODULE).train(config) is config
    assert config.calls == ["build", "train", "close"]
    assert "edl-run has not started this process" in capsys.readouterr().err


def test_a_wrong_option_is_named(streams: Any) -> None:
    with pytest.raises(StateError, match=r"train\(copy_every=0\)"):
        importlib.import_module(MODULE).train(Recording(), copy_every=0)
