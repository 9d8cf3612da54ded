"""``EDLModel`` in one process: it trains as Paddle's own loop does, and continues as if nobody had interrupted it."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest

pytest.importorskip("paddle")

import numpy as np
import paddle
from paddle.callbacks import Callback, EarlyStopping, ReduceLROnPlateau

from edl.errors import StateError
from edl.worker import session as sessions
from edl.worker.state import BaseState
from tests.support.paddle_distance import Distance
from tests.support.saved_steps import saved_boundaries

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

    def __init__(
        self, model: Any, *, dropout: float = 0.0, accumulate: int = 1, amp: Any = None, rate: Any = None
    ) -> None:
        paddle.seed(0)
        self.net = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Dropout(dropout), paddle.nn.Linear(4, 1))
        for number, one in enumerate(self.net.parameters()):
            one.set_value(np.random.default_rng(number).normal(size=one.shape).astype(np.float32))
        self.rate = rate or paddle.optimizer.lr.ExponentialDecay(0.1, 0.97)
        self.adam = adam = paddle.optimizer.Adam(self.rate, parameters=self.net.parameters())
        self.model = model(self.net)
        self.model.prepare(adam, paddle.nn.MSELoss(), Distance(), amp_configs=amp)
        self.notes = Notes()
        self.data: Any = Rows()
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


def test_with_save_every_the_end_is_saved(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = saved_boundaries(monkeypatch)
    Training(lambda net: models.EDLModel(net, save_every=4)).fit(epochs=1)
    assert [step for step, save in enumerate(saved, 1) if save] == [4, 6]


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
    ids=["drop_last", "accumulate", "in_order", "evaluated", "num_iters", "amp"],
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
    options: dict[str, Any] = {"batch_size": 8, "epochs": 6, "eval_data": Rows(10, 5)}

    def callbacks() -> list[Any]:
        # Nothing is better by 100: the rate falls after the second and the third evaluation, which is the last.
        judged: dict[str, Any] = {"monitor": "distance", "mode": "min", "min_delta": 100, "verbose": 0}
        return [EarlyStopping(patience=2, **judged), ReduceLROnPlateau(patience=1, factor=0.5, **judged)]

    undisturbed = Training(models.EDLModel, rate=0.1).fit(callbacks=callbacks(), **options)
    assert [one[0] for one in undisturbed.notes.heard].count("eval") == 3
    assert undisturbed.adam.get_lr() == 0.025
    sessions._current = None

    kept: dict[str, Any] = {}
    first = Training(models.EDLModel, rate=0.1)

    def committing(state: BaseState) -> None:
        if state._objects["loop"].step == at:
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


class Stream(paddle.io.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


class Pairs(paddle.io.BatchSampler):
    """A batch sampler that somebody wrote."""


def given(name: str) -> Any:
    rows = Rows()
    return {
        "stream": Stream(),
        "pairs": paddle.io.DataLoader(rows, batch_sampler=Pairs(rows)),
        "list": [(rows[0], rows[1])],
        "two": paddle.io.DataLoader(
            rows, batch_sampler=paddle.io.DistributedBatchSampler(rows, 2, num_replicas=2, rank=0)
        ),
    }[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stream", "an IterableDataset, which has no places to continue from: use one with __len__"),
        ("pairs", r"train_data has a batch sampler of its own \(Pairs\), .*give a paddle.io.Dataset"),
        ("list", r"train_data has batches of its own \(list\)"),
        ("two", "DistributedBatchSampler of train_data is for 2 workers: leave num_replicas and rank out"),
    ],
)
def test_data_that_cannot_be_divided_are_refused(models: Any, name: str, message: str) -> None:
    made = Training(models.EDLModel)
    with pytest.raises(StateError, match=message):
        made.model.fit(given(name))


@pytest.mark.parametrize("kind", [paddle.io.BatchSampler, paddle.io.DistributedBatchSampler])
def test_a_loader_may_be_given(models: Any, kind: Any) -> None:
    """Its batches are those of the data set itself, if it does not shuffle."""
    expected = Training(models.EDLModel).fit(shuffle=False)
    sessions._current = None
    made = Training(models.EDLModel)
    made.data = paddle.io.DataLoader(made.data, batch_sampler=kind(made.data, batch_size=4))
    assert made.fit().weights() == expected.weights()
    sessions._current = None
    shuffled = Training(models.EDLModel)
    rows = shuffled.data
    shuffled.data = paddle.io.DataLoader(rows, batch_sampler=kind(rows, shuffle=True, batch_size=4))
    assert shuffled.fit(epochs=2).weights() != expected.weights()
    assert sorted(rows.read) == sorted([*range(SAMPLES)] * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, r"EDLModel.fit\(epochs=0\): it must be an integer of at least 1"),
        ({"batch_size": (4, 0)}, r"fit\(batch_size=0\)"),
        ({"num_iters": -1}, r"fit\(num_iters=-1\)"),
        ({"eval_freq": 0}, r"fit\(eval_freq=0\)"),
    ],
)
def test_numbers_that_are_too_small_are_refused(models: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        Training(models.EDLModel).fit(**options)


@pytest.mark.parametrize(("name", "value"), [("global_batch", -1), ("copy_every", 0), ("save_every", -5)])
def test_wrong_arguments_are_refused(models: Any, name: str, value: int) -> None:
    with pytest.raises(StateError, match=rf"EDLModel\({name}={value}\): it must be at least"):
        models.EDLModel(paddle.nn.Linear(1, 1), **{name: value})


def test_a_script_trains_once_and_prepares_before(models: Any) -> None:
    with pytest.raises(StateError, match=r"fit\(\) was called before prepare"):
        models.EDLModel(paddle.nn.Linear(1, 1)).fit(Rows())
    made = Training(models.EDLModel).fit()
    with pytest.raises(StateError, match=r"fit\(\) was called twice"):
        made.fit()


def test_static_graphs_are_refused(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.paddle, "in_dynamic_mode", lambda: False)
    with pytest.raises(StateError, match=r"dynamic graph mode only: do not call paddle.enable_static\(\)"):
        models.EDLModel(paddle.nn.Linear(1, 1))


def test_without_a_launcher_it_is_an_ordinary_model(
    models: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "is_worker", lambda _: False)
    made = Training(models.EDLModel)
    assert (
        "EDLModel is an ordinary paddle.Model, because edl-run has not started this process" in capsys.readouterr().err
    )
    made.fit()
    made.fit()
    expected = Training(paddle.Model)
    expected.fit()
    expected.fit()
    assert made.result() == expected.result()


def test_after_the_training_each_worker_evaluates_and_predicts_everything(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Training(models.EDLModel).fit()
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")  # as in a world of two
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    found = made.model.evaluate(Rows(10, 5), batch_size=4, verbose=0)
    assert found["count"] == 10
    (outputs,) = made.model.predict(Rows(10, 5), batch_size=4, verbose=0, stack_outputs=True)
    assert len(outputs) == 10


class Several:
    """The collectives of one worker of several, which all have the same parts."""

    def __init__(self, world: int) -> None:
        self.world = world

    def all_gather(self, part: Any) -> list[Any]:
        return [part] * self.world


def test_a_divided_evaluation_leaves_out_what_fills_up_the_last_batch(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edl.integrations import fit_parts

    monkeypatch.setattr(fit_parts, "edl", Several(3))
    evaluation = fit_parts.DividedEvaluation(lambda rows: rows * 2, 10)
    sizes = []
    for part in (2, 2):  # of each worker: 6 samples in a batch, then 4 and 2 that were filled up
        rows = paddle.ones([part, 1])
        (labels,) = evaluation.gather_labels([rows])
        outputs = evaluation(rows)
        assert labels.shape == outputs.shape
        sizes.append(outputs.shape[0])
        evaluation.end_batch()
    assert sizes == [6, 4]
