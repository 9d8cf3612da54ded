"""Counts beside an embedding: with a step's gradients, in both frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

np = pytest.importorskip("numpy")

from edl.errors import SettingError  # noqa: E402
from edl.worker import session as sessions  # noqa: E402
from ps.client.counters import Counters  # noqa: E402
from ps.client.frontend import part  # noqa: E402
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule  # noqa: E402
from tests.support.ps_fixture import WIDE, Bench  # noqa: E402
from tests.unit.ps.client.test_bags import FRAMEWORKS, Framework  # noqa: E402


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sessions, "_current", None)
    part.forget()
    yield
    part.forget()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_shows_and_clicks_are_counted_with_the_step(framework: str) -> None:
    one = Framework(framework)
    counters = one.ps.Counters("user-counts")
    keys, clicks = one.keys([[3, 9], [3, 3]]), one.floats([[1], [0]])
    counters.add(keys, show=1, click=clicks)
    assert counters.read(keys)["show"].tolist() == [[0, 0], [0, 0]], "with the step"
    counters.add(one.keys([9]), click=[5])
    one.ps.step()
    found = counters.read(one.keys([3, 9, 4]))
    assert found["show"].tolist() == [3, 1, 0] and found["click"].tolist() == [1, 6, 0]
    assert one.ps.client().step == 1 and one.ps.client().store.rows("user-counts") == 2


@pytest.mark.torch
def test_an_array_of_keys_may_be_reused_before_the_step() -> None:
    one = Framework("torch")
    counters, keys = one.ps.Counters("c", "seen"), np.array([1])
    for number in (1, 2):
        keys[:] = number
        counters.add(keys, seen=1)
    one.ps.step()
    assert counters.read(one.keys([1, 2]))["seen"].tolist() == [1, 1]


@pytest.mark.torch
def test_bad_columns_and_shapes_are_named() -> None:
    one = Framework("torch")
    counters = one.ps.Counters("c", ("seen",))
    with pytest.raises(SettingError, match="column=click: must be one of seen"):
        counters.add([1], click=1)
    with pytest.raises(SettingError, match=r"shape of seen=\(3,\): must be a number or fit the keys of shape \(2,\)"):
        counters.add([1, 2], seen=[1, 2, 3])
    with pytest.raises(SettingError, match="different names"):
        Counters("d", ("a", "a"))
    assert np.isscalar(counters.columns[0]) and Counters("e", "seen").columns == ("seen",)


@pytest.mark.parametrize("wire", ["f2", "bf16"])
def test_counts_stay_exact_on_the_network(wire: str) -> None:
    """2**24 - 1 fits into float32 alone."""
    spec = TableSpec("counts", 2, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))
    bench = Bench((spec, WIDE)).start(2)
    try:
        client, keys, many = bench.client(wire=wire), np.arange(5), np.float32((1 << 24) - 1)
        grads = {"counts": (keys, np.full((5, 2), many)), "wide": (keys, np.full((5, 9), 0.1, np.float32))}
        client.push(grads)
        found = client.pull_many({"wide": keys, "counts": keys})
        assert (found["counts"] == many).all()
        initial = bench.client().pull("wide", keys + 100)
        assert not np.array_equal(client.pull("wide", keys + 100), initial), "others are rounded"
        other = {"counts": (keys + 9, grads["counts"][1]), "wide": grads["wide"]}
        assert (client.push_and_pull(other, ["wide", "counts"])["counts"] == many).all()
    finally:
        bench.stop()
