"""``EDLStrategy`` in one process: what it refuses, and that a trainer continues as if nobody had interrupted it."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, TensorDataset

from edl.errors import StateError
from edl.integrations.lightning_bridge import LightningBridge
from edl.torch.ddp import disarm
from edl.worker import session as sessions
from edl.worker.state import BaseState
from tests.support.saved_steps import saved_boundaries

pytestmark = pytest.mark.torch
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
COMMANDS = {"lightning": r"pip install 'edl\[lightning\]'", "pytorch_lightning": "pip install pytorch-lightning"}
STEPS = 17
"""Three epochs of five steps each, and two steps of the fourth."""


@pytest.mark.parametrize("name", PACKAGES)
def test_without_the_package_the_error_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"edl.integrations.{name}"
    for loaded in [one for one in sys.modules if one == module or one.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=COMMANDS[name]):
        importlib.import_module(module)


class Kit:
    """One of Lightning's two packages, and edl's strategy for it."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[clients]'")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the package about itself
            self.pl: Any = importlib.import_module(PACKAGES[name])
            self.edl: Any = importlib.import_module(f"edl.integrations.{name}")

    def module(self) -> Any:
        class Line(self.pl.LightningModule):  # type: ignore[misc, name-defined]
            """Learns to add up its input."""

            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
                self.validated: list[int] = []

            def loss(self, batch: Any) -> Any:
                return ((self.layers(batch[0]) - batch[0].sum(1, keepdim=True)) ** 2).mean()

            def training_step(self, batch: Any, index: int) -> Any:
                return self.loss(batch)

            def validation_step(self, batch: Any, index: int) -> None:
                self.log("error", self.loss(batch))

            def on_validation_end(self) -> None:
                self.validated.append(self.trainer.global_step)

            def configure_optimizers(self) -> Any:
                self.steps = self.trainer.estimated_stepping_batches  # which has the loader made before its position
                adam = torch.optim.Adam(self.parameters(), lr=0.05)
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, threshold=10.0)
                return {"optimizer": adam, "lr_scheduler": {"scheduler": plateau, "monitor": "error"}}

        return Line()

    def trainer(self, folder: Path, strategy: Any, **options: Any) -> Any:
        usual = {
            "accelerator": "cpu", "max_steps": STEPS, "max_epochs": 4, "accumulate_grad_batches": 2,
            "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
            "num_sanity_val_steps": 0, "default_root_dir": folder,
        }  # fmt: skip
        return self.pl.Trainer(strategy=strategy, **{**usual, **options})

    def stopping(self) -> Any:
        return self.pl.callbacks.EarlyStopping("error", patience=1000)


def loaders(shuffle: bool = True) -> tuple[Any, Any]:
    data = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(1)))
    return DataLoader(data, batch_size=2, shuffle=shuffle), DataLoader(data, batch_size=10)


def numbers(module: Any) -> list[float]:
    return [float(number) for tensor in module.state_dict().values() for number in tensor.flatten()]


