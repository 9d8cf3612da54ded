"""Code shared by both frameworks: one push per step, joining, and when a trainer counts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from data_service.loader import trainers  # noqa: E402
from edl.errors import PsError, SettingError, StateError  # noqa: E402
from edl.worker import session as sessions  # noqa: E402
from ps.client import frontend  # noqa: E402
from ps.client.frontend import InitOptions, PsContext  # noqa: E402
from ps.client.late_push import LatePush  # noqa: E402
from ps.client.layer_arguments import integer_keys  # noqa: E402
from ps.client.local import LocalClient  # noqa: E402
from ps.client.member_count import MemberCount  # noqa: E402
from ps.optimizers import SGD, Adam, Zeros  # noqa: E402
from ps.spec import Damaged, Optimizer, TableSpec  # noqa: E402


class Recorder(LocalClient):
    """A client that says what it was asked for."""

    def __init__(self, tables: Any, said: list[str], restored: str = "") -> None:
        self.said = said
        super().__init__(tables)
        self.restored = restored

    def begin(self) -> None:
        self.said.append("begin")

    def rest(self) -> None:
        self.said.append("rest")

    def boundary(self) -> None:
        self.said.append("boundary")

    def leave(self) -> None:
        self.said.append("leave")

    def pull(self, table: str, keys: Any, out: Any = None, *, insert: bool = True) -> Any:
        self.said.append(f"pull {table} {keys.size}" + ("" if insert else " without a trace"))
        return super().pull(table, keys, out, insert=insert)

    def push(self, grads: Mapping[str, Any], *, op: str = "grad", wait: bool = True, records: Any = None) -> None:
        self.said.append(f"{op} " + " ".join(f"{table}:{keys.size}" for table, (keys, _) in grads.items()))
        super().push(grads, op=op)

    def push_and_pull(self, grads: Mapping[str, Any], tables: Sequence[str], *, records: Any = None) -> dict[str, Any]:
        self.push(grads)
        back = {table: grads[table][0] for table in tables}
        self.said += [f"back {table} {keys.size}" for table, keys in back.items()]
        return {table: LocalClient.pull(self, table, keys, insert=False) for table, keys in back.items()}


class Vector:
    """A dense module of two parameters."""

    def __init__(self, name: str = "dense", every: int = 1) -> None:
        self.name, self.every = name, every
        self.values = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
        self.grads: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        return dict(self.values)

    def write(self, values: Mapping[str, Any]) -> None:
        self.values = {name: np.array(value) for name, value in values.items()}

    def take_gradients(self) -> dict[str, Any] | None:
        grads, self.grads = self.grads, None
        return grads


def spec(name: str = "t", dim: int = 2, optimizer: Optimizer | None = None) -> TableSpec:
    return TableSpec(name, dim, optimizer or SGD(1.0), Zeros())


def keys(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def part(said: list[str]) -> Iterator[PsContext]:
    one = PsContext(lambda plan, specs: Recorder(specs, said))
    yield one
    one.forget()


def test_a_step_is_one_push_with_everything(part: PsContext, said: list[str]) -> None:
    part.declare(spec("t"))
    part.declare(spec("u", 1))
    vector = Vector()
    part.declare_dense(vector, SGD(0.5), Damaged.REFUSE)
    for table, some in (("t", keys(1, 2, 2)), ("t", keys(2)), ("u", keys(7))):
        rows = part.pull(table, some, insert=True)
        part.collect(table, some, np.ones_like(rows))
    vector.grads = {name: np.ones_like(value) for name, value in vector.values.items()}
    said.clear()
    part.step()
    assert said == ["grad t:4 u:1 dense:1", "back dense 1", "boundary"]
    assert part.pull("t", keys(1, 2), insert=False).tolist() == [[-1, -1], [-3, -3]]
    assert vector.values["a"].tolist() == [-0.5, 0.5, 1.5] and vector.values["b"].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_what_was_pushed_is_not_pushed_again(part: PsContext, said: list[str]) -> None:
    part.declare(spec())
    part.collect("t", keys(1), np.ones((1, 2), np.float32))
    part.step()
    part.step()
    assert [word for word in said if word.startswith("grad")] == ["grad t:1", "grad "]


def test_a_push_that_is_made_again_goes_out_with_the_last_of_its_batches(
    part: PsContext, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that steps earlier, by its own count, loses no gradient and finds its own cleared."""
    part.declare(spec())
    vector = Vector()
    part.declare_dense(vector, SGD(0.5), Damaged.REFUSE)
    for lacks in (True, True, False):
        monkeypatch.setattr(trainers, "redoing", lambda lacks=lacks: lacks)
        part.collect("t", keys(1), np.ones((1, 2), np.float32))
        vector.grads = {"a": np.ones(3, np.float32)}
        part.step()
        assert vector.grads is None
    assert [word for word in said if word.startswith("grad")] == ["grad t:3 dense:1"]
    assert vector.values["a"].tolist() == [-1.5, -0.5, 0.5] and vector.values["b"].tolist() == [[1, 1], [1, 1]]


