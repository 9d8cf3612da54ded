"""A worker that trains by itself: in a job with parameter servers nobody steps together, and nobody is interrupted.

Such a worker is told its place, and each later one, while it goes on: the world changes around it. Of its own accord
it never parks, and takes no part in step boundaries. Signals are left to the script.
"""

from __future__ import annotations

from collections.abc import Callable

from edl.errors import StateError
from edl.wire.local import Seat
from edl.worker import session as sessions
from edl.worker.link import Link
from edl.worker.session import Session

Heard = Callable[[Seat], None]


class Trainer:
    """One for each process; made by ``attach``."""

    def __init__(self, session: Session) -> None:
        """Returns once this worker has its first place. Raises ``SystemExit(0)`` when it is told to stop instead."""
        self._session = session
        self._heard: Heard = _nothing
        session.enter_alone()
        self._seat = session.place()
        if session.link is not None:
            session.link.follow(self._sit)

    @property
    def link(self) -> Link | None:
        """To the launcher; None when there is none."""
        return self._session.link

    @property
    def seat(self) -> Seat:
        """The newest place. It changes whenever the world does, at any moment."""
        return self._session.seat or self._seat

    def round(self) -> int:
        """Number of the newest world, as services of the Master want to hear it."""
        return self.seat.round

    def place(self) -> tuple[int, int, int]:
        """Round, rank and size of the newest world, without waiting."""
        seat = self.seat
        return seat.round, seat.rank, seat.world_size

    @property
    def name(self) -> str:
        """``node/slot``: who fills it may change, so it names no process."""
        slot = self._seat.slot if self._seat.slot >= 0 else self._seat.local_rank
        return f"{self._seat.node}/{slot}"

    def on_seat(self, heard: Heard) -> None:
        """Have it called with each later place, on the link's side thread. A later call replaces it."""
        self._heard = heard

    def _sit(self, seat: Seat) -> None:
        if self._session.take_seat(seat):
            if self.link is not None:
                self.link.remind()  # services know workers by their worlds
            self._heard(seat)


def _nothing(seat: Seat) -> None:
    """Nobody wants to know."""


_attached: Trainer | None = None


def attach() -> Trainer:
    """This process as a trainer of its own. Asking again gives the same one.

    Raises ``StateError`` in a process that has already joined a world whose workers step together.
    """
    global _attached
    session = sessions.current()
    if _attached is None or _attached._session is not session:
        if session.state is not None or session.training:
            raise StateError("this worker uses edl.run, whose workers step together; parameter servers need no run")
        _attached = Trainer(session)
    return _attached
