"""``EDLCallback`` with ``fsdp=True``, in one process: that it trains as without FSDP2, and what it refuses."""

from __future__ import annotations

import importlib
import os
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import torch
from torch.distributed.fsdp import FSDPModule

from edl.errors import StateError
from edl.worker import session as sessions
from tests.support.accelerate_on_cpu import shard_on_cpu
from tests.unit.edl.integrations.test_transformers import Lines, Small

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Accelerate chooses one, and warns
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "false")  # restored at the end; Accelerate sets it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the package about itself
        module = importlib.import_module("edl.integrations.transformers")
        from transformers import Trainer
    for name in ("train", "__init__"):
        monkeypatch.setattr(Trainer, name, getattr(Trainer, name))  # restored at the end
    monkeypatch.setattr(sessions, "_current", None)
    monkeypatch.setattr(module, "is_worker", lambda _: True)
    shard_on_cpu(monkeypatch.setattr)
    leave_group()  # of another test, whose place is still in the environment
    yield module
    leave_group()


def leave_group() -> None:
    from edl.integrations.accelerate_world import forget_world

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    forget_world()
    sessions._current = None


def trainer(
    trainers: Any, tmp_path: Path, *, model: Any = None, model_init: Any = Small, more: Any = (), **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    callbacks = [trainers.EDLCallback(global_batch=4), *more]
    arguments: dict[str, Any] = {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "dataloader_pin_memory": False, "max_steps": 9, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 0.1, "warmup_steps": 3, "logging_steps": 3,
    }  # fmt: skip
    given = {"model_init": model_init} if model is None else {"model": model}
    return Trainer(
        **given, args=TrainingArguments(**{**arguments, **options}), train_dataset=Lines(), callbacks=callbacks
    )


def result(made: Any) -> tuple[list[float], list[float]]:
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in made.model.state_dict().values()]
    losses = [log["loss"] for log in made.state.log_history if "loss" in log]
    return [float(number) for tensor in whole for number in tensor.flatten()], losses


def test_a_sharded_trainer_trains_as_one_that_is_not(trainers: Any, tmp_path: Path) -> None:
    plain = trainer(trainers, tmp_path, model=Small())
    plain.train()
    leave_group()
    made = trainer(trainers, tmp_path, fsdp=True)
    assert made.args.fsdp is True, "it was hidden while the trainer was created"
    output = made.train()
    assert isinstance(made.model, FSDPModule)
    assert output.global_step == 9
    for found, expected in zip(result(made), result(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_variables_of_accelerate_launch_shard_as_well(
    trainers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    made = trainer(trainers, tmp_path)
    made.train()
    assert isinstance(made.model, FSDPModule)


def test_the_trainer_saves_the_whole_model(trainers: Any, tmp_path: Path) -> None:
    made = trainer(trainers, tmp_path, fsdp=True, max_steps=2)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    assert os.listdir(tmp_path / "saved")


def test_a_checkpoint_of_the_trainer_is_where_a_new_job_begins(trainers: Any, tmp_path: Path) -> None:
    whole = trainer(trainers, tmp_path, fsdp=True, save_strategy="steps", save_steps=4)
    whole.train()
    leave_group()
    made = trainer(trainers, tmp_path, fsdp=True)
    output = made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert output.global_step == 9
    assert result(made)[0] == pytest.approx(result(whole)[0], rel=1e-5, abs=1e-6)


def test_the_model_of_the_last_world_is_freed_before_the_next_is_built(trainers: Any, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    alive: list[Any] = []
    counts = []

    class Over(Exception):
        pass

    class Interrupt(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise Over

    def model_init() -> Any:
        counts.append(sum(one() is not None for one in alive))
        made = Small()
        alive.append(weakref.ref(made))
        return made

    made = trainer(trainers, tmp_path, fsdp=True, model_init=model_init, more=[Interrupt()])
    with pytest.raises(Over):
        made.train()
    (bridge,) = [one._bridge for one in made.callback_handler.callbacks if isinstance(one, trainers.EDLCallback)]
    for _ in range(2):
        bridge.state._session.underway = False  # as in another world
        with pytest.raises(Over):
            bridge.run(None, None)
    assert counts == [0, 0, 0, 0], "the one that the trainer was created with, and one of each world"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fsdp_config": {"version": 1, "sync_module_states": False}}, "fsdp_version=1: use 2"),
        ({"fsdp_config": {"cpu_offload": True}}, "cpu_offload: set it to False"),
        ({"fsdp_config": {"activation_checkpointing": True}}, "activation_checkpointing by Accelerate"),
    ],
)
def test_a_kind_of_sharding_that_cannot_be_kept_is_refused(
    trainers: Any, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(StateError, match=f"EDLCallback cannot keep a sharded model with .*{text}"):
        trainer(trainers, tmp_path, fsdp=True, **options).train()


def test_a_model_in_place_of_model_init_is_refused(trainers: Any, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="give Trainer model_init, a function that returns it, in place of model"):
        trainer(trainers, tmp_path, model=Small(), fsdp=True).train()