def test_a_trainer_counts_from_its_first_pull_for_training_on(part: PsContext, said: list[str]) -> None:
    part.declare(spec())
    part.pull("t", keys(1), insert=False)
    with part.no_insert():
        part.pull("t", keys(1), insert=True)
    assert "begin" not in said
    part.pull("t", keys(1), insert=True)
    part.pull("t", keys(2), insert=True)
    assert said.count("begin") == 1
    part.rest()
    part.rest()
    part.pull("t", keys(1), insert=False)
    assert said.count("rest") == 1 and said.count("begin") == 1
    part.step()
    assert said.count("begin") == 2


def test_begin_and_rest_together(said: list[str]) -> None:
    """Those who wait look at how many have taken part; the others come and go meanwhile."""
    counts = iter([1, 2, 3, 1, 1, 0])

    class Seen:
        @property
        def most(self) -> int:
            said.append("look")
            return next(counts)

        fewest = most

    class Remote:
        tables: Mapping[str, TableSpec] = {}
        restored = ""
        number = 1

        def fence(self, trainer: int) -> tuple[int, str]:
            return -1, ""

        def watch_members(self) -> Seen:
            return Seen()

        def on_checkpoint(self, **_: object) -> None: ...

        def boundary(self) -> None: ...

        def begin(self) -> None:
            said.append("begin")

        def rest(self) -> None:
            said.append("rest")

        def leave(self) -> None: ...

    client: Any = Remote()
    one = PsContext(lambda plan, specs: client)
    one.begin(3)
    one.rest(wait_for_all=True)
    assert said == ["begin", *["look"] * 3, "rest", *["look"] * 3]
    one.forget()


@pytest.mark.parametrize("name", ["wait_for_all", "everybody"])
def test_either_name_waits_for_the_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(frontend.part, "rest", asked.append)
    frontend.rest(**{name: True})
    frontend.rest()
    assert asked == [True, False]


def test_trainers_that_wait_for_data_hold_up_no_other_trainer(part: PsContext, said: list[str]) -> None:
    part.declare(spec())
    trainers.trainers.opening()
    part.pull("t", keys(1), insert=True)
    trainers.trainers.idle()
    assert said[-1] == "rest"


def test_a_trainer_that_rests_still_rests_after_the_data_set_has_pushed(part: PsContext, said: list[str]) -> None:
    """It waits for data: in mode sync the others would wait for its next step."""
    part.declare(spec())
    part.collect("t", keys(1), np.ones_like(part.pull("t", keys(1), insert=True)))
    trainers.trainers.idle()
    trainers.trainers.push()
    assert said[-5:] == ["rest", "begin", "grad t:1", "boundary", "rest"]
    part.collect("t", keys(1), np.ones_like(part.pull("t", keys(1), insert=True)))
    trainers.trainers.push()
    assert said[-2:] == ["grad t:1", "boundary"]


def test_first_values_are_those_of_who_comes_first(said: list[str]) -> None:
    shared = Recorder([], said)
    found = []
    for start in (5.0, 9.0):

        def join(plan: InitOptions, specs: Sequence[TableSpec]) -> Recorder:
            for each in specs:
                shared.define(each)
            return shared

        one = PsContext(join)
        vector = Vector()
        vector.values = {name: np.full_like(value, start) for name, value in vector.values.items()}
        one.declare_dense(vector, Adam(), Damaged.REFUSE)
        assert one.client is not None
        found.append(vector.values["b"].tolist())
        one.forget()
    assert found == [[[5.0, 5.0], [5.0, 5.0]]] * 2


def test_dense_values_every_few_steps(part: PsContext) -> None:
    vector = Vector(every=2)
    part.declare_dense(vector, SGD(1.0), Damaged.REFUSE)
    seen = []
    for _ in range(4):
        vector.grads = {name: np.ones_like(value) for name, value in vector.values.items()}
        part.step()
        seen.append(float(vector.values["b"][0, 0]))
    assert seen == [1.0, -1.0, -1.0, -3.0]
    vector.grads = {name: np.ones_like(value) for name, value in vector.values.items()}
    part.step()
    part.refresh()
    assert float(vector.values["b"][0, 0]) == -4.0


