"""A loader's view of its worker: round and rank, connection to the Master, end of the round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_service.loader.batching import StepSizes
from data_service.loader.transport import LocalTransport, MasterTransport, transport_over
from edl.arithmetic.hyper import StepPlan, step_plan
from edl.errors import StateError
from edl.wire.records import NO_SETTINGS
from edl.worker import hyper, trainer
from edl.worker import session as sessions
from edl.worker.boundary import RoundOver
from edl.worker.framework import Framework


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A worker's rank in one round."""

    round: int
    rank: int
    world_size: int


class WorkerContext(Protocol):
    """The interface between a loader and its process."""

    def place(self) -> RankAssignment:
        """Wait for and return the current assignment. Raises ``StateError`` where data cannot be used."""
        ...

    def transport(self) -> MasterTransport:
        """The connection to the lease machine."""
        ...

    def check(self, number: int) -> None:
        """Raise ``RoundOver`` if this round is over: it unwinds the training. Without a launcher raise
        ``UnreachableData`` where a job would end."""
        ...

    def over(self, number: int) -> bool:
        """True if this round is over. Thread-safe."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather: every rank's bytes, by rank."""
        ...

    def settings(self) -> int:
        """Version of the settings that apply to the next step."""
        ...

    def step_sizes(self, batch_size: int, place: RankAssignment) -> tuple[StepSizes, StepPlan]:
        """The micro-batch sizes of the next steps, given the script's own batch size."""
        ...

    def environment(self) -> Mapping[str, str]:
        """The environment variables of this process."""
        ...

    def waited(self, duration_s: float) -> None:
        """Training has waited for data."""
        ...

    def delivered(self, samples: int) -> None:
        """Training has received so many samples, padding not counted."""
        ...

    def restart_leases(self) -> bool:
        """Restart the in-process lease machine, if this process has its own. Return whether it has."""
        ...

    def independent(self) -> WorkerContext:
        """The context for independent mode, in which this worker takes data by itself."""
        ...

    def where(self) -> tuple[int, int] | None:
        """The current round and rank if the worker outlives rounds; None otherwise."""
        ...


class SessionContext:
    """The context of this process's session."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._local: LocalTransport | None = None

    def place(self) -> RankAssignment:
        """See ``WorkerContext``. A script that does not use ``run`` is restarted in the next world."""
        session = sessions.current()
        if session.state is not None and not session.training:
            raise StateError("use data inside the function that run calls; outside of it there is no world")
        seat = session.seat
        if not session.training or seat is None:
            session.enter(self._framework, "its script uses data without edl.run")
            seat = session.place()
        return RankAssignment(seat.round, seat.rank, seat.world_size)

    def transport(self) -> MasterTransport:
        """The agent's connection to the Master, or a local lease machine in a script without a launcher."""
        link = sessions.current().link
        if link is not None:
            return transport_over(link)
        if self._local is None:
            self._local = LocalTransport()
        return self._local

    def check(self, number: int) -> None:
        """See ``WorkerContext``. Without ``run`` there is nothing to unwind to: the process is about to be stopped."""
        session = sessions.current()
        if session.link is not None and session.training and session.link.broken(number):
            raise RoundOver(session.link.why_over)
        if self._local is not None:
            self._local.check()

    def over(self, number: int) -> bool:
        """See ``WorkerContext``. A planned change ends a round without breaking it."""
        session = sessions.current()
        if session.link is None:
            return self._local is not None and bool(self._local.failed)
        return session.seat is None or session.seat.round != number or session.link.broken(number)

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather over the framework's default group."""
        return self._framework.exchange(data)

    def settings(self) -> int:
        """Version of the job's current settings."""
        return hyper.current().number

    def step_sizes(self, batch_size: int, place: RankAssignment) -> tuple[StepSizes, StepPlan]:
        """The micro-batch sizes that the job's settings prescribe. Raises ``StateError`` if a step is too small."""
        settings = hyper.current()
        plan = step_plan(settings, batch_size, place.world_size)
        if not plan.local[-1]:
            raise StateError(f"a step of {plan.global_batch} samples is too small for {place.world_size} workers")
        return StepSizes(plan.sizes(place.rank), settings.number), plan

    def environment(self) -> Mapping[str, str]:
        """The environment variables of the session."""
        return sessions.current().environment

    def waited(self, duration_s: float) -> None:
        """Count the wait in the session, for the job's goodput."""
        sessions.current().waiting_s += duration_s

    def delivered(self, samples: int) -> None:
        """Count the samples in the session, to compare the speeds of ranks."""
        sessions.current().samples += samples

    def restart_leases(self) -> bool:
        """Restart the lease machine of a script without a launcher."""
        self._local = None
        return sessions.current().link is None

    def independent(self) -> WorkerContext:
        """A context for independent mode that uses this one inside ``run``."""
        return IndependentContext(self)

    def where(self) -> tuple[int, int] | None:
        """None: this worker's rounds end with its worlds."""
        return None


