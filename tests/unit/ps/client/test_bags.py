"""Bags of keys, as arrays and in both frameworks: the numbers of ``torch.nn.EmbeddingBag`` and of plain loops."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from edl.errors import SettingError  # noqa: E402
from edl.worker import session as sessions  # noqa: E402
from ps.client.bags import bags_of, trained, unpadded  # noqa: E402
from ps.client.frontend import part  # noqa: E402

FRAMEWORKS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "paddle")]
PADDING = -1
BAGS: list[list[int]] = [[5, 9, 5], [], [9], [PADDING, 7, PADDING, 1 << 40], [PADDING], [3, 7, 7, 7, 9]]
FLAT = [key for bag in BAGS for key in bag]
OFFSETS = [sum(map(len, BAGS[:at])) for at in range(len(BAGS))]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sessions, "_current", None)
    part.forget()
    yield
    part.forget()


class Framework:
    """What differs between the frameworks, for tests."""

    def __init__(self, name: str) -> None:
        self.made: Any = pytest.importorskip(name)
        self.ps: Any = importlib.import_module(f"edl.{name}.ps")
        self.torch = name == "torch"
        self.ps.init(local=True)

    def keys(self, values: Any) -> Any:
        """An int64 tensor."""
        array = np.asarray(values, np.int64)
        return self.made.from_numpy(array) if self.torch else self.made.to_tensor(array)

    def floats(self, values: Any) -> Any:
        """A float32 tensor that gets gradients."""
        array = np.asarray(values, np.float32)
        if self.torch:
            return self.made.from_numpy(array).requires_grad_()
        return self.made.to_tensor(array, stop_gradient=False)

    def bag(self, mode: str, name: str = "t", **options: Any) -> Any:
        """A bag whose rows move by their gradients."""
        ps = self.ps
        return ps.EmbeddingBag(name, 3, mode=mode, initial=ps.Normal(1.0), optimizer=ps.SGD(1.0), **options)

    def rows(self, keys: list[int], name: str = "t") -> Any:
        """Rows as they are on the server."""
        return self.ps.client().read(name, np.array(keys))


def array(tensor: Any) -> Any:
    return tensor.detach().numpy()


def pooled(rows: dict[int, Any], weights: list[float], mode: str) -> Any:
    """One bag after another, one key after another."""
    out, at = np.zeros((len(BAGS), 3), np.float64), 0
    for number, bag in enumerate(BAGS):
        found = []
        for key in bag:
            if key != PADDING:
                found.append(rows[key] * weights[at])
            at += 1
        if found:
            out[number] = {"sum": np.sum, "mean": np.mean, "max": np.max}[mode](found, axis=0)
    return out


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_values_and_gradients_are_those_of_loops(alone: None, framework: str, mode: str, weighted: bool) -> None:
    """Gradients by differences of the pooled values: pooling is linear, or is so around a point (max)."""
    one = Framework(framework)
    layer = one.bag(mode, padding_key=PADDING)
    distinct = sorted(set(FLAT) - {PADDING})
    weights = np.linspace(0.5, 2, len(FLAT)) if weighted else np.ones(len(FLAT))
    given: Any = one.floats(weights) if weighted else None
    found = layer(one.keys(FLAT), one.keys(OFFSETS), given)
    before = {key: row.astype(np.float64) for key, row in zip(distinct, one.rows(distinct), strict=True)}
    np.testing.assert_allclose(array(found), pooled(before, weights.tolist(), mode), rtol=1e-5, atol=1e-6)
    upstream = np.arange(found.shape[0] * 3, dtype=np.float32).reshape(-1, 3) + 1
    (found * one.floats(upstream)).sum().backward()
    one.ps.step()

    def loss(rows: dict[int, Any], some: Any) -> float:
        return float((pooled(rows, some.tolist(), mode) * upstream).sum())

    moved = one.rows(distinct)
    for at, key in enumerate(distinct):
        for column in range(3):
            nudged = {name: row.copy() for name, row in before.items()}
            nudged[key][column] += 1e-4
            slope = (loss(nudged, weights) - loss(before, weights)) / 1e-4
            assert before[key][column] - moved[at][column] == pytest.approx(slope, rel=1e-3, abs=1e-3)
    if weighted:
        for at in range(len(FLAT)):
            more = weights.copy()
            more[at] += 1
            slope = loss(before, more) - loss(before, weights)
            assert np.asarray(given.grad)[at] == pytest.approx(slope, rel=1e-3, abs=1e-4)
    assert one.ps.client().store.rows("t") == len(distinct), "the padding key has no row"


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_a_bag_trains_as_torchs_own(alone: None, mode: str, last: bool) -> None:
    one = Framework("torch")
    torch: Any = one.made
    ps = one.ps
    layer = ps.EmbeddingBag(
        "t", 3, mode=mode, padding_key=0, include_last_offset=last, optimizer=ps.Adagrad(0.1), initial=ps.Normal(1.0)
    )
    twin = torch.nn.EmbeddingBag(20, 3, mode=mode, padding_idx=0, include_last_offset=last)
    with torch.no_grad():
        twin.weight.copy_(torch.from_numpy(ps.client().pull("t", np.arange(20))))
    optimizer = torch.optim.Adagrad(twin.parameters(), 0.1, eps=1e-8)
    random = np.random.default_rng(4)
    for _ in range(6):
        lengths = random.integers(0, 5, 7)
        keys = one.keys(random.integers(0, 20, lengths.sum()))
        ends = np.cumsum(lengths)
        offsets = one.keys([0, *ends] if last else [0, *ends[:-1]])
        weights: list[Any] = [None, None]
        if mode == "sum":
            weights[0] = one.floats(random.random(len(keys)))
            weights[1] = weights[0].detach().clone().requires_grad_()
        mine, other = layer(keys, offsets, weights[0]), twin(keys, offsets, weights[1])
        assert torch.allclose(mine, other, atol=1e-5)
        target = torch.from_numpy(random.normal(size=(7, 3)).astype(np.float32))
        (mine - target).square().sum().backward()
        optimizer.zero_grad()
        (other - target).square().sum().backward()
        if mode == "sum":
            assert torch.allclose(weights[0].grad, weights[1].grad, atol=1e-5)
        ps.step()
        optimizer.step()
    assert np.allclose(one.rows(list(range(1, 20))), twin.weight.detach()[1:], atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_collection_is_one_trip_and_each_distinct_key_is_sent_once(
    alone: None, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Framework(framework)
    ps = one.ps
    tags, more = one.bag("sum", "tags"), one.bag("max", "tags")
    users = ps.Embedding("users", 2, optimizer=ps.SGD(1.0))
    layers = ps.EmbeddingCollection({"tags": tags, "more": more, "users": users})
    client = ps.client()
    pulls: list[dict[str, int]] = []
    pushes: list[dict[str, list[int]]] = []
    pull, push = client.pull_distinct, client.push_and_pull

    def pulled(wanted: Any, **how: Any) -> Any:
        pulls.append({table: keys.size for table, keys in wanted.items()})
        return pull(wanted, **how)

    def pushed(grads: Any, tables: Any, **how: Any) -> Any:
        pushes.append({table: sorted(keys.tolist()) for table, (keys, _) in grads.items()})
        return push(grads, tables, **how)

    monkeypatch.setattr(client, "pull_distinct", pulled)
    monkeypatch.setattr(client, "push_and_pull", pushed)
    offsets = one.keys([0, 2])
    found = layers({"tags": (one.keys([4, 4, 5]), offsets), "users": one.keys([1, 1]), "more": one.keys([[6, 8]])})
    assert [tuple(found[name].shape) for name in ("tags", "users", "more")] == [(2, 3), (2, 2), (1, 3)]
    assert pulls == [{"tags": 5, "users": 2}], "one request for all"
    found["tags"].sum().backward()
    ps.step()
    assert pushes == [{"tags": [4, 5]}], "distinct keys, and none of a bag without gradients"
    with pytest.raises(SettingError, match=r"words.*which has tags, more, users"):
        layers({"words": one.keys([1])})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_evaluation_and_batches_without_keys(alone: None, framework: str) -> None:
    one = Framework(framework)
    layer = one.bag("mean", padding_key=0)
    for keys, offsets in (([], [0, 0, 0]), ([0, 0], [0, 1, 2])):
        found = layer(one.keys(keys), one.keys(offsets))
        assert tuple(found.shape) == (3, 3) and not array(found).any()
        found.sum().backward()
        one.ps.step()
    assert one.ps.client().store.rows("t") == 0
    assert tuple(layer(one.keys(np.zeros((2, 0)))).shape) == (2, 3)
    layer.eval()
    found = layer(one.keys([[1, 2], [0, 2]]))
    np.testing.assert_allclose(array(found)[1], one.rows([2])[0])
    assert one.ps.client().store.rows("t") == 0 and "padding_key=0" in repr(layer)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_repeated_keys_count_each_time(alone: None, framework: str) -> None:
    one = Framework(framework)
    layer = one.bag("sum", admission=one.ps.Admission(count=3))
    layer(one.keys([1, 1, 2, 1, 2]), one.keys([0, 2]))
    assert one.ps.client().store.rows("t") == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arguments_that_do_not_fit_are_named(alone: None, framework: str) -> None:
    one = Framework(framework)
    with pytest.raises(SettingError, match=r"mode='median': must be sum, mean or max"):
        one.bag("median")
    with pytest.raises(SettingError, match=r"padding_key=0\.5: must be an integer"):
        one.bag("sum", padding_key=0.5)
    layer = one.bag("mean")
    with pytest.raises(SettingError, match="mode of the bag of table t=mean: must be sum if there are"):
        layer(one.keys([[1]]), None, one.floats([[1]]))
    with pytest.raises(SettingError, match=r"of table t=\(2,\): must be that of the keys, \(1, 2\)"):
        one.bag("sum")(one.keys([[1, 2]]), None, one.floats([1, 1]))


@pytest.mark.parametrize(
    ("offsets", "last", "said"),
    [
        ([1], False, "offsets of table t=1: must begin with 0"),
        ([], True, "offsets of table t=none: must begin with 0"),
        ([0, 2, 1], False, r"t=2, 1: must not fall, nor exceed 3, .* \(bag 1\)"),
        ([0, 4], False, "t=4, 3: must not fall"),
        ([0, 2], True, "t=2: must end with 3, the number of keys"),
        ([0.0], False, r"t=float64 \(1,\): must be integers"),
        ([[0]], False, r"t=int64 \(1, 1\): must be integers in one dimension"),
    ],
)
def test_bad_offsets(offsets: list[Any], last: bool, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        bags_of(np.arange(3), np.array(offsets, None if offsets else np.int64), "t", last=last)


def test_keys_need_a_shape() -> None:
    with pytest.raises(SettingError, match=r"t=\(3,\): must be \(bags, length\)\. Or give offsets"):
        bags_of(np.arange(3), None, "t")
    with pytest.raises(SettingError, match="must have one dimension with offsets"):
        bags_of(np.zeros((2, 2), np.int64), np.array([0]), "t")


def test_padding_moves_the_bounds() -> None:
    random = np.random.default_rng(2)
    for _ in range(50):
        lengths = random.integers(0, 4, 6)
        keys = random.integers(0, 3, lengths.sum())
        ends = np.cumsum(lengths)
        bags = bags_of(keys, np.array([0, *ends]), "t", last=True, padding=1)
        expected = [[key for key in some if key != 1] for some in np.split(keys, ends[:-1])]
        assert [some.tolist() for some in np.split(bags.keys, bags.bounds[1:-1])] == expected
        assert bags.owners.tolist() == [at for at, some in enumerate(expected) for _ in some]
        if bags.kept is not None:
            assert keys[bags.kept].tolist() == bags.keys.tolist()
        assert unpadded(keys, 1).tolist() == bags.keys.tolist()


def test_what_is_nowhere_the_largest_is_not_trained() -> None:
    keys, grads = np.array([1, 2]), np.array([[0.0, 0.0], [0.0, 1.0]], np.float32)
    assert trained(keys, grads, "sum")[0].tolist() == [1, 2]
    assert trained(keys, grads, "max")[0].tolist() == [2]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_in_half_precision(alone: None, framework: str) -> None:
    one = Framework(framework)
    ps = one.ps
    bag = ps.EmbeddingBag("t", 3, mode="sum", initial=ps.Normal(1.0), weights=ps.WeightFormat.F2)
    found = array(bag(one.keys([[5]])))
    assert np.array_equal(found, found.astype(np.float16).astype(np.float32))
    assert ps.Embedding("u", 3, weights=ps.WeightFormat.BF16).table == "u"
    with pytest.raises(SettingError, match="weights f4 here, f2 there"):
        one.bag("sum")
