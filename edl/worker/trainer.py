"""Independent workers: in a job with parameter servers the workers do not step together and are not interrupted.

Such a worker gets its first place and each later one while it trains: the world changes around it. It never parks on
its own and takes no part in step boundaries. Signals are left to the script.
"""

from __future__ import annotations

from edl.errors import StateError
from edl.wire.local import Seat
from edl.worker import session as sessions
from edl.worker.link import Link
from edl.worker.session import Session


class Trainer:
    """One per process; created by ``attach``."""

    def __init__(self, session: Session) -> None:
        """Wait for this worker's first place. Raises ``SystemExit(0)`` when it receives a stop request instead."""
        self._session = session
        session.enter_alone()
        self._seat = session.place()
        if session.link is not None:
            session.link.follow(self._sit)

    @property
    def link(self) -> Link | None:
        """The link to the launcher; None without one."""
        return self._session.link

    @property
    def seat(self) -> Seat:
        """The newest place. It changes whenever the world does, at any moment."""
        return self._session.seat or self._seat

    def round(self) -> int:
        """Number of the newest world, as services of the Master expect it."""
        return self.seat.round

    def place(self) -> tuple[int, int, int]:
        """Round, rank and size of the newest world, without waiting."""
        seat = self.seat
        return seat.round, seat.rank, seat.world_size

    @property
    def name(self) -> str:
        """``node/slot``. Its process may change, so this does not name a process."""
        slot = self._seat.slot if self._seat.slot >= 0 else self._seat.local_rank
        return f"{self._seat.node}/{slot}"

    def _sit(self, seat: Seat) -> None:
        if self._session.take_seat(seat) and self.link is not None:
            self.link.remind()  # services identify workers by their worlds


_attached: Trainer | None = None


def attach() -> Trainer:
    """This process as an independent trainer. Repeated calls return the same object.

    Raises ``StateError`` in a process that has already joined a world whose workers step together.
    """
    global _attached
    session = sessions.current()
    if _attached is None or _attached._session is not session:
        if session.state is not None or session.training:
            raise StateError("this worker uses edl.run, whose workers step together; parameter servers need no run")
        _attached = Trainer(session)
    return _attached
