"""``EDLModel`` in one process: it trains as Paddle's own loop does, and continues as if nobody had interrupted it."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

import numpy as np
import paddle
from paddle.callbacks import Callback, EarlyStopping, ReduceLROnPlateau

from edl.errors import StateError
from edl.worker import session as sessions
from edl.worker.state import BaseState

pytestmark = [
    pytest.mark.paddle,
    # Paddle's own loop copies labels in a way that it warns of itself.
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings("ignore:(AmpScaler|amp_guard) can only be enabled"),  # on a CPU it changes nothing
]
MODULE = "edl.integrations.paddle_model"
SAMPLES = 22


def test_without_the_package_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "paddle", None)
    with pytest.raises(ImportError, match=r"pip install 'edl\[paddle\]'"):
        importlib.import_module(MODULE)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "is_worker", lambda _: True)
    monkeypatch.setattr(sessions, "_current", None)
    yield module
    sessions._current = None


class Rows(paddle.io.Dataset[Any]):
    """Rows of three numbers and their sums."""

    def __init__(self, samples: int = SAMPLES, seed: int = 1) -> None:
        self.rows = np.random.default_rng(seed).normal(size=(samples, 3)).astype(np.float32)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        row = self.rows[index]
        return row, row.sum(keepdims=True)

    def __len__(self) -> int:
        return len(self.rows)


class Distance(paddle.metric.Metric):
    """The mean distance from the label, and the number of samples that it was computed over."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, *arguments: Any) -> float:
        output, label = arguments
        self.total += float(np.abs(output - label).sum())
        self.count += len(output)
        return self.total / self.count

    def accumulate(self) -> Any:
        return [self.total / max(self.count, 1), self.count]

    def name(self) -> Any:
        return ["distance", "count"]


class Notes(Callback):
    """What a callback is told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def on_epoch_begin(self, epoch: Any = None, logs: Any = None) -> None:
        self.heard.append(("epoch", epoch, self.params["steps"]))

    def on_train_batch_end(self, step: Any, logs: Any = None) -> None:
        self.heard.append(("batch", step))

    def on_epoch_end(self, epoch: Any, logs: Any = None) -> None:
        self.heard.append(("end", epoch))

    def on_eval_end(self, logs: Any = None) -> None:
        assert logs is not None
        self.heard.append(("eval", *[float(np.ravel(logs[name])[0]) for name in ("loss", "distance", "count")]))


class Training:
    """A training as one writes it."""

    def __init__(self, model: Any, *, dropout: float = 0.0, accumulate: int = 1, amp: Any = None, rate: Any = None) -> None:
        paddle.seed(0)
        self.net = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Dropout(dropout), paddle.nn.Linear(4, 1))
        for number, one in enumerate(self.net.parameters()):
            one.set_value(np.random.default_rng(number).normal(size=one.shape).astype(np.float32))
        self.rate = rate or paddle.optimizer.lr.ExponentialDecay(0.1, 0.97)
        self.adam = adam = paddle.optimizer.Adam(self.rate, parameters=self.net.parameters())
        self.model = model(self.net)
        self.model.prepare(adam, paddle.nn.MSELoss(), Distance(), amp_configs=amp)
        self.notes = Notes()
        self.data = Rows()
        self.accumulate = accumulate

    def fit(self, **options: Any) -> Training:
        more = options.pop("callbacks", [])
        settings: dict[str, Any] = {"batch_size": 4, "epochs": 3, "verbose": 0, **options}
        self.model.fit(self.data, callbacks=[self.notes, *more], accumulate_grad_batches=self.accumulate, **settings)
        return self

    def weights(self) -> list[float]:
        return [float(number) for one in self.net.parameters() for number in one.numpy().ravel()]

    def result(self) -> Any:
        return self.weights(), self.adam.get_lr()


@pytest.mark.parametrize(
    "options",
    [
        {"drop_last": True},
        {"shuffle": False, "accumulate": 2, "batch_size": 2},
        {"shuffle": False},
        {"eval_data": Rows(10, 5), "eval_freq": 2, "drop_last": True},
        {"num_iters": 7, "drop_last": True},
        {"amp": {"level": "O1", "init_loss_scaling": 8.0}, "drop_last": True},
    ],
    ids=str,
)
def test_it_trains_as_paddle_does(models: Any, options: dict[str, Any]) -> None:
    made = {name: options[name] for name in ("accumulate", "amp") if name in options}
    rest = {name: value for name, value in options.items() if name not in made}
    ours, theirs = Training(models.EDLModel, **made).fit(**rest), Training(paddle.Model, **made).fit(**rest)
    assert ours.weights() == pytest.approx(theirs.weights(), rel=1e-5, abs=1e-6)
    assert ours.rate.state_dict() == theirs.rate.state_dict()
    assert ours.notes.heard == theirs.notes.heard or _close(ours.notes.heard, theirs.notes.heard)


def _close(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        one[0] == other[0] and list(one[1:]) == pytest.approx(list(other[1:]), rel=1e-5)
        for one, other in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_micro_batches_do_not_change_a_step(models: Any, micro: int) -> None:
    """The mean over the samples of each step, in micro-batches of any size; the last step of an epoch is smaller."""
    whole = Training(models.EDLModel).fit(batch_size=8, shuffle=False)
    sessions._current = None
    parts = Training(lambda net: models.EDLModel(net, global_batch=8)).fit(batch_size=micro, shuffle=False)
    assert parts.weights() == pytest.approx(whole.weights(), rel=1e-5, abs=1e-6)
    assert parts.rate.state_dict() == whole.rate.state_dict()
    assert parts.notes.heard == whole.notes.heard


class Gone(BaseException):
    pass


@pytest.mark.parametrize("at", [1, 3, 5, 8])
def test_another_process_continues_from_what_was_kept(models: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch_size": 8, "epochs": 4, "eval_data": Rows(10, 5)}

    def callbacks() -> list[Any]:
        return [EarlyStopping("distance", "min", patience=2, verbose=0), ReduceLROnPlateau("distance", patience=1)]

    undisturbed = Training(models.EDLModel, rate=0.1).fit(callbacks=callbacks(), **options)
    sessions._current = None

    kept: dict[str, Any] = {}
    first = Training(models.EDLModel, rate=0.1)

    def committing(state: BaseState) -> None:
        if state._objects["loop"].step == at:  # type: ignore[attr-defined]
            for name, obj in state._objects.items():
                found = state._capture_object(name, obj)
                kept[name] = {key: value.numpy() for key, value in found.items()} if name == "model" else found
            kept.update(copy.deepcopy(kept))
            raise Gone

    with monkeypatch.context() as patched, pytest.raises(Gone):
        patched.setattr(BaseState, "commit", committing)
        first.fit(callbacks=callbacks(), **options)
    sessions._current = None

    second = Training(models.EDLModel, rate=0.1)
    begin = BaseState._begin

    def restoring(state: BaseState, *arguments: Any) -> None:
        begin(state, *arguments)
        for name, obj in state._objects.items():
            state._load_object(name, obj, kept[name])

    monkeypatch.setattr(BaseState, "_begin", restoring)
    second.fit(callbacks=callbacks(), **options)
    assert second.result() == undisturbed.result()
    assert undisturbed.notes.heard[-1] == second.notes.heard[-1]
    done = [one for one in first.notes.heard + second.notes.heard if one[0] == "batch"]
    assert len(done) == len([one for one in undisturbed.notes.heard if one[0] == "batch"])