def test_one_table_is_declared_one_way(part: PsContext) -> None:
    part.declare(spec(optimizer=SGD(0.1)))
    part.declare(spec(optimizer=SGD(0.1)))
    with pytest.raises(SettingError, match=r"dim 3 here, 2 there"):
        part.declare(spec(dim=3, optimizer=SGD(0.1)))
    with pytest.raises(SettingError, match=r"lr 0\.2, before 0\.1"):
        part.declare(spec(optimizer=SGD(0.2)))
    with pytest.raises(SettingError, match="a name of its own"):
        part.declare_dense(Vector("t"), SGD(), Damaged.REFUSE)


def test_a_table_may_come_late(part: PsContext) -> None:
    part.declare(spec("t"))
    part.pull("t", keys(1), insert=True)
    part.declare(spec("late", 3))
    assert part.pull("late", keys(1), insert=True).shape == (1, 3)
    with pytest.raises(StateError, match="before the first forward pass"):
        part.init(InitOptions())


def test_after_leaving_nothing_more(part: PsContext, said: list[str]) -> None:
    part.declare(spec())
    part.pull("t", keys(1), insert=True)
    part.leave()
    part.leave()
    assert said.count("leave") == 1
    with pytest.raises(StateError, match="has left the parameter servers"):
        part.step()