class IndependentContext:
    """The context of an independent worker. Inside ``run`` its worlds still end; elsewhere worlds change around it
    (``edl.worker.trainer``), and the job does not prescribe batch sizes."""

    def __init__(self, inner: SessionContext | None = None) -> None:
        """``inner``: the context used inside ``run``."""
        self._inner = inner
        self._local: LocalTransport | None = None

    def where(self) -> tuple[int, int] | None:
        """The current round and rank outside ``run``; None inside."""
        if self._stepping():
            return None
        return trainer.attach().place()[:2]

    def place(self) -> RankAssignment:
        """The current assignment; outside ``run`` it changes while the worker continues to read."""
        inner = self._stepping()
        return inner.place() if inner else RankAssignment(*trainer.attach().place())

    def transport(self) -> MasterTransport:
        """The connection to the lease machine; outside ``run`` it outlives rounds."""
        inner = self._stepping()
        if inner:
            return inner.transport()
        link = trainer.attach().link
        if link is not None:
            return transport_over(link)
        if self._local is None:
            self._local = LocalTransport()
        return self._local

    def check(self, number: int) -> None:
        """Raise ``RoundOver`` if the round is over; only inside ``run``. See ``WorkerContext``."""
        inner = self._stepping()
        if inner:
            inner.check(number)
        elif self._local is not None:
            self._local.check()

    def over(self, number: int) -> bool:
        """True if this round is over; outside ``run`` only if a job would end."""
        inner = self._stepping()
        return inner.over(number) if inner else self._local is not None and bool(self._local.failed)

    def exchange(self, data: bytes) -> list[bytes]:
        """See ``WorkerContext``. An independent worker has no peers."""
        return [data]

    def settings(self) -> int:
        """Always 0: the job does not prescribe batches."""
        return 0

    def step_sizes(self, batch_size: int, place: RankAssignment) -> tuple[StepSizes, StepPlan]:
        """One micro-batch of the script's own size."""
        return StepSizes((batch_size,)), step_plan(NO_SETTINGS, batch_size, 1)

    def environment(self) -> Mapping[str, str]:
        """The environment variables of the session."""
        return sessions.current().environment

    def waited(self, duration_s: float) -> None:
        """Count the wait in the session, for the job's goodput."""
        sessions.current().waiting_s += duration_s

    def delivered(self, samples: int) -> None:
        """Count the samples in the session, to compare the speeds of ranks."""
        sessions.current().samples += samples

    def restart_leases(self) -> bool:
        """Restart the lease machine of a script without a launcher."""
        self._local = None
        return self._inner.restart_leases() if self._inner is not None else sessions.current().link is None

    def independent(self) -> WorkerContext:
        """Return this context, which is one already."""
        return self

    def _stepping(self) -> SessionContext | None:
        """The inner context if inside ``run``, else None."""
        session = sessions.current()
        return self._inner if session.state is not None or session.training else None


Convert = Callable[[Any], Any]
"""Converts a numpy array to the framework's tensor."""


def converted(batch: Any, convert: Convert) -> Any:
    """Replace every array in a batch by the framework's tensor, in any nesting of dicts, lists and tuples. Text and
    other objects become lists."""
    if isinstance(batch, np.ndarray) and not isinstance(batch, np.ma.MaskedArray):
        if batch.dtype == object:
            return batch.tolist()
        return batch if batch.dtype.kind in "MmUSV" else convert(_as_tensors_need(batch))
    if isinstance(batch, dict):
        return {name: converted(part, convert) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(converted(part, convert) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(converted(part, convert) for part in batch)
    return batch


def _as_tensors_need(array: NDArray[Any]) -> NDArray[Any]:
    """The same values without what tensors cannot have: a foreign byte order, or memory read backwards, as in
    ``image[:, ::-1]``."""
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array.copy() if any(stride < 0 for stride in array.strides) else array
