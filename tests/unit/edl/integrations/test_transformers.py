"""``EDLCallback`` in one process: what it refuses, and what it does where there is no launcher."""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from torch.utils.data import Dataset

import edl.torch
from edl.errors import StateError
from edl.integrations.step_split import StepSplit
from edl.worker import session as sessions
from edl.worker.state import BaseState
from tests.support.saved_steps import saved_boundaries

pytestmark = pytest.mark.torch
MODULE = "edl.integrations.transformers"


def test_without_the_package_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == MODULE or name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'edl\[transformers\]'"):
        importlib.import_module(MODULE)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Accelerate chooses one, and warns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the package about itself
        module = importlib.import_module(MODULE)
    yield module
    if torch.distributed.is_initialized():  # a trainer forms one, if an earlier test has left its place
        leave_group()


class Lines(Dataset[Any]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([index, index % 5, 1.0]), "labels": torch.tensor([float(index % 3)])}


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": ((self.layer(x / 22) - labels) ** 2).mean()}


def trainer(tmp_path: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments: dict[str, Any] = {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "dataloader_pin_memory": False, "max_steps": 9, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 0.1, "warmup_steps": 3,
    }  # fmt: skip
    args = TrainingArguments(**{**arguments, **options})
    return Trainer(model=Small(), args=args, train_dataset=Lines())


def weights(made: Any) -> list[float]:
    return [float(number) for tensor in made.model.state_dict().values() for number in tensor.flatten()]


@pytest.fixture
def uninterrupted(trainers: Any, tmp_path: Path) -> tuple[list[float], float]:
    """The weights and the mean loss of the trainer alone."""
    plain = trainer(tmp_path)
    output = plain.train()
    return weights(plain), output.training_loss


def test_without_a_launcher_the_callback_does_nothing(trainers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    callback = trainers.EDLCallback()
    assert not callback.active
    assert "EDLCallback does nothing, because edl-run has not started this process" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("global_batch", -1), ("copy_every", 0), ("save_every", -5)])
def test_wrong_arguments_are_refused(trainers: Any, name: str, value: int) -> None:
    with pytest.raises(Exception, match=rf"EDLCallback\({name}={value}\): it must be at least"):
        trainers.EDLCallback(**{name: value})


def bridge(trainers: Any, made: Any, save_every: int = 0) -> Any:
    from transformers import Trainer

    return trainers.TrainerBridge(made, Trainer.train, global_batch=0, copy_every=1, save_every=save_every)


def leave_group() -> None:
    from edl.integrations.accelerate_world import forget_world

    torch.distributed.destroy_process_group()
    forget_world()


def test_it_trains_as_the_trainer_alone(
    trainers: Any, tmp_path: Path, uninterrupted: tuple[list[float], float]
) -> None:
    made = trainer(tmp_path)
    output = bridge(trainers, made).run(None, None)
    leave_group()
    assert (weights(made), output.training_loss) == uninterrupted


