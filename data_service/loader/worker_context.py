"""A worker's place in the world, as a loader sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from data_service.loader.batching import Cut
from data_service.loader.transport import Line, LocalLine, line_over
from edl.arithmetic.hyper import StepPlan, step_plan
from edl.errors import StateError
from edl.wire.messages import NO_SETTINGS
from edl.worker import hyper, trainer
from edl.worker import session as sessions
from edl.worker.boundary import RoundOver
from edl.worker.framework import Framework


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is."""

    round: int
    rank: int
    world_size: int


class Post(Protocol):
    """What a loader needs of the process that it is in."""

    def place(self) -> Place:
        """The current one; waits until there is one. Raises ``StateError`` where no data can be taken."""
        ...

    def line(self) -> Line:
        """To the machine that leases shards."""
        ...

    def check(self, number: int) -> None:
        """Raises what unwinds the training when this round is over."""
        ...

    def over(self, number: int) -> bool:
        """Whether this round is over. Any thread."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank hands over, by rank. A collective."""
        ...

    def settings(self) -> int:
        """Number of the settings that hold for the next step."""
        ...

    def cut(self, batch_size: int, place: Place) -> tuple[Cut, StepPlan]:
        """How the next steps are cut, with the script's own batch size."""
        ...

    def environment(self) -> Mapping[str, str]:
        """The environment."""
        ...

    def anew(self) -> bool:
        """Begin with a machine that knows nothing, if it is this process's own. Whether that is so."""
        ...

    def alone(self) -> Post:
        """The same for data that this worker takes by itself, in mode "free"."""
        ...

    def where(self) -> tuple[int, int] | None:
        """Round and rank now, of a worker that goes on while they change; None for one that is interrupted."""
        ...


class WorkerPost:
    """The real one: over this process's session."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._local: LocalLine | None = None

    def place(self) -> Place:
        """See ``Post``. A script that does not use ``run`` is restarted in the next world."""
        session = sessions.current()
        if session.state is not None and not session.training:
            raise StateError("take data inside the function that run calls: outside of it there is no world")
        seat = session.seat
        if not session.training or seat is None:
            session.enter(self._framework, "its script takes data without edl.run")
            seat = session.place()
        return Place(seat.round, seat.rank, seat.world_size)

    def line(self) -> Line:
        """See ``Post``."""
        link = sessions.current().link
        if link is not None:
            return line_over(link)
        if self._local is None:
            self._local = LocalLine()
        return self._local

    def check(self, number: int) -> None:
        """See ``Post``. Without ``run`` there is nothing to unwind to: the process is about to be stopped."""
        session = sessions.current()
        if session.link is not None and session.training and session.link.broken(number):
            raise RoundOver(session.link.why_over)

    def over(self, number: int) -> bool:
        """See ``Post``. A planned change ends a round without breaking it."""
        session = sessions.current()
        if session.link is None:
            return False
        return session.seat is None or session.seat.round != number or session.link.broken(number)

    def exchange(self, data: bytes) -> list[bytes]:
        """See ``Post``."""
        return self._framework.exchange(data)

    def settings(self) -> int:
        """See ``Post``."""
        return hyper.current().number

    def cut(self, batch_size: int, place: Place) -> tuple[Cut, StepPlan]:
        """See ``Post``."""
        settings = hyper.current()
        plan = step_plan(settings, batch_size, place.world_size)
        if not plan.local[-1]:
            raise StateError(f"a step of {plan.global_batch} samples has none for some of {place.world_size} workers")
        return Cut(plan.sizes(place.rank), settings.number), plan

    def environment(self) -> Mapping[str, str]:
        """See ``Post``."""
        return sessions.current().environment

    def anew(self) -> bool:
        """See ``Post``."""
        self._local = None
        return sessions.current().link is None

    def alone(self) -> Post:
        """See ``Post``."""
        return LonePost(self)

    def where(self) -> tuple[int, int] | None:
        """See ``Post``."""
        return None


class LonePost:
    """Of a worker that takes data by itself. Inside of ``run`` its worlds end nevertheless; elsewhere they change
    around it (``edl.worker.trainer``), and nothing is cut by what the job prescribes."""

    def __init__(self, post: WorkerPost | None = None) -> None:
        """``post``: for what is used inside of ``run``."""
        self._post = post
        self._line: Line | None = None

    def where(self) -> tuple[int, int] | None:
        """See ``Post``."""
        if self._stepping():
            return None
        return trainer.attach().place()[:2]

    def place(self) -> Place:
        """See ``Post``."""
        inner = self._stepping()
        return inner.place() if inner else Place(*trainer.attach().place())

    def line(self) -> Line:
        """See ``Post``."""
        inner = self._stepping()
        if inner:
            return inner.line()
        link = trainer.attach().link
        if link is not None:
            return line_over(link)
        if self._line is None:
            self._line = LocalLine()
        return self._line

    def check(self, number: int) -> None:
        """See ``Post``."""
        inner = self._stepping()
        if inner:
            inner.check(number)

    def over(self, number: int) -> bool:
        """See ``Post``."""
        inner = self._stepping()
        return inner.over(number) if inner else False

    def exchange(self, data: bytes) -> list[bytes]:
        """See ``Post``. There is nobody to exchange with."""
        return [data]

    def settings(self) -> int:
        """See ``Post``."""
        return 0

    def cut(self, batch_size: int, place: Place) -> tuple[Cut, StepPlan]:
        """See ``Post``."""
        return Cut((batch_size,)), step_plan(NO_SETTINGS, batch_size, 1)

    def environment(self) -> Mapping[str, str]:
        """See ``Post``."""
        return sessions.current().environment

    def anew(self) -> bool:
        """See ``Post``."""
        self._line = None
        return self._post.anew() if self._post is not None else sessions.current().link is None

    def alone(self) -> Post:
        """See ``Post``."""
        return self

    def _stepping(self) -> WorkerPost | None:
        """Where it is inside of ``run``."""
        session = sessions.current()
        return self._post if session.state is not None or session.training else None


Convert = Callable[[Any], Any]
"""From an array of numpy to what the framework has."""


def converted(batch: Any, convert: Convert) -> Any:
    """A batch with every array replaced by the framework's tensor, wherever it is in dicts, lists and tuples. Texts and
    other objects become lists."""
    if type(batch).__module__ == "numpy" and hasattr(batch, "dtype"):
        if batch.dtype == object:
            return batch.tolist()
        return batch if batch.dtype.kind in "MmUS" else convert(batch)
    if isinstance(batch, dict):
        return {name: converted(part, convert) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(converted(part, convert) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(converted(part, convert) for part in batch)
    return batch
