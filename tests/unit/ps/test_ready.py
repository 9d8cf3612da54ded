"""Kernels that are not compiled yet: a store goes on with others, and where compiled ones are kept."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from ps.rows import TablePush, TrainerPush
from ps.spec import Admission, Eviction, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.kernels import at_once, ready
from ps.store.store import RowStore

SPECS = (
    TableSpec("adagrad", 16, Optimizer(UpdateRule.ADAGRAD, lr=0.1), Initial(InitMethod.NORMAL, 0.1)),
    TableSpec("adam", 5, Optimizer(UpdateRule.ADAM, lr=0.1), Initial(InitMethod.UNIFORM, 0.1)),
    TableSpec(
        "rare", 4, Optimizer(UpdateRule.SGD, lr=0.1), admission=Admission(count=2), eviction=Eviction(most_rows=3000)
    ),
)
Trained = dict[str, tuple[np.ndarray, ...]]


def trained(switch_at: int, begin: str = "numpy") -> Trained:
    """Rows by key after some steps, some of them evicted; the kernels are exchanged before the step ``switch_at``."""
    pytest.importorskip("numba")
    store, drawn = RowStore(kernels=begin), np.random.default_rng(5)
    for spec in SPECS:
        store.define(spec)
    store.cap("rare", 3000)
    for step in range(1, 9):
        if step == switch_at:
            store.take_kernels("numba")
        keys = drawn.integers(0, 5000, 4000)
        parts = []
        for spec in SPECS:
            store.pull(spec.name, keys, np.empty((len(keys), spec.dim), np.float32), step=step)
            distinct = np.unique(keys)
            parts.append(
                TablePush(spec.name, distinct, drawn.standard_normal((len(distinct), spec.dim)).astype(np.float32))
            )
        store.push([TrainerPush(1, step, parts)], step=step)
        store.sweep("rare", step=step, most=2000)
    found: Trained = {}
    for spec in SPECS:
        rows = [store.image(bucket).rows.get(spec.name) for bucket in range(4096)]
        held = [one for one in rows if one is not None]
        keys = np.concatenate([one.keys for one in held])
        order = np.argsort(keys)
        whole = [keys, *(np.concatenate([getattr(one, name) for one in held]) for name in
                         ("weights", "state", "frequency", "updates", "seen"))]  # fmt: skip
        found[spec.name] = tuple(one[order] for one in whole)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("switch_at", [1, 4, 8])
def test_a_store_that_changes_kernels_trains_as_one_that_had_them_from_the_start(switch_at: int) -> None:
    expected, found = trained(0, "numba"), trained(switch_at)
    for name in ("adagrad", "adam"):
        for mine, other in zip(found[name], expected[name], strict=True):
            assert len(mine) == len(other) > 4000
            np.testing.assert_allclose(mine, other, rtol=2e-6, atol=1e-7)
    assert len(found["rare"][0]) == len(expected["rare"][0]) == 2000


def test_kernels_change_between_requests_of_other_threads() -> None:
    pytest.importorskip("numba")
    counts = TableSpec("t", 2, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))
    store, keys, over = RowStore(kernels="numpy"), np.arange(3000), threading.Event()
    store.define(counts)
    done = [0, 0]

    def work(number: int) -> None:
        while not over.is_set() or done[number] < 20:
            done[number] += 1
            values = np.ones((len(keys), 2), np.float32)
            store.push([TrainerPush(1 + number, done[number], [TablePush("t", keys, values)])], step=1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    store.take_kernels("numba")
    over.set()
    for thread in threads:
        thread.join()
    out = np.empty((len(keys), 2), np.float32)
    store.pull("t", keys, out, step=2)
    assert store.kernels == "numba" and (out == sum(done)).all()


def test_nothing_waits_for_kernels_that_are_not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("EDL_PS_KERNELS", raising=False)
    monkeypatch.setattr(ready, "_looks", ready._Looks())
    assert at_once() == "numpy"
    place = ready.folder()
    assert place is not None and place.parent == tmp_path
    (place / ready.MARK).touch()
    monkeypatch.setattr(ready, "_looks", ready._Looks())
    assert at_once() == "numba"


def test_code_is_kept_only_where_others_cannot_put_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o777)
    linked = tmp_path / "linked"
    linked.symlink_to(shared)
    monkeypatch.setattr(ready, "_places", lambda: iter((shared, linked, own)))
    place = ready.folder()
    assert place is not None and place.parent == own
    assert own.stat().st_mode & 0o777 == 0o700 and place.stat().st_mode & 0o777 == 0o700
    own.chmod(0o720)
    assert ready.folder() is None


def test_old_versions_go(tmp_path: Path) -> None:
    now, recent, old = (tmp_path / f"kernels-{name}" for name in ("now", "recent", "old"))
    for place, age_s in ((now, 0.0), (recent, ready.KEPT_S / 2), (old, ready.KEPT_S * 2)):
        place.mkdir()
        (place / ready.MARK).touch()
        os.utime(place / ready.MARK, (1e9 - age_s, 1e9 - age_s))
    ready.tidy(now)
    assert sorted(tmp_path.iterdir()) == [now, recent]