@pytest.mark.parametrize("at", [1, 5, 6, 8])  # six steps are an epoch, the last of them smaller
def test_another_trainer_continues_from_what_was_kept(
    trainers: Any, tmp_path: Path, uninterrupted: tuple[list[float], float], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(BaseException):
        pass

    first = trainer(tmp_path, logging_steps=1)
    begun = bridge(trainers, first)
    kept: dict[str, Any] = {}

    def committing(_: object) -> None:
        if first.state.global_step == at:
            for name, obj in begun.state._objects.items():
                kept[name] = obj.state_dict()
            kept["optimizer"] = torch.load(_saved(kept["optimizer"]))  # a copy
            kept["model"] = torch.load(_saved(kept["model"]))
            raise Gone

    with monkeypatch.context() as patched, pytest.raises(Gone):
        patched.setattr(BaseState, "commit", committing)
        begun.run(None, None)
    leave_group()
    sessions._current = None

    second = trainer(tmp_path, logging_steps=1, save_strategy="steps", save_steps=9)
    goes_on = bridge(trainers, second)
    goes_on._progress.load_state_dict(kept["progress"])
    second.model.load_state_dict(kept["model"])
    goes_on._optimizer.load_state_dict(kept["optimizer"])
    output = goes_on.run(None, None)
    leave_group()
    assert weights(second) == uninterrupted[0]
    assert output.global_step == 9
    assert output.training_loss == pytest.approx(uninterrupted[1], rel=1e-6)
    assert [log["step"] for log in second.state.log_history if "loss" in log] == list(range(1, 10))
    assert (tmp_path / "checkpoint-9").is_dir(), "it saves its own checkpoints, too"


def test_the_position_has_the_callbacks_in_the_trainers_own_form(trainers: Any, tmp_path: Path) -> None:
    """A list is for several callbacks of a class: the trainer would append to that of a single one."""
    from transformers import EarlyStoppingCallback

    made = trainer(tmp_path)
    stopping = EarlyStoppingCallback(early_stopping_patience=5)
    made.add_callback(stopping)
    progress = bridge(trainers, made)._progress
    stopping.early_stopping_patience_counter = 3
    made._total_loss_scalar = made._initial_global_step = made._globalstep_last_logged = 0  # it has begun
    progress.begun = True
    kept = progress.state_dict()
    stopping.early_stopping_patience_counter = 4  # in a step that is lost
    progress.load_state_dict(kept)
    callbacks = progress.position()["stateful_callbacks"]
    assert callbacks.keys() == {"EarlyStoppingCallback", "TrainerControl"}
    assert callbacks["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 3}


def test_a_model_that_was_evaluated_before_is_wrapped_for_training(trainers: Any, tmp_path: Path) -> None:
    """Accelerate marks it, and returns marked models as they are: each worker would train alone."""
    made = trainer(tmp_path)
    made.evaluate(Lines())
    wrapped: list[Any] = []

    class Look(trainers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            wrapped.append(made.model_wrapped)

    made.add_callback(Look())
    bridge(trainers, made).run(None, None)
    leave_group()
    assert [type(one) for one in wrapped] == [torch.nn.parallel.DistributedDataParallel]


def test_restored_state_of_an_optimizer_keeps_its_types(trainers: Any, tmp_path: Path) -> None:
    """Accelerate loads it once more, with which torch converts it to the parameters' type."""
    from edl.integrations.trainer_world import place

    made = trainer(tmp_path)
    made.model = made.model.to(torch.bfloat16)
    nadam = torch.optim.NAdam(made.model.parameters())
    for one in made.model.parameters():
        one.grad = torch.ones_like(one)
    nadam.step()
    place(made, nadam)
    made.accelerator.prepare(made.model, made.optimizer)
    assert {state["mu_product"].dtype for state in nadam.state.values()} == {torch.float32}


class Texts(Lines):
    """Of different lengths."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)  # the sampler reads all of them to the end
        return {"input_ids": [0] * (index * 7 % 22 + 1)}


def test_texts_grouped_by_length_have_the_same_order_in_every_world(trainers: Any, tmp_path: Path) -> None:
    orders = []
    for world in (1, 2, 4):
        made = trainer(tmp_path, train_sampling_strategy="group_by_length", data_seed=0)
        made.train_dataset = Texts()
        begun, split = bridge(trainers, made), StepSplit(8, 2, 0, world)
        made.args.gradient_accumulation_steps = split.accumulation
        loader = begun._loader_maker(made.get_train_dataloader, split)()
        orders.append(loader.batches.sampler.order().take(range(22)))
        assert made.args.gradient_accumulation_steps == split.accumulation
    assert orders[1:] == orders[:1] * 2


@pytest.mark.parametrize("restored", [False, True])
def test_only_the_first_world_begins_with_an_evaluation(
    trainers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    """Early stopping would count those of the others."""
    from transformers.trainer_utils import TrainOutput

    made = trainer(tmp_path, eval_on_start=True)
    begun = bridge(trainers, made)
    seen: list[bool] = []

    def train(trainer: Any, **_: Any) -> TrainOutput:
        seen.append(trainer.args.eval_on_start)
        return TrainOutput(9, 0.0, {})

    begun._train = train
    if restored:
        begun._progress.restored = {"state": '{"global_step": 3}', "log_history": "[]", "callbacks": "{}"}
    monkeypatch.setattr(begun, "_split", lambda: StepSplit(4, 2, 0, 1))
    monkeypatch.setattr("edl.integrations.trainer_bridge.enter_world", lambda _: None)
    monkeypatch.setattr(begun._progress, "finish", lambda _: None)
    monkeypatch.setattr(begun._boundary, "finish", lambda _: None)
    begun._in_world(None, None)
    assert (seen, made.args.eval_on_start) == ([not restored], True)


def test_with_save_every_the_end_is_saved(trainers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = saved_boundaries(monkeypatch)
    bridge(trainers, trainer(tmp_path), save_every=5).run(None, None)
    leave_group()
    assert [step for step, save in enumerate(saved, 1) if save] == [5, 9]


def test_a_checkpoint_of_the_trainer_is_where_a_new_job_begins(
    trainers: Any, tmp_path: Path, uninterrupted: tuple[list[float], float]
) -> None:
    trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    made = trainer(tmp_path)
    output = bridge(trainers, made).run(str(tmp_path / "checkpoint-4"), None)
    leave_group()
    assert weights(made) == uninterrupted[0]
    assert output.global_step == 9


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True"),
    ],
)
def test_what_cannot_be_continued_is_refused(trainers: Any, tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError, match=f"EDLCallback cannot continue a Trainer with .*{text}"):
        bridge(trainers, trainer(tmp_path, **options))


@pytest.mark.parametrize(("gpus", "expected"), [(4, "cuda:2"), (1, "cuda:0")])
def test_before_there_is_a_world_each_worker_has_its_own_gpu(
    trainers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, expected: str
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    args = trainer(tmp_path).args
    trainers.take_own_gpu(args, 2)
    assert (chosen, args.device.type) == ([], "cpu")
    vars(args)["_setup_devices"], args._n_gpu = torch.device("cuda:0"), gpus
    trainers.take_own_gpu(args, 2)
    assert (chosen, args.device, args.n_gpu) == ([torch.device(expected)], torch.device(expected), 1)


def test_a_trainer_without_arguments_is_on_the_workers_own_gpu(
    trainers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes its own arguments, whose GPU is the first one."""
    from transformers import Trainer, TrainingArguments

    taken: list[Any] = []
    monkeypatch.chdir(tmp_path)
    no_group = SimpleNamespace(distributed=SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(trainers, "torch", no_group)  # another test may have left a group
    monkeypatch.setattr(trainers, "take_own_gpu", lambda *found: taken.append(found))
    monkeypatch.setattr(Trainer, "train", Trainer.train)
    monkeypatch.setattr(Trainer, "__init__", Trainer.__init__)
    trainers._intercept(2)
    made = Trainer(Small(), train_dataset=Lines())
    assert taken == [(made.args, 2)]
    assert isinstance(made.args, TrainingArguments) and made.args.output_dir == "tmp_trainer"
    given = TrainingArguments("given", use_cpu=True)
    assert Trainer(Small(), given).args is given


def test_workers_that_accelerate_takes_for_the_only_ones_are_refused(
    trainers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``use_cpu`` where there is no GPU, each would train a model of its own."""
    from edl.integrations.trainer_world import enter_world

    made = trainer(tmp_path, use_cpu=False)
    monkeypatch.setattr(edl.torch, "context", lambda: SimpleNamespace(world_size=2))
    with pytest.raises(StateError, match=r"found 1 process\(es\) .* has 2 workers: .*\(use_cpu=True\)"):
        enter_world(made)
