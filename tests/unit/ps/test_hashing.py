"""Where keys belong, and how rows begin: the same in Python, numpy and compiled code."""

from __future__ import annotations

import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest

from edl.errors import SettingError
from ps.hashing import SHARDS, bucket_of, buckets_of, mixed, shard_of_bucket, splitmix64
from ps.spec import BUCKETS, Initial, InitMethod, TableSpec
from ps.store.kernels import kernels
from ps.store.rules import TableLayout
from tests.support.ps_stores import both_kernels

EDGES = [0, 1, -1, 2, 1 << 62, (1 << 63) - 1, -(1 << 63), 977, -977]


def test_splitmix64_is_the_published_one() -> None:
    # The first outputs of the generator with seed 1234567.
    states = [1234567 + number * 0x9E3779B97F4A7C15 for number in range(3)]
    assert [splitmix64(state) for state in states] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_numpy_agrees_with_python() -> None:
    keys = np.array(EDGES, np.int64)
    assert mixed(keys).tolist() == [splitmix64(key) for key in EDGES]
    assert buckets_of(keys).tolist() == [bucket_of(key) for key in EDGES]


def test_a_shard_holds_buckets_that_follow_one_another() -> None:
    assert [shard_of_bucket(bucket) for bucket in (0, 63, 64, BUCKETS - 1)] == [0, 0, 1, SHARDS - 1]


@both_kernels
def test_a_split_is_stable_and_counts_buckets(kernels: str) -> None:
    keys = np.concatenate([np.array(EDGES, np.int64), np.arange(5000, dtype=np.int64) % 1500])
    split = _kernels(kernels).split(keys)
    assert (keys[split.order] == split.keys).all()
    shards = buckets_of(split.keys) // (BUCKETS // SHARDS)
    assert (np.diff(shards.astype(int)) >= 0).all()
    for shard in range(SHARDS):
        mine = slice(split.starts[shard], split.starts[shard + 1])
        assert (shards[mine] == shard).all()
        assert (np.diff(split.order[mine]) > 0).all()
    assert (split.counts == np.bincount(buckets_of(keys), minlength=BUCKETS)).all()


@pytest.mark.parametrize("start", list(InitMethod))
def test_first_weights_are_the_same_bits_in_both_kernels(start: InitMethod) -> None:
    layout = TableLayout.of(TableSpec("t", 19, initial=Initial(start, 0.37, seed=5)))
    keys = np.concatenate([np.array(EDGES, np.int64), np.arange(20000, dtype=np.int64)])
    plain, fast = (_kernels(name).first(layout, keys) for name in ("numpy", "numba"))
    assert (plain.view(np.uint32) == fast.view(np.uint32)).all()


@both_kernels
def test_first_weights_are_distributed_as_asked(kernels: str) -> None:
    keys = np.arange(20000, dtype=np.int64)
    uniform = _kernels(kernels).first(TableLayout.of(TableSpec("t", 8, initial=Initial(InitMethod.UNIFORM, 2.0))), keys)
    assert uniform.min() < -1.99 and uniform.max() < 2.0 and uniform.max() > 1.99
    assert abs(uniform.mean()) < 0.02 and abs(uniform.std() - 2 / 3**0.5) < 0.02
    normal = np.sort(
        _kernels(kernels)
        .first(TableLayout.of(TableSpec("t", 8, initial=Initial(InitMethod.NORMAL, 3.0))), keys)
        .ravel()
    )
    for share in (0.001, 0.01, 0.2, 0.5, 0.9, 0.999):
        expected = 3 * NormalDist().inv_cdf(share)
        assert abs(normal[int(share * len(normal))] - expected) < 0.15, share


def test_seed_key_and_column_all_count() -> None:
    first = _kernels("numpy").first
    keys = np.arange(100, dtype=np.int64)
    one = first(TableLayout.of(TableSpec("t", 8, initial=Initial(seed=1))), keys)
    two = first(TableLayout.of(TableSpec("t", 8, initial=Initial(seed=2))), keys)
    assert len(np.unique(np.concatenate([one.ravel(), two.ravel()]))) > 1590


def test_the_setting_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_PS_KERNELS", "numpy")
    assert kernels().NAME == "numpy"
    monkeypatch.setenv("EDL_PS_KERNELS", "cuda")
    with pytest.raises(SettingError, match="EDL_PS_KERNELS=cuda"):
        kernels()


def test_importing_ps_loads_nothing_heavy() -> None:
    program = "import sys, ps, ps.hashing, ps.spec; ps.hashing.bucket_of(5); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"numpy", "numba", "torch"}.isdisjoint(loaded)


def _kernels(name: str):  # type: ignore[no-untyped-def]
    if name == "numba":
        pytest.importorskip("numba")
    return kernels(name)
