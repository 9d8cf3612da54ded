"""AUC from counts that are added up over trainers, against scikit-learn's and a count of all pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from edl.errors import PsError, SettingError
from edl.worker import session as sessions
from ps.client.auc import Auc, area, counted
from ps.client.frontend import InitOptions, part
from ps.client.layer_arguments import plain_array
from tests.unit.ps.client.test_bags import FRAMEWORKS


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sessions, "_current", None)
    part.forget()
    part.init(InitOptions(local=True))
    yield
    part.forget()


def examples(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.random(count) < 0.2
    return 1 / (1 + np.exp(-random.normal(labels * 1.0 - 1, 1))), labels.astype(np.float32)


@pytest.mark.parametrize("count", [10, 1000, 50_000])
def test_it_is_that_of_scikit_learn(count: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = examples(count)
    labels[:2] = 0, 1
    assert area(counted(scores, labels, 1 << 20)) == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-5)
    rounded = np.floor(scores * 64) / 64
    assert area(counted(scores, labels, 64)) == pytest.approx(metrics.roc_auc_score(labels, rounded), abs=1e-12)


def test_pairs_of_equal_scores_count_half() -> None:
    scores, labels = np.array([0.1, 0.5, 0.5, 0.9, 1.0, 0.0]), np.array([0, 1, 0, 1, 0, 1])
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels == 1] for n in scores[labels == 0]]
    assert area(counted(scores, labels, 1000)) == pytest.approx(np.mean(pairs))
    assert math.isnan(area(counted(scores[:1], labels[:1], 10)))


def test_trainers_add_up_and_windows_do_not() -> None:
    """Two objects stand for two trainers: they share only the table."""
    scores, labels = examples(4000)
    one, other = Auc(bins=256), Auc(bins=256)
    for begin in range(0, 4000, 500):
        (one if begin % 1000 else other).update(scores[begin : begin + 500], labels[begin : begin + 500])
    assert math.isnan(one.compute())
    one.push()
    one.push()
    other.push()
    assert one.compute() == other.compute() == pytest.approx(area(counted(scores, labels, 256)), abs=1e-9)
    other.update(scores[:100], 1 - labels[:100])
    other.push(window=3)
    assert one.compute(window=3) == pytest.approx(area(counted(scores[:100], 1 - labels[:100], 256)), abs=1e-9)
    assert math.isnan(one.compute(window=2)) and one.compute() != one.compute(window=3)
    assert part.client.step == 0, "counting is no step"


def test_what_cannot_be_counted_is_named() -> None:
    for scores, labels, said in (
        ([0.5, 1.5], [0, 1], r"score=1\.5: must be from 0 to 1.*sigmoid"),
        ([float("nan")], [0], "score=nan"),
        ([0.5], [2], "label=2: must be 0 or 1"),
        ([0.5, 0.5], [1], "labels=1: must be as many as the scores, 2"),
    ):
        with pytest.raises(SettingError, match=said):
            counted(scores, labels, 8)
    with pytest.raises(SettingError, match="bins=1: must be from 2"):
        Auc("other", bins=1)
    with pytest.raises(SettingError, match="window=-1"):
        Auc().push(window=-1)


def test_a_push_that_fails_loses_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, labels = examples(1000)
    auc = Auc(bins=64)
    auc.update(scores, labels)

    def refuse(*_: object, **__: object) -> None:
        raise PsError("no pserver")

    with monkeypatch.context() as patch, pytest.raises(PsError):
        patch.setattr(part.client, "push", refuse)
        auc.push()
    auc.push()
    assert auc.compute() == pytest.approx(area(counted(scores, labels, 64)), abs=1e-9)


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_scores_may_have_any_type_of_a_framework(name: str, kind: str) -> None:
    framework = pytest.importorskip(name)
    scores = framework.to_tensor([0.5, 0.25]) if name == "paddle" else framework.tensor([0.5, 0.25])
    scores = scores.astype(kind) if name == "paddle" else scores.to(getattr(framework, kind))
    assert plain_array(scores).tolist() == [0.5, 0.25]
