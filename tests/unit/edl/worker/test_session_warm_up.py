"""When a worker warms its device up: started ahead of its world, once, before it reports that it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from edl.integrations.placeless import give_up_place
from edl.wire import local
from edl.wire.local import Seat
from tests.support.fake_agent import TIMEOUT_S, FakeFramework, Worker, a_seat

AHEAD = {"LOCAL_RANK": "1"}


class Warming(FakeFramework):
    """Notes what it is asked to do."""

    def __init__(self, why_not: str = "", failed: str = "") -> None:
        super().__init__(why_not=why_not)
        self.failed = failed
        self.asked: list[int] = []
        self.meanwhile: Callable[[Callable[[], bool]], None] = lambda enough: None

    def warm_up(self, local_rank: int, enough: Callable[[], bool]) -> str:
        self.asked.append(local_rank)
        self.meanwhile(enough)
        return self.failed


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def go_in(worker: Worker, framework: FakeFramework) -> Seat:
    """Enter, and take the place that the agent gives."""

    def work() -> Seat:
        worker.session.enter(framework)
        return worker.session.place()

    worker.start(work)
    worker.agent.expect(local.Enter)
    if worker.session.rejoins:
        worker.agent.expect(local.Parked)
    worker.agent.place(a_seat(1))
    seat: Seat = worker.join()
    return seat


def test_it_is_done_before_the_worker_says_that_it_waits_and_only_once(worker: Worker) -> None:
    worker.environment.update(AHEAD)
    framework = Warming()
    said: list[type] = []
    warmed = threading.Event()

    def meanwhile(enough: Callable[[], bool]) -> None:
        assert not enough()
        worker.link.send(local.TrainingStarted(0))  # the last message so far
        while not isinstance(message := worker.agent.heard.get(timeout=TIMEOUT_S), local.TrainingStarted):
            said.append(type(message))
        warmed.set()

    def work() -> list[Seat]:
        worker.session.enter(framework)
        seats = [worker.session.place()]
        worker.session.leave()
        return [*seats, worker.session.place()]

    framework.meanwhile = meanwhile
    worker.start(work)
    assert warmed.wait(TIMEOUT_S)
    for number in (1, 2):
        worker.agent.expect(local.Parked)
        worker.agent.place(a_seat(number))
    assert [seat.round for seat in worker.join()] == [1, 2]
    assert said == [local.Enter]
    assert framework.asked == [1]


def test_one_whose_trainer_must_not_find_its_local_rank_does_too(worker: Worker) -> None:
    worker.environment.update({"LOCAL_RANK": "1"})
    give_up_place(worker.environment, "EDLCallback", grouped=False)
    framework = Warming()
    assert go_in(worker, framework).round == 1
    assert framework.asked == [1]
    assert "EDL_AHEAD_LOCAL_RANK" not in worker.environment


@pytest.mark.parametrize(
    "environment",
    [{"LOCAL_RANK": "1", "EDL_ROUND": "1"}, {}, {"LOCAL_RANK": ""}, {"LOCAL_RANK": "-1"}],
    ids=["started with its world", "no local rank", "empty", "no number"],
)
def test_other_workers_do_not(environment: dict[str, str], worker: Worker) -> None:
    worker.environment.update(environment)
    framework = Warming()
    assert go_in(worker, framework).round == 1
    assert framework.asked == []


def test_a_worker_that_is_restarted_at_each_change_does_not(worker: Worker) -> None:
    """All others wait for it: it would only be later."""
    worker.environment.update(AHEAD)
    framework = Warming(why_not="this torch cannot")
    assert go_in(worker, framework).round == 1
    assert framework.asked == []


def test_a_failure_is_noted_and_the_worker_joins(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    worker.environment.update(AHEAD)
    assert go_in(worker, Warming(failed="NCCL with itself failed: RuntimeError: no device")).round == 1
    assert capfd.readouterr().err.splitlines() == [
        "edl: the device was not warmed up, so the first step will take longer: "
        "NCCL with itself failed: RuntimeError: no device"
    ]


def test_an_order_to_stop_ends_it(worker: Worker) -> None:
    worker.environment.update(AHEAD)
    framework = Warming()

    def meanwhile(enough: Callable[[], bool]) -> None:
        worker.agent.send(local.Stop("the launcher leaves"))
        worker.link._wait(enough_said, TIMEOUT_S)
        assert enough()

    def enough_said() -> bool:
        return worker.link._stop is not None

    def work() -> None:
        worker.session.enter(framework)
        worker.session.place()

    framework.meanwhile = meanwhile
    worker.start(work)
    with pytest.raises(SystemExit):
        worker.join()
    assert framework.asked == [1]


@pytest.mark.parametrize(("environment", "size"), [({"LOCAL_RANK": "0"}, 5000), ({"LOCAL_RANK": "1"}, 0)])
def test_the_one_that_copies_waits_for_its_memory_before_it_says_that_it_waits(
    environment: dict[str, str], size: int, worker: Worker
) -> None:
    worker.environment.update(environment)
    worker.session.expected_bytes = lambda: 5000
    go_in(worker, Warming())
    said = [one for one in worker.agent.said if isinstance(one, (local.Want, local.Parked))]
    wanted = [local.Want(local.STATE, size, waits=True)] if size else []
    assert said == [*wanted, local.Parked(0)]


@pytest.mark.parametrize("refusal", ["", "--state-memory is 1 GiB"])
def test_who_is_called_waits_for_no_memory(refusal: str, worker: Worker) -> None:
    """Nor does one for which there is none."""
    worker.environment["LOCAL_RANK"] = "0"
    worker.session.expected_bytes = lambda: 5000
    worker.agent.refusal = refusal
    worker.agent.serving = bool(refusal)

    def work() -> Seat:
        worker.session.enter(Warming())
        return worker.session.place()

    worker.start(work)
    worker.agent.expect(local.Enter)
    if not refusal:
        worker.agent.expect(local.Want)
    worker.agent.place(a_seat(1))
    assert worker.join().round == 1
