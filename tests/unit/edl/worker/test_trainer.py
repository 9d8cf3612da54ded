"""A worker that trains by itself, against an agent that gives it one place after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from edl.errors import StateError
from edl.wire import local
from edl.wire.local import Seat
from edl.wire.records import Settings
from edl.worker import session as sessions
from edl.worker import trainer
from edl.worker.context import context_of
from edl.worker.session import Session
from edl.worker.trainer import Trainer
from tests.support.fake_agent import TIMEOUT_S, Worker, a_seat


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def attached(worker: Worker) -> Trainer:
    worker.start(lambda: Trainer(worker.session))
    assert worker.agent.expect(local.Enter) == local.Enter("", rejoins=False)
    worker.agent.place(a_seat(3, local_rank=1))
    made = worker.join()
    assert isinstance(made, Trainer)
    return made


class Seats:
    """Places that a trainer receives, each noted when the trainer has taken it."""

    def __init__(self, trainer: Trainer) -> None:
        self.rounds: list[int] = []
        self._more = threading.Semaphore(0)
        link = trainer.link
        assert link is not None and link._follower is not None
        self._take = link._follower
        link.follow(self)

    def __call__(self, seat: Seat) -> None:
        self._take(seat)
        self.rounds.append(seat.round)
        self._more.release()

    def wait(self, rounds: list[int]) -> None:
        while self.rounds != rounds:
            assert self._more.acquire(timeout=TIMEOUT_S), self.rounds


def test_it_waits_for_its_first_place_and_parks_never(worker: Worker) -> None:
    one = attached(worker)
    assert (one.round(), one.name) == (3, "a/1")
    assert worker.environment["EDL_JOB_ID"]
    assert not any(isinstance(word, local.Parked) for word in worker.agent.said)


def test_later_places_come_while_it_goes_on(worker: Worker) -> None:
    one = attached(worker)
    heard = Seats(one)
    worker.agent.place(a_seat(4, rank=0))
    worker.agent.place(a_seat(4, rank=0))
    worker.agent.place(a_seat(7, world_size=5))
    heard.wait([4, 7])
    assert (one.round(), one.seat.world_size) == (7, 5)
    assert worker.session.place().round == 7  # a loader of data asks like this


def test_asking_for_its_place_first_changes_nothing(worker: Worker) -> None:
    """A worker that parked between two rounds would be taken for one that is not in the world, and started again."""
    worker.environment["EDL_PS"] = "1"
    worker.start(lambda: (context_of(worker.session).round, Trainer(worker.session)))
    assert worker.agent.expect(local.Enter) == local.Enter("", rejoins=False)
    worker.agent.place(a_seat(3))
    number, one = worker.join()
    assert (number, one.round()) == (3, 3)
    assert not any(isinstance(word, local.Parked) for word in worker.agent.said)


def test_a_place_that_comes_before_anybody_listens_counts(worker: Worker) -> None:
    """The world may change between the first place and the next line of the script."""
    session = worker.session
    session.enter_alone()
    worker.agent.expect(local.Enter)
    worker.agent.place(a_seat(1))
    session.place()
    worker.agent.place(a_seat(2))
    assert worker.link._wait(lambda: worker.link._round == 2, TIMEOUT_S)
    assert Trainer(session).round() == 2


def test_settings_come_with_the_place(worker: Worker) -> None:
    one = attached(worker)
    heard = Seats(one)
    settings = Settings(number=2, factor=0.5)
    worker.agent.place(a_seat(4, settings=settings))
    heard.wait([4])
    assert worker.session.settings == settings
    assert one.seat.settings == settings


def test_told_to_stop_instead_of_a_place_it_ends_well(worker: Worker) -> None:
    worker.start(lambda: Trainer(worker.session))
    worker.agent.expect(local.Enter)
    worker.agent.send(local.Stop("the launcher leaves"))
    with pytest.raises(SystemExit) as ended:
        worker.join()
    assert ended.value.code == 0


def test_without_a_launcher_it_is_alone() -> None:
    one = Trainer(Session(None, {}))
    assert (one.link, one.seat.world_size, one.round()) == (None, 1, 1)


def test_one_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(None, {})
    monkeypatch.setattr(sessions, "_current", session)
    monkeypatch.setattr(trainer, "_attached", None)
    assert trainer.attach() is trainer.attach()
    other = Session(None, {})
    other.training = True
    monkeypatch.setattr(sessions, "_current", other)
    with pytest.raises(StateError, match="no run"):
        trainer.attach()


def test_services_are_told_again_what_may_be_lost(worker: Worker) -> None:
    one, places = attached(worker), []
    heard = Seats(one)
    assert one.link is not None
    one.link.listen("data", lambda body: places.append((body, one.place())))
    worker.agent.place(a_seat(4, rank=2, world_size=3))
    heard.wait([4])
    assert places == [(None, (4, 2, 3))]