@pytest.fixture(params=PACKAGES)
def kit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kit:
    made = Kit(request.param)
    monkeypatch.setattr("edl.integrations.lightning_strategy.is_worker", lambda _: True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "PL_GLOBAL_SEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sessions, "_current", None)
    return made


@pytest.fixture(autouse=True)
def no_group_left() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    leave_group()


def leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sessions._current = None


@pytest.mark.parametrize("interval", [1.0, 4, 0.6])
def test_it_trains_as_the_trainer_alone(kit: Kit, tmp_path: Path, interval: float) -> None:
    """In the order of the data set."""
    results = []
    for strategy in ("auto", kit.edl.EDLStrategy()):
        module = kit.module()
        kit.trainer(tmp_path, strategy, val_check_interval=interval).fit(module, *loaders(shuffle=False))
        results.append((numbers(module), module.validated))
    assert results[0] == results[1]


def test_with_save_every_the_end_is_saved(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = saved_boundaries(monkeypatch)
    kit.trainer(tmp_path, kit.edl.EDLStrategy(save_every=6)).fit(kit.module(), *loaders())
    assert [step for step, save in enumerate(saved, 1) if save] == [6, 12, STEPS]


def test_each_step_is_the_mean_over_its_samples(kit: Kit, tmp_path: Path) -> None:
    """Against a loop without Lightning, whose epochs end with a smaller step."""
    data = TensorDataset(torch.randn(18, 3, generator=torch.Generator().manual_seed(1)))
    module, plain = kit.module(), kit.module()
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=0.05)
    trainer = kit.trainer(tmp_path, kit.edl.EDLStrategy(global_batch=4), limit_val_batches=0)
    trainer.fit(module, DataLoader(data, batch_size=2))
    adam = torch.optim.Adam(plain.parameters(), lr=0.05)
    for step in range(STEPS):
        first = step % 5 * 4
        plain.loss([data.tensors[0][first : first + 4]]).backward()
        adam.step()
        adam.zero_grad()
    assert numbers(module) == pytest.approx(numbers(plain), rel=1e-5, abs=1e-6)


class Gone(BaseException):
    pass


@pytest.mark.parametrize(
    ("at", "interval", "precision"),  # five steps are an epoch
    [(1, 1.0, "32"), (5, 1.0, "32"), (7, 1.0, "bf16-mixed"), (15, 4, "32"), (4, 4, "32"), (6, 0.6, "32")],
)
def test_another_trainer_continues_from_what_was_kept(
    kit: Kit, tmp_path: Path, at: int, interval: float, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> tuple[Any, Any]:
        trainer = kit.trainer(
            tmp_path, kit.edl.EDLStrategy(global_batch=4), val_check_interval=interval, callbacks=[kit.stopping()],
            precision=precision,
        )  # fmt: skip
        return trainer, kit.module()

    undisturbed, expected = made()
    undisturbed.fit(expected, *loaders())
    leave_group()

    first, begun = made()
    kept: dict[str, Any] = {}

    def committing(_: object) -> None:
        if first.global_step == at:
            state = first.strategy._bridge.state
            kept.update({name: obj.state_dict() for name, obj in state._objects.items()})
            kept["training"] = copied(kept["training"])
            raise Gone

    with monkeypatch.context() as patched, pytest.raises(Gone):
        patched.setattr(BaseState, "commit", committing)
        first.fit(begun, *loaders())
    leave_group()

    second, continued = made()

    class Restored(LightningBridge):
        def __init__(self, *positional: Any, **options: Any) -> None:
            super().__init__(*positional, **options)
            self.progress.load_state_dict(kept["training"])

    monkeypatch.setattr("edl.integrations.lightning_strategy.LightningBridge", Restored)
    second.fit(continued, *loaders())
    assert second.global_step == STEPS
    assert begun.validated + continued.validated == expected.validated
    assert second.early_stopping_callback.state_dict() == undisturbed.early_stopping_callback.state_dict()
    assert (
        second.lr_scheduler_configs[0].scheduler.state_dict()["num_bad_epochs"]
        == (undisturbed.lr_scheduler_configs[0].scheduler.state_dict()["num_bad_epochs"])
    )
    assert second.current_epoch == undisturbed.current_epoch
    logged = [one.fit_loop.epoch_loop._batches_that_stepped for one in (second, undisturbed)]
    assert logged == [STEPS, STEPS], "the steps in the logs"
    assert numbers(continued) == numbers(expected)


class TwoWorlds(LightningBridge):
    """The first world is lost in the commit after ``LOST`` steps, and the same trainer goes on in a second one."""

    LOST = 3
    keeps = False
    """Whether the commit before is there; else the second world begins from nothing."""

    def run(self, *arguments: Any) -> None:
        kept = copied(self.progress.state_dict())

        def committing(_: object) -> None:
            if self._trainer.global_step == self.LOST:
                raise Gone
            if self.keeps:
                kept.update(copied(self.progress.state_dict()))

        with pytest.MonkeyPatch.context() as patched, pytest.raises(Gone):
            patched.setattr(BaseState, "commit", committing)
            super().run(*arguments)
        disarm(2)
        self.progress.load_state_dict(kept)
        super().run(*arguments)


def test_a_trainer_that_begins_from_nothing_again_makes_all_steps(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> tuple[Any, Any]:
        trainer, module = kit.trainer(tmp_path, kit.edl.EDLStrategy(global_batch=4)), kit.module()
        trainer.fit(module, *loaders())
        leave_group()
        return trainer, numbers(module)

    _, expected = trained()
    monkeypatch.setattr("edl.integrations.lightning_strategy.LightningBridge", TwoWorlds)
    trainer, found = trained()
    assert (trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped) == (STEPS, STEPS)
    assert found == expected


@pytest.mark.parametrize("keeps", [False, True])
def test_a_worker_that_stays_writes_checkpoints_as_a_new_one(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """A checkpoint has a barrier: a rank that leaves one out would be in another collective than the rest."""
    written = []

    class Noted(kit.pl.callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            written.append(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    monkeypatch.setattr(TwoWorlds, "keeps", keeps)
    monkeypatch.setattr("edl.integrations.lightning_strategy.LightningBridge", TwoWorlds)
    trainer = kit.trainer(
        tmp_path, kit.edl.EDLStrategy(global_batch=4), max_steps=5, enable_checkpointing=True,
        callbacks=[Noted(tmp_path, every_n_train_steps=3)],
    )  # fmt: skip
    trainer.fit(kit.module(), *loaders())
    assert written == [3, 3], "the second one in the second world"


@pytest.mark.parametrize("after_validation", [False, True])
@pytest.mark.parametrize("max_steps", [-1, STEPS])
def test_a_checkpoint_from_the_end_of_an_epoch_is_followed_by_the_next_epoch(
    kit: Kit, tmp_path: Path, max_steps: int, after_validation: bool
) -> None:
    def fitted(folder: Path, begin: str | None = None) -> tuple[Any, Any]:
        module = kit.module()
        module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=0.05)
        writer = kit.pl.callbacks.ModelCheckpoint(
            folder, "{step}", save_top_k=-1, save_on_train_epoch_end=after_validation
        )
        trainer = kit.trainer(
            tmp_path, kit.edl.EDLStrategy(), max_steps=max_steps, enable_checkpointing=True, callbacks=[writer]
        )
        trainer.fit(module, *loaders(), ckpt_path=begin)
        leave_group()
        return trainer, module

    whole, expected = fitted(tmp_path / "whole")
    resumed, module = fitted(tmp_path / "resumed", str(tmp_path / "whole" / "step=10.ckpt"))
    assert module.validated == [step for step in expected.validated if step > 10]
    assert resumed.global_step == whole.global_step
    logged = [one.fit_loop.epoch_loop._batches_that_stepped for one in (resumed, whole)]
    assert logged[0] == logged[1], "the steps in the logs"
    assert numbers(module) == numbers(expected)


def copied(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overfit_batches": 2}, "overfit_batches=2: use limit_train_batches"),
        ({"use_distributed_sampler": False}, "use_distributed_sampler=False"),
        ({"reload_dataloaders_every_n_epochs": 3}, "reload_dataloaders_every_n_epochs=3: use 0 or 1"),
        ({"limit_train_batches": 5}, "limit_train_batches=5 ends inside a step of accumulate_grad_batches=2 batches"),
    ],
)
def test_a_trainer_that_cannot_be_continued_is_refused(
    kit: Kit, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(StateError, match=text):
        kit.trainer(tmp_path, kit.edl.EDLStrategy(), **options).fit(kit.module(), *loaders())


def test_several_train_loaders_are_refused(kit: Kit, tmp_path: Path) -> None:
    train, _ = loaders()
    with pytest.raises(StateError, match="there are several train loaders"):
        kit.trainer(tmp_path, kit.edl.EDLStrategy()).fit(kit.module(), [train, train])


def test_a_script_trains_once(kit: Kit, tmp_path: Path) -> None:
    trainer, module = kit.trainer(tmp_path, kit.edl.EDLStrategy(), max_steps=1), kit.module()
    with pytest.raises(StateError, match=r"trainer.validate\(\) was called before trainer.fit\(\)"):
        trainer.validate(module, loaders()[1])
    trainer.fit(module, *loaders())
    assert trainer.validate(module, loaders()[1]), "in the last world"
    with pytest.raises(StateError, match=r"trainer.fit\(\) was called twice"):
        trainer.fit(module, *loaders())


def test_restored_state_of_an_optimizer_keeps_its_types(kit: Kit) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    nadam = torch.optim.NAdam([parameter])
    parameter.grad = torch.ones_like(parameter)
    nadam.step()
    strategy = kit.edl.EDLStrategy(parallel_devices=[torch.device("cpu")])
    strategy._bridge, strategy._optimizers = object(), [nadam]
    strategy.load_optimizer_state_dict({"optimizer_states": [nadam.state_dict()]})
    assert nadam.state[parameter]["mu_product"].dtype == torch.float32


def test_without_a_launcher_it_is_an_ordinary_strategy(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edl.integrations.lightning_strategy.is_worker", lambda _: False)
    strategy = kit.edl.EDLStrategy(find_unused_parameters=True)
    assert not strategy.active
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert "EDLStrategy is an ordinary DDPStrategy, because edl-run has not started" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("global_batch", -1), ("copy_every", 0), ("save_every", -5)])
def test_wrong_arguments_are_refused(kit: Kit, name: str, value: int) -> None:
    with pytest.raises(StateError, match=rf"EDLStrategy\({name}={value}\): it must be at least"):
        kit.edl.EDLStrategy(**{name: value})
