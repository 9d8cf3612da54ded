"""Validation of tables, and the description of differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edl.errors import SettingError
from edl.job_records import Mode, Training
from edl.wire.json_messages import decode, encode
from ps.spec import Admission, Eviction, Initial, Optimizer, TableSpec, UpdateRule


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: TableSpec("", 8), "table"),
        (lambda: TableSpec("a b", 8), "table"),
        (lambda: TableSpec("t", 0), "dim of table t=0"),
        (lambda: TableSpec("t", 5000), "dim of table t=5000"),
        (lambda: TableSpec("t", 8, dense=True), "rows of table t"),
        (lambda: TableSpec("t", 8, rows=3), "rows of table t"),
        (lambda: TableSpec("t", 8, dense=True, rows=3, eviction=Eviction(most_rows=1)), "cannot have admission"),
        (lambda: Optimizer(lr=float("nan")), "lr=nan"),
        (lambda: Optimizer(momentum=1.0), "momentum=1"),
        (lambda: Optimizer(lr_power=0.5), "lr_power"),
        (lambda: Initial(seed=-1), "seed"),
        (lambda: Admission(count=0), "count=0"),
        (lambda: Admission(count=2, probability=0.5), "probability"),
        (lambda: Eviction(most_rows=1, least_rows=2), "least_rows=2"),
        (lambda: Eviction(unseen_steps=1e4), "unseen_steps=10000.0: must be an integer"),  # type: ignore[arg-type]
        (lambda: Eviction(unseen_s=1.5), "unseen_s=1.5: must be an integer"),  # type: ignore[arg-type]
        (lambda: Eviction(most_rows=1e6), "most_rows=1000000.0: must be an integer"),  # type: ignore[arg-type]
        (lambda: Admission(count=2.0), "count=2.0: must be an integer"),  # type: ignore[arg-type]
        (lambda: Initial(seed="a"), "seed='a': must be an integer"),  # type: ignore[arg-type]
        (lambda: TableSpec("t", 8.0), "dim of table t=8.0: must be an integer"),  # type: ignore[arg-type]
        (lambda: Optimizer(lr="fast"), "lr='fast': must be a number"),  # type: ignore[arg-type]
        (lambda: Training(staleness=-1), "--staleness=-1"),
        (lambda: Training(geo_steps=0), "--geo-steps=0"),
        (lambda: Training(servers=(3, 2)), "--servers=3:2"),
        (lambda: Training(save_every_s=float("inf")), "--ps-save-every=inf"),
    ],
)
def test_a_bad_value_is_named(make: Callable[[], object], names: str) -> None:
    with pytest.raises(SettingError, match=names.replace("(", r"\(")):
        make()


def test_numbers_may_be_numpy_s() -> None:
    """As they come out of a search for hyperparameters; messages hold Python's."""
    lr, count = np.float32(0.5), np.int64(3)
    spec = TableSpec(
        "t", np.int32(8), Optimizer(lr=lr, eps=1), Initial(scale=lr, seed=count), Admission(count), Eviction(count)
    )
    assert decode(TableSpec, encode(spec)) == spec
    assert spec == TableSpec("t", 8, Optimizer(lr=0.5, eps=1.0), Initial(scale=0.5, seed=3), Admission(3), Eviction(3))


def test_the_same_table_has_no_difference() -> None:
    assert TableSpec("t", 8).difference(TableSpec("t", 8)) == ""


def test_the_learning_rate_may_differ() -> None:
    assert TableSpec("t", 8).difference(TableSpec("t", 8, Optimizer(lr=1.0))) == ""


def test_differences_are_reported_one_by_one() -> None:
    told = TableSpec("t", 16).difference(TableSpec("t", 8, Optimizer(UpdateRule.ADAM)))
    assert "dim 16 here, 8 there" in told
    assert "optimizer.rule sgd here, adam there" in told


def test_defaults_are_good() -> None:
    assert Training().mode is Mode.ASYNC
    assert not Eviction().any
    assert Eviction(unseen_steps=1).any