def test_a_forked_process_does_not_wait_for_the_push_of_the_other(
    part: PsContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that pushes exists in the other only."""

    def never() -> dict[str, Any]:
        raise AssertionError("it waits")

    assert part.client is not None
    part._late = LatePush(never, 1)
    mine = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: mine + 1)
    part._leave_at_exit()


def test_evaluation_prefetches_nothing(part: PsContext, monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        table, training = "t", True

    prefetched: list[str] = []
    monkeypatch.setattr(LocalClient, "prefetch", lambda _, table, keys: prefetched.append(table))
    part.declare(spec())
    layer = Layer()
    part.prefetch(layer, keys(1))
    part.prefetch("t", keys(1))
    assert prefetched == ["t", "t"]
    with part.no_insert():
        part.prefetch(layer, keys(1))
        part.prefetch("t", keys(1))
    layer.training = False
    part.prefetch(layer, keys(1))
    assert prefetched == ["t", "t"]


def test_a_step_without_gradients_is_named_once(part: PsContext, capsys: pytest.CaptureFixture[str]) -> None:
    part.declare(spec())
    part.pull("t", keys(1), insert=True)
    part.step()
    assert capsys.readouterr().err == ""
    part.expect()
    part.step()
    part.step()
    assert capsys.readouterr().err.count("call loss.backward() before it") == 1


def test_data_begin_where_the_parameters_come_from(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(trainers, "begin_from", lambda *words: told.append(words))
    text = json.dumps(
        {"run": "checkpoint-3", "checkpoint": 3, "history": 2, "step": 40, "ledgers": {"clicks": "x"}, "values": {}}
    )
    one = PsContext(lambda plan, specs: Recorder(specs, said, text))
    one.declare(spec())
    trainers.trainers.opening()  # before the first batch
    assert told == [("checkpoint-3", {"clicks": "x"}, 2)]
    assert one.restored["step"] == 40
    one.forget()


# --- how a process joins ---------------------------------------------------------------------------------------------


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_current", None)


@pytest.mark.usefixtures("unlaunched")
def test_without_a_launcher_it_says_what_to_do() -> None:
    one = PsContext()
    one.declare(spec())
    with pytest.raises(PsError, match=r"--run-mode=ps.*or call ps\.init\(local=True\)"):
        one.pull("t", keys(1), insert=True)
    one.init(InitOptions(local=True))
    assert isinstance(one.client, LocalClient)
    one.forget()


def test_a_job_without_pservers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = sessions.Session(object(), {})  # type: ignore[arg-type]
    monkeypatch.setattr(sessions, "_current", session)
    one = PsContext()
    one.declare(spec())
    one.plan = InitOptions(local=True)
    with pytest.raises(PsError, match="this job has no parameter servers"):
        one.step()
    one.forget()


# --- tables in this process ------------------------------------------------------------------------------------------


def test_lr_by_table_and_step() -> None:
    local = LocalClient([spec("t"), spec("u")])

    def pushed(table: str) -> float:
        before = float(local.read(table, keys(1))[0, 0])
        local.push({table: (keys(1), np.ones((1, 2), np.float32))})
        return before - float(local.read(table, keys(1))[0, 0])

    local.set_lr(0.5, "t", 2)
    local.set_lr(0.25)
    assert [pushed("t"), pushed("t"), pushed("t"), pushed("u")] == [0.25, 0.25, 0.5, 0.25]
    local.set_lr(0.125)  # at once: what was set for an earlier step does not apply any more
    assert [pushed("t"), pushed("u")] == [0.125, 0.125]
    with pytest.raises(SettingError):
        local.set_lr(float("nan"))
    with pytest.raises(PsError, match="there is no table x; the defined tables are: t, u"):
        local.set_lr(1.0, "x")
    with pytest.raises(PsError, match=r"step=10000.0: must be an integer"):
        local.set_lr(0.5, step=1e4)  # type: ignore[arg-type]


def test_wrong_shapes_are_refused() -> None:
    local = LocalClient([spec("t")])
    with pytest.raises(PsError, match=r"gradients have shape \(1, 2\)"):
        local.push({"t": (keys(1, 2), np.ones((1, 2), np.float32))})
    with pytest.raises(PsError, match="checkpoints need a launcher"):
        local.save()


@pytest.mark.parametrize("wrong", [[1.5], np.array([1 << 63], np.uint64), ["a"]])
def test_a_plain_script_is_checked_as_one_with_a_launcher_is(wrong: Any) -> None:
    local = LocalClient([spec("t")])
    assert local.pull("t", [[1, 2]]).shape == (1, 2, 2) and local.pull_distinct({"t": [1, 1]})["t"][1].shape == (1, 2)
    local.push({"t": ([1, 2], [[1.0, 1.0], [2.0, 2.0]])})
    assert local.read("t", [2]).tolist() == [[-2, -2]]
    for call in (
        lambda: local.pull("t", wrong),
        lambda: local.pull_distinct({"t": wrong}),
        lambda: local.push({"t": (wrong, np.zeros((1, 2), np.float32))}),
    ):
        with pytest.raises(PsError, match="table t: key"):
            call()
    with pytest.raises(PsError, match="table t: gradients have shape"):
        local.push({"t": ([1, 2], np.zeros((1, 4), np.float32))})


def test_the_tables_of_a_plain_script_can_be_read_as_a_whole() -> None:
    """``ps.client()`` has the same methods with and without a launcher."""
    local = LocalClient([spec("t"), spec("u", 1)])
    many = keys(*range(0, 5000, 5))
    local.pull("t", np.concatenate((many, many[:10])))
    local.push_and_pull({"t": (many, np.ones((1000, 2), np.float32))}, ["t"])
    local.assign("t", keys(0), np.full((1, 2), 7, np.float32))
    local.flush()
    rows = list(local.scan("t"))
    found = {key: one for part in rows for key, one in zip(part.keys.tolist(), part.weights.tolist(), strict=True)}
    assert found == {key: [7, 7] if key == 0 else [-1, -1] for key in range(0, 5000, 5)}
    assert list(local.scan("u")) == []
    counts = local.statistics
    assert (counts["pulls"], counts["keys"], counts["distinct"], counts["pushes"]) == (1, 1010, 1000, 2)
    with pytest.raises(PsError, match="there is no table x"):
        next(local.scan("x"))


def test_keys_beyond_int64_are_refused_and_not_wrapped() -> None:
    assert integer_keys(np.array([1, 2**63 - 1], np.uint64)).tolist() == [1, 2**63 - 1]
    with pytest.raises(SettingError, match="9223372036854775808"):
        integer_keys(np.array([1, 2**63], np.uint64))


def test_a_trainer_that_waits_for_others_to_begin_stops_with_them(said: list[str]) -> None:
    class Late(Recorder):
        """Others come after it has looked twice."""

        def boundary(self) -> None:
            super().boundary()
            seen.most += 1

        def watch_members(self) -> MemberCount:
            return seen

    seen = MemberCount()

    PsContext(lambda plan, specs: Late(specs, said)).begin(2)
    assert said == ["begin", "boundary", "boundary"]


def test_begin_finds_the_weights_that_another_has_set_meanwhile(said: list[str]) -> None:
    class Warm(Recorder):
        """Another trainer sets the weights, and then joins."""

        def boundary(self) -> None:
            self.assign("dense", keys(0), np.full((1, 7), 5, np.float32))
            seen.most += 1

        def watch_members(self) -> MemberCount:
            return seen

    seen, vector = MemberCount(), Vector()
    one = PsContext(lambda plan, specs: Warm(specs, said))
    one.declare_dense(vector, SGD(), Damaged.REFUSE)
    one.begin(1)
    assert vector.values["a"].tolist() == [5, 5, 5] and vector.values["b"].tolist() == [[5, 5], [5, 5]]
    one.forget()
