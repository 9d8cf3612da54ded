from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy

from edl import free_memory
from edl.errors import CheckpointError, StateError
from edl.wire import local, snapshot
from edl.wire.local import OWN, STATE
from edl.worker import part_numbers
from edl.worker.accumulate import run_steps
from edl.worker.boundary import RoundOver
from edl.worker.link import Link
from edl.worker.numbers import SEED
from edl.worker.session import PeersLost
from edl.worker.state import BaseState
from edl.worker.steps import Share
from tests.support.fake_agent import JOB, TIMEOUT_S, FakeFramework, Generator, Model, Tensor, Worker, begin


@pytest.fixture(autouse=True, params=[False, True], ids=["synchronous", "asynchronous"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test on both kinds."""
    monkeypatch.setattr(FakeFramework, "asynchronous", request.param)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def made(**values: Any) -> BaseState:
    return BaseState(FakeFramework(), values)


class Alone(FakeFramework):
    """In a world of ``size`` ranks, which share no part of the state."""

    size = 1

    def exchange(self, data: bytes) -> list[bytes]:
        if b'"ranks"' not in data:
            return [data]
        mine = part_numbers.decode(data)
        ranks = [part_numbers.Claim((rank,), {}, "b") for rank in range(self.size)]
        return [part_numbers.encode(mine if one.ranks == mine.ranks else one) for one in ranks]


class Half:
    def state_dict(self) -> dict[str, Any]:
        return {}


# --- attributes ------------------------------------------------------------------------------------------------------


def test_values_are_attributes() -> None:
    model = Model()
    state = made(model=model, epoch=0, history=[])
    state.epoch += 2
    state.history.append(1)
    assert (state.epoch, state.history, state.model, state.commits, state.era) == (2, [1], model, 0, 0)
    assert {"model", "epoch", "commit"} <= set(dir(state))
    assert repr(state) == "State(model, epoch, history; 0 commits)"


def test_typing_errors_are_named() -> None:
    state = made(model=Model(), epoch=0)
    with pytest.raises(AttributeError, match="no 'epohc' to set; it has model, epoch"):
        state.epohc = 3
    with pytest.raises(AttributeError, match="no 'epohc'; it has model, epoch"):
        print(state.epohc)
    with pytest.raises(AttributeError, match=r"state\.model is an object, which cannot be replaced"):
        state.model = Model()
    with pytest.raises(AttributeError, match="no 'commits' to set"):
        state.commits = 3  # type: ignore[misc]
    with pytest.raises(StateError, match=r"state\.epoch: a set cannot be kept"):
        state.epoch = {1}
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del state.epoch


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hook", len, r"state\.hook: a builtins\.builtin_function_or_method cannot be kept; .*no state_dict\(\) and"),
        ("half", Half(), r"state\.half: a .*Half cannot be kept; .* it has no load_state_dict\(\)"),
        ("commit", 1, r"state\.commit: this name is reserved or invalid"),
        ("_x", 1, "reserved or invalid"),
        ("a.b", 1, "reserved or invalid"),
    ],
)
def test_what_cannot_be_kept_is_named_at_once(name: str, value: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        BaseState(FakeFramework(), {name: value})


def test_copy_every_is_checked() -> None:
    with pytest.raises(StateError, match="copy_every=0"):
        BaseState(FakeFramework(), {}, copy_every=0)


def test_commit_belongs_into_run() -> None:
    with pytest.raises(StateError, match="in the function that run calls"):
        made(epoch=0).commit()


# --- committing ------------------------------------------------------------------------------------------------------


def test_a_commit_is_a_safetensors_file(worker: Worker) -> None:
    model = Model(2, 2)
    state = made(model=model, epoch=3, best=float("inf"), noise=np.arange(3))
    begin(worker, state)
    model.weight.data[:] = 7
    state.commit()
    worker.settle()
    data = worker.agent.kept[STATE, 1, 1, 0]
    read = safetensors.numpy.load(data)
    assert read.keys() == {"model.layer.weight", "noise"}
    assert read["model.layer.weight"].tolist() == [[7, 7], [7, 7]]
    found = snapshot.parse(data, job=JOB)
    assert (found.meta.era, found.meta.commit, found.meta.round, found.meta.framework) == (1, 1, 1, "numpy")
    assert found.tree["values"]["epoch"] == 3
    json.dumps(found.tree, allow_nan=False)
    assert (state.commits, state.era) == (1, 1)


def test_only_the_first_of_a_node_commits_what_all_share(worker: Worker) -> None:
    state = made(epoch=0, random=Generator(5))
    begin(worker, state, rank=3, local_rank=1, world_size=4, local_world_size=2)
    state.commit()
    worker.settle()
    assert list(worker.agent.kept) == [(OWN, 1, 1, 3)]
    assert snapshot.parse(worker.agent.kept[OWN, 1, 1, 3]).tree["objects"]["random"]["at"] == 5


def test_each_commits_its_shard(worker: Worker) -> None:
    state = BaseState(Alone(), {"epoch": 0}, sharded=True)
    state._framework.size = 4  # type: ignore[attr-defined]
    begin(worker, state, rank=3, local_rank=1, world_size=4, local_world_size=2)
    state.save()
    worker.settle()
    said = [one for one in worker.agent.said if isinstance(one, local.Committed)]
    assert [(one.shard, one.shards, one.save) for one in said] == [(3, 4, True)]


def test_only_some_commits_are_copied(worker: Worker) -> None:
    state = BaseState(FakeFramework(), {"epoch": 0}, copy_every=3)
    begin(worker, state)
    for _ in range(7):
        state.commit()
    state.save()
    worker.settle()
    assert worker.agent.versions() == [(1, 3), (1, 6), (1, 8)]
    assert [one.save for one in worker.agent.said if isinstance(one, local.Committed)] == [False, False, True]


def test_a_planned_change_copies_at_its_boundary(worker: Worker) -> None:
    state = BaseState(FakeFramework(), {"epoch": 0}, copy_every=100)
    begin(worker, state)
    for purpose, leaves, saved in (("save", False, True), ("switch", True, False)):
        worker.agent.send(local.HoldAtBoundary(1, 7))
        assert worker.agent.expect(local.Here).commit == state.commits
        worker.agent.send(local.Target(7, state.commits + 1, purpose, "why"))
        if leaves:
            with pytest.raises(RoundOver):
                state.commit()
        else:
            state.commit()
        worker.settle()
        assert worker.agent.versions()[-1] == (1, state.commits)
        assert [one.save for one in worker.agent.said if isinstance(one, local.Committed)][-1] is saved


def test_the_layout_may_change(worker: Worker) -> None:
    model = Model()
    state = made(model=model)
    begin(worker, state)
    for number in range(1, 8):
        model.extra = {"table": Tensor(np.full(100_000 * (number % 3), number))}
        state.commit()
    worker.settle()
    for number in range(1, 8):
        read = safetensors.numpy.load(worker.agent.kept[STATE, 1, number, 0])
        assert read["model.extra.table"].tolist() == [number] * (100_000 * (number % 3))


def test_without_memory_training_goes_on(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    worker.agent.refusal = "raise --state-memory"
    state = made(epoch=0)
    begin(worker, state)
    for _ in range(3):
        state.commit()
    assert capfd.readouterr().err == (
        "edl: commits are not kept in memory, because there is no memory for them: raise --state-memory\n"
    )
    for _ in range(2):
        state.save()
    assert capfd.readouterr().err.count("nothing is saved, because there is no memory") == 2
    assert state.commits == 5
    assert state._first is not None, "what a world without a commit begins from"


def test_what_cannot_be_kept_is_named_when_it_is_there(worker: Worker) -> None:
    model = Model()
    state = made(model=model)
    begin(worker, state)
    model.extra = {"order": {1, 2}}
    with pytest.raises(StateError, match=r"state\.model\.extra\.order: a set cannot be kept; use a list"):
        state.commit()


def test_a_commit_costs_little_beside_the_copy(worker: Worker) -> None:
    model = Model()
    model.extra = {f"layer{index}.weight": Tensor(np.zeros(10, np.float32)) for index in range(20)}
    state = made(model=model, epoch=0)
    begin(worker, state)
    costs = []
    for _ in range(50):
        worker.settle()
        start = time.perf_counter()
        state.commit()
        costs.append(time.perf_counter() - start)
    assert min(costs) < 0.002  # measured: 0.0003 s; this machine may be busy


# --- restoring -------------------------------------------------------------------------------------------------------


def committed(worker: Worker, **values: Any) -> None:
    """Commit 1 of era 1 holds these."""
    state = made(**values)
    begin(worker, state)
    state.commit()
    worker.settle()


def restore(worker: Worker, state: BaseState, **changes: Any) -> None:
    worker.session.state = None
    begin(worker, state, restore_era=1, restore_commit=1, **changes)


def test_everything_comes_back(worker: Worker) -> None:
    model = Model()
    model.weight.data[:] = 5
    model.extra = {0: Tensor(np.arange(3)), "lr": (0.1, None)}
    committed(worker, model=model, epoch=4, noise=np.arange(3), scale=Tensor(2))
    other = Model()
    state = made(model=other, epoch=0, noise=np.zeros(3, int), scale=Tensor(0))
    restore(worker, state)
    assert (state.epoch, state.scale, state.commits, state.era) == (4, Tensor(2), 1, 2)
    assert isinstance(state.noise, np.ndarray) and state.noise.tolist() == [0, 1, 2]
    assert other.weight == model.weight
    assert other.extra == model.extra
    state.commit()
    worker.settle()
    assert (2, 2) in worker.agent.versions()


def test_what_is_kept_is_no_view_of_shared_memory(worker: Worker) -> None:
    model = Model()
    model.extra = {"big": Tensor(np.ones(100_000))}
    committed(worker, model=model, scale=Tensor(np.ones(100_000)), noise=np.ones(100_000))
    link = worker.link
    link._wait(lambda: not link._streams[STATE].due, TIMEOUT_S)  # the buffer for the next commit is mapped by now
    gc.collect()
    maps = Path("/proc/self/maps")
    before = maps.read_text().count("memfd")
    state = made(model=Model(), scale=0, noise=0)
    restore(worker, state)
    assert maps.read_text().count("memfd") == before
    state.scale.data[:] = state.noise[:] = state.model.extra["big"].data[:] = 3


def test_a_new_value_keeps_what_it_was_made_with(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    committed(worker, epoch=4, old=1)
    state = made(epoch=0, new=2)
    restore(worker, state)
    assert (state.epoch, state.new) == (4, 2)
    assert "this script's state lacks: old" in capfd.readouterr().err


def test_a_new_value_gets_that_back_at_each_restore(worker: Worker) -> None:
    """Steps that are repeated must not count twice in it. Its parts are changed in place, too."""
    committed(worker, step=4)
    state = made(step=0, seen=0, noise=np.zeros(2), scale=Tensor(np.zeros(2)), kept={"ids": [1], "all": [np.zeros(1)]})
    for _ in range(3):
        restore(worker, state)
        assert (state.step, state.seen, state.kept["ids"]) == (4, 0, [1])
        assert not any(array.any() for array in (state.noise, state.scale.data, state.kept["all"][0]))
        state.step += 1
        state.seen += 7
        state.kept["ids"].append(2)
        for array in (state.noise, state.scale.data, state.kept["all"][0]):
            array[:] = 1


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({"model": Model(), "ema": Model()}, r"commit 1 \(era 1\) does not contain ema"),
        ({}, "holds model, which this script's state does not have"),
        ({"model": 5}, "model"),
        ({"model": Model(), "epoch": Model()}, "does not contain epoch"),
        ({"model": Model(9)}, r"state\.model does not fit commit 1 \(era 1\)"),
    ],
)
def test_another_scripts_state_is_refused(worker: Worker, mine: dict[str, Any], said: str) -> None:
    committed(worker, model=Model(), epoch=1)
    with pytest.raises(CheckpointError, match=said):
        restore(worker, made(**mine))


def test_another_jobs_state_is_refused(worker: Worker) -> None:
    committed(worker, epoch=1)
    with pytest.raises(CheckpointError, match="belongs to job 'job-1', this is job 'job-2'"):
        restore(worker, made(epoch=0), environment={"EDL_JOB_ID": "job-2"})


def test_a_piece_that_nobody_has(worker: Worker) -> None:
    with pytest.raises(PeersLost, match="commit 1 of era 1 could not be fetched for rank 0: nobody has it"):
        restore(worker, made(epoch=0))


def test_each_gets_its_own_back(worker: Worker) -> None:
    committed(worker, epoch=1, random=Generator(41))
    random = Generator(0)
    restore(worker, made(epoch=0, random=random))
    assert (random.at, random.derived) == (41, [])


def test_who_has_nothing_of_its_own_derives_it(worker: Worker) -> None:
    committed(worker, epoch=1)
    random = Generator(17)
    restore(worker, made(epoch=0, random=random), rank=5, local_rank=1)
    assert (random.at, random.derived) == (17, [5])


def test_a_first_state_comes_back_when_nothing_was_committed(worker: Worker) -> None:
    model = Model()
    state = made(model=model, epoch=0, random=Generator(3))
    begin(worker, state)
    model.weight.data[:] = 9
    state.epoch, state.random.at = 5, 99
    begin(worker, state)
    assert (state.epoch, state.random.at, state.commits) == (0, 3, 0)
    assert model.weight == Model().weight


def test_a_first_state_is_forgotten_with_the_first_commit(worker: Worker) -> None:
    state = made(epoch=0)
    begin(worker, state)
    state.commit()
    with pytest.raises(StateError, match="begins from nothing, but this process has trained already"):
        begin(worker, state)


def test_who_does_not_copy_keeps_its_first_state_until_the_next_boundary(worker: Worker) -> None:
    """The worker that copies may have died in the first commit, so that nothing was committed."""
    state, place = made(epoch=0), {"rank": 1, "local_rank": 1, "world_size": 2, "local_world_size": 2}
    for _ in range(2):
        begin(worker, state, **place)
        assert (state.epoch, state.commits) == (0, 0)
        state.epoch = 5
        state.commit()
    state.commit()
    with pytest.raises(StateError, match="begins from nothing, but this process has trained already"):
        begin(worker, state, **place)


class Numbers:
    """Generators that are seeded at each boundary."""

    def edl_seed(self) -> str:
        return "7"

    def edl_reseed(self, key: bytes) -> None:
        pass


def test_a_vote_against_the_first_commit_keeps_the_seed(worker: Worker) -> None:
    """Else new workers of a later world would draw other random numbers."""
    state = made(epoch=0, numbers=Numbers())
    begin(worker, state)
    state.epoch = 5
    assert not state.commit(ok=False)
    assert state.epoch == 0
    assert state.commit(ok=True)
    worker.settle()
    assert snapshot.parse(worker.agent.kept[STATE, 1, 1, 0]).tree["values"][SEED] == "7"


@pytest.mark.parametrize("left", [32_000, 64_000])
def test_a_first_state_that_is_large_for_its_cgroup_is_not_copied(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: int
) -> None:
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_MEMBERSHIP", tmp_path / "self")
    for name, text in (("self", "0::/\n"), ("memory.max", str(1 << 30)), ("memory.current", str((1 << 30) - left))):
        (tmp_path / name).write_text(text)
    state = made(table=Tensor(np.zeros(1000)))  # 8000 bytes, and a header
    begin(worker, state)
    if left == 32_000:
        with pytest.raises(StateError, match="begins from nothing"):
            begin(worker, state)
    else:
        begin(worker, state)


# --- sharded ---------------------------------------------------------------------------------------------------------


class Sharded(BaseState):
    def __init__(self, **values: Any) -> None:
        super().__init__(Alone(), values, sharded=True)
        self._framework.size = 2  # type: ignore[attr-defined]
        self._folders: list[str] = []
        self._recut_from: list[int] = []

    def _restore_sharded(self, folder: str) -> None:
        self._folders.append(folder)

    def _recut(self, link: Link, seat: local.Seat, job: str) -> None:
        self._recut_from.append(seat.shards)


def test_each_worker_of_a_sharded_state_hands_its_part_to_its_agent(worker: Worker) -> None:
    state = Sharded(epoch=0)
    begin(worker, state, rank=1, world_size=2)
    state.save()
    worker.settle()
    (said,) = [one for one in worker.agent.said if isinstance(one, local.Committed)]
    assert (said.shard, said.shards, said.commit, said.save) == (1, 2, 1, True)


def test_a_sharded_state_stays_in_memory_when_the_world_changes(worker: Worker) -> None:
    state = Sharded(epoch=0)
    begin(worker, state, world_size=2, checkpoint_dir="/there")
    worker.agent.send(local.HoldAtBoundary(1, 7))
    worker.agent.expect(local.Here)
    worker.agent.send(local.Target(7, 1, "switch", "why"))
    worker.settle()
    with pytest.raises(RoundOver):
        state.commit()
    worker.settle()
    assert [one.save for one in worker.agent.said if isinstance(one, local.Committed)] == [False]


def test_a_worker_of_another_size_asks_for_the_headers_of_all_parts(worker: Worker) -> None:
    state = Sharded(epoch=0)
    begin(worker, state, rank=1, world_size=2, restore_era=3, restore_commit=8, shards=4)
    asked = worker.agent.expect(local.FetchHeaders)
    assert (asked.era, asked.commit, asked.shards) == (3, 8, 4)
    assert state._recut_from == [4]


def test_a_sharded_state_is_read_by_the_workers_at_another_size(worker: Worker, tmp_path: Path) -> None:
    state = Sharded(epoch=0)
    begin(worker, state, restore_era=3, restore_commit=8, stored=True, checkpoint_dir=str(tmp_path))
    assert state._folders == [str(tmp_path / "commit-0000000008.era-0000000003")]
    assert state.commits == 8
    assert not [one for one in worker.agent.said if isinstance(one, local.Fetch)]


# --- steps of several micro-batches ----------------------------------------------------------------------------------


def test_a_step_that_is_not_finished_is_not_committed(worker: Worker) -> None:
    class Unweighed:
        def begin(self, share: Share) -> None:
            pass

        def close(self) -> None:
            pass

    class Two:
        def shares(self) -> Iterator[tuple[Any, Share]]:
            yield "first", Share(1, 2, 0, 2)
            yield "second", Share(1, 2, 1, 2)

    state = made(step=0)
    begin(worker, state)
    steps = cast(Any, run_steps(Two(), cast(Any, Unweighed()), cast(Any, Unweighed())))
    for batch in next(steps):
        assert batch == "first"
        with pytest.raises(StateError, match=r"no step\.backward"):
            state.commit()
        break
    assert state.commits == 0
    steps.close()
    state.commit()
    assert state.commits == 1


def test_a_view_that_is_kept_is_an_error_and_no_garbage(worker: Worker) -> None:
    class Careless(BaseState):
        def _load_object(self, name: str, obj: Any, plain: Any) -> None:
            obj.extra = plain

    committed(worker, model=Model())
    with pytest.raises(StateError, match=r"an array of commit 1 \(era 1\) is still in use .*overwritten"):
        restore(worker, Careless(FakeFramework(), {"model": Model()}))


def test_views_in_a_cycle_are_collected(worker: Worker) -> None:
    class Circular(BaseState):
        def _load_object(self, name: str, obj: Any, plain: Any) -> None:
            plain["itself"] = plain

    committed(worker, model=Model())
    restore(worker, Circular(FakeFramework(), {"model": Model()}))


def test_running_out_of_memory_keeps_its_name(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    class Greedy(Model):
        def load_state_dict(self, plain: Any) -> None:
            raise MemoryError("no 3 GiB")

    committed(worker, model=Model())
    with pytest.raises(MemoryError, match=r"^no 3 GiB$"):
        restore(worker, made(model=Greedy()))
    assert "out of memory while restoring state.model from commit 1 (era 1)" in capfd.readouterr().err
