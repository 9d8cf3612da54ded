"""A job that starts from the weights of another one, and the names of parameters in exports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import edl.torch.ps as ps  # noqa: E402
from edl.errors import CheckpointError, PsError  # noqa: E402
from edl.worker import session as sessions  # noqa: E402
from ps.client import export  # noqa: E402
from ps.client.dense import DenseLayout  # noqa: E402
from ps.client.frontend import part  # noqa: E402
from ps.rows import concat  # noqa: E402
from ps.spec import Optimizer, differences  # noqa: E402

pytestmark = pytest.mark.torch
KEYS = torch.tensor([3, -7, 1 << 40])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sessions, "_current", None)
    part.forget()
    yield
    part.forget()


def script(dim: int = 2, out: int = 3) -> tuple[Any, Any]:
    """The model of a job that begins now."""
    part.forget()
    ps.init(local=True)
    users = ps.Embedding("users", dim, optimizer=ps.SGD(1.0), initial=ps.Normal(1.0))
    layer = torch.nn.Linear(2, out)
    ps.Dense(layer, ps.SGD(1.0))
    return users, layer


def train(users: Any, layer: Any) -> None:
    layer(users(KEYS)).sum().backward()
    ps.step()


def exported(folder: Path) -> Path:
    """Write an export of the tables in this process."""
    client: Any = ps.client()

    def rows(spec: Any) -> Any:
        tables = client.store.tables[spec.name].shard_tables.all
        return [concat([one.gather(one.live()) for one in tables])]

    export.write(folder, list(client.tables.values()), rows)
    return folder


def test_a_job_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    users, layer = script()
    train(users, layer)
    expected, weight = users(KEYS).detach(), layer.weight.detach().clone()
    source = exported(tmp_path / "out")
    named = export.open(source).parameters()
    assert list(named) == ["weight", "bias"] and np.array_equal(named["weight"], weight.numpy())

    users, layer = script()
    users(torch.tensor([3]))  # has a row already
    fresh = users(torch.tensor([3, 8])).detach()
    assert ps.warm_start(source) == {"dense": 1, "users": 3}
    assert torch.equal(users(KEYS)[1:], expected[1:]) and torch.equal(users(torch.tensor([3, 8])), fresh)
    assert torch.equal(layer.weight, weight)
    train(users, layer)
    after = layer.weight.detach().clone()
    assert ps.warm_start(source) == {} and torch.equal(layer.weight, after), "a trainer that was restarted"


def test_a_mark_of_the_other_job_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job may have begun from a third one. A trainer that dies in the middle must begin again."""
    train(*script())
    first = exported(tmp_path / "first")
    users, _ = script()
    assert ps.warm_start(first) == {"dense": 1, "users": 3}
    second = exported(tmp_path / "second")
    expected = users(KEYS).detach()

    users, _ = script()
    client: Any = ps.client()
    push = client.push

    def dies(grads: Any, **options: Any) -> None:
        if "users" in grads:
            raise PsError("killed")
        push(grads, **options)

    monkeypatch.setattr(client, "push", dies)
    with pytest.raises(PsError, match="killed"):
        ps.warm_start(second)
    monkeypatch.undo()
    assert ps.warm_start(second) == {"dense": 1, "users": 3}
    assert torch.equal(users(KEYS), expected)


def test_results_of_the_other_job_stay_there(tmp_path: Path) -> None:
    train(*script())
    counted, shown = ps.Auc(), ps.Counters("shown", ("show",))
    counted.update([0.2, 0.9], [0, 1])
    counted.push()
    shown.add(KEYS, show=2.0)
    ps.step()
    assert counted.compute() == 1.0
    source = exported(tmp_path / "out")

    script()
    counted, shown = ps.Auc(), ps.Counters("shown", ("show",))
    assert ps.warm_start(source) == {"dense": 1, "shown": 3, "users": 3}
    assert np.isnan(counted.compute()) and (shown.read(KEYS)["show"] == 2.0).all(), "counters are input of the model"
    assert ps.warm_start(source, tables=["auc"]) == {}, "done before"


def test_only_some_tables_and_what_does_not_fit(tmp_path: Path) -> None:
    train(*script())
    source = exported(tmp_path / "out")
    script(dim=4, out=3)
    with pytest.raises(PsError, match=r"table users: any rows of 4 here, any of 2 in .*out\. Leave it out of tables"):
        ps.warm_start(source)
    assert ps.client().pull("dense", np.zeros(1, np.int64), insert=False).any()
    assert ps.warm_start(source, tables="dense") == {"dense": 1}
    script()
    with pytest.raises(PsError, match=r"table words: the export .* has no such table"):
        ps.warm_start(source, tables=["words"])
    with pytest.raises(CheckpointError, match="not a complete export"):
        ps.warm_start(tmp_path)


def test_names_belong_to_the_definition_of_a_dense_table() -> None:
    one = DenseLayout({"a": (2, 3), "b": (4,)}, 256).spec("dense", Optimizer())
    other = DenseLayout({"a": (2, 3), "c": (4,)}, 256).spec("dense", Optimizer())
    assert one.difference(other) == "parameter b (4,) here, c (4,) there"
    assert one.difference(DenseLayout({"a": (10,)}, 256).spec("dense", Optimizer())) == (
        "parameter a (2, 3) here, a (10,) there"
    )
    older = replace(one, parameters=())
    assert one.difference(older) == older.difference(other) == "" and differences([older], [one]) == ""
