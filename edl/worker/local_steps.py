"""Local steps: each worker trains on its own for many inner steps; then an outer step makes one model of all of them.

Between outer steps the models of the workers differ, so commits belong at outer steps. A worker's progress since the
last one exists in its process only. If the world changes meanwhile, survivors keep theirs, and a new worker begins from
the last outer step, in the middle of the others' inner steps and with a smaller weight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

from edl.arithmetic.outer_step import OuterReport, OuterRule, equal, shares, weigh
from edl.errors import StateError
from edl.worker import session as sessions
from edl.worker.session import Session

Every = int | Callable[[int], int]


class Replica(Protocol):
    """A worker's model, as a framework implements it.

    Arrays are those of ``edl.arithmetic.outer_step``, one for each trained parameter, separate from the model's memory,
    and in at least 32 bits.
    """

    @property
    def names(self) -> Sequence[str]:
        """Of the trained parameters."""
        ...

    @property
    def workers(self) -> int:
        """Number of workers in this world."""
        ...

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        ...

    def check(self, objects: Mapping[str, Any]) -> None:
        """Raise ``StateError`` if these objects of the state contradict local steps, such as the inner optimizer."""
        ...

    def check_wire(self, wire: str) -> None:
        """Raise ``StateError`` if arrays cannot be sent in this type."""
        ...

    def read(self) -> list[Any]:
        """Copies of the trained parameters. Raises ``StateError`` as ``refuse_new`` does."""
        ...

    def write(self, arrays: Sequence[Any]) -> None:
        """Set the trained parameters."""
        ...

    def rounded(self, number: int, array: Any) -> Any:
        """What ``read`` would return after ``write``: the array itself if the parameter has its type."""
        ...

    def place(self, number: int, array: Any) -> Any:
        """An array of a snapshot, with the type of ``read`` and on the parameter's device."""
        ...

    def zeros(self, array: Any) -> Any:
        """An array of zeros like this one."""
        ...

    def read_buffers(self) -> list[Any]:
        """Copies of the model's floating-point buffers."""
        ...

    def write_buffers(self, arrays: Sequence[Any]) -> None:
        """Set the floating-point buffers."""
        ...

    def copy(self) -> Any:
        """A copy of all parameters and buffers, for ``set``."""
        ...

    def set(self, saved: Any) -> None:
        """Set all parameters and buffers to those of ``copy``."""
        ...

    def send_from_first(self) -> None:
        """Set all parameters and buffers to those of rank 0. A collective."""
        ...

    def sum_over_workers(self, arrays: list[Any], wire: str) -> list[Any]:
        """The sums over all workers, the same bits on each. Collectives. Returns when the sums are there, not when a
        device has been given the work: an aborted group leaves garbage in them, and the next ``exchange`` raises.
        ``wire``: type in which arrays are sent; empty for their own."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """The data of each worker, by rank. A collective, which raises rather than return garbage."""
        ...


class OuterSteps:
    """An object of a ``State``, together with the model. Frameworks derive ``LocalSGD`` and ``DiLoCo`` from it."""

    def __init__(
        self, replica: Replica, every: Every, rule: OuterRule, wire: str, keep_progress: bool, session: Any = None
    ) -> None:
        """``session``: a function that returns the session, for tests. Raises ``StateError`` for an impossible
        value."""
        replica.check_wire(wire)
        self._replica, self._every, self._rule, self._wire = replica, every, rule, wire
        self._keeps = keep_progress
        self._session: Callable[[], Session] = session or sessions.current
        self._inner_steps = self._outer_steps = 0
        self._position, self._weight = 0, 0.0
        self._base: list[Any] = []
        self._masters: dict[str, Any] = {}
        self._velocity: dict[str, Any] = {}
        self._progress: Any = None
        _length(every, 0)

    # --- for scripts -------------------------------------------------------------------------------------------------

    @property
    def inner_steps(self) -> int:
        """Inner steps of the job so far, the same on all workers. It does not go back for survivors of a fault."""
        return self._inner_steps + self._position

    @property
    def outer_steps(self) -> int:
        """Outer steps of the job so far."""
        return self._outer_steps

    def step(self, samples: float = 1) -> bool:
        """Call it after each inner step, on all workers. Returns whether this was the last one before an outer step,
        which has been made: all workers hold the same model now, and may commit it.

        ``samples``: the number that this worker trained in the inner step; its weight in the average. Raises
        ``StateError`` if this object is not in the ``State`` of the function that ``run`` calls.
        """
        session = self._running()
        if not isinstance(samples, Real) or not 0 <= float(samples) < math.inf:  # NumPy's numbers are Real
            raise StateError(f"step(samples={samples!r}): it is the number of samples of this inner step, at least 0")
        self._position += 1
        self._weight += float(samples)
        session.check()  # a worker learns of the end of its round here, as it exchanges nothing
        if self._position < _length(self._every, self._inner_steps):
            return False
        self._outer_step(session)
        return True

    def sync(self) -> bool:
        """Make the outer step now, even if it is not due; for the end of the training. All workers call it, after the
        same inner step. Returns False if there was no inner step since the last one."""
        session = self._running()
        if not self._position:
            return False
        self._outer_step(session)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a commit keeps: counters, momentum, and parameters that the model holds in 16 bits only."""
        return {
            "inner_steps": self._inner_steps,
            "outer_steps": self._outer_steps,
            "momentum": dict(self._velocity),
            "masters": dict(self._masters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; ``State`` calls ``restored`` when the model is restored, too."""
        self._inner_steps, self._outer_steps = int(state["inner_steps"]), int(state["outer_steps"])
        self._velocity, self._masters = dict(state["momentum"]), dict(state["masters"])

    # --- for State ---------------------------------------------------------------------------------------------------

    def check_equal(self, event: str) -> None:
        """Raise ``StateError`` where the workers' models differ. ``event``: what has happened there."""
        if self._position:
            length = _length(self._every, self._inner_steps)
            raise StateError(
                f"{event} after {self._position} of {length} inner steps, where each worker has another model; the "
                "place for it is where step() or sync() has returned True"
            )

    def before_restore(self, objects: Mapping[str, Any], from_nothing: bool) -> None:
        """Set this worker's progress aside before the model is restored. Raises ``StateError`` for a state that
        contradicts local steps."""
        self._replica.check(objects)
        if from_nothing or not self._keeps:
            self._position, self._weight, self._progress = 0, 0.0, None
        elif self._position and self._progress is None:  # else a restore was interrupted, and the model is overwritten
            self._progress = self._replica.copy()

    def restored(self, from_nothing: bool = False) -> None:
        """All workers have restored the last commit: take up this worker's progress if it belongs to that commit, and
        agree on the position. A collective."""
        replica, progress = self._replica, self._progress
        if from_nothing and replica.workers > 1:
            replica.send_from_first()
        base = replica.read()
        for number, name in enumerate(replica.names):
            if name in self._masters:
                base[number] = replica.place(number, self._masters[name])
            if name in self._velocity:
                self._velocity[name] = replica.place(number, self._velocity[name])
        if progress is not None and equal(self._base, base):
            replica.set(progress)
        else:
            self._position, self._weight = 0, 0.0
        self._hold(base)
        self._progress = None
        self._position = max(json.loads(one) for one in replica.exchange(json.dumps(self._position).encode()))

    # --- the outer step ----------------------------------------------------------------------------------------------

    def _running(self) -> Session:
        session = self._session()
        objects = getattr(session.state, "_objects", {})
        if not session.training or not any(one is self for one in objects.values()):
            kind = type(self).__name__
            raise StateError(
                f"{kind} is used in the function that run calls, and must be in its State: "
                f"State(model=model, outer={kind}(model, …))"
            )
        return session

    def _outer_step(self, session: Session) -> None:
        """Nothing of this worker is changed before all workers have all sums, so a loss before that costs nobody else's
        inner steps."""
        replica, rule = self._replica, self._rule
        mine = OuterReport(self.inner_steps, (rule.lr, rule.momentum), self._wire, self._weight)
        said = replica.exchange(mine.encode())
        weights = shares([OuterReport.decode(one) for one in said])
        share = weights[replica.rank]
        gradients = replica.read()
        for number, (base, gradient) in enumerate(zip(self._base, gradients, strict=True)):
            gradient *= -1
            gradient += replica.rounded(number, base)
            weigh(gradient, share)
        buffers = replica.read_buffers()
        for buffer in buffers:
            weigh(buffer, share)
        gradients = replica.sum_over_workers(gradients, self._wire)
        buffers = replica.sum_over_workers(buffers, "")
        replica.exchange(b"")
        session.check()
        for name, base, gradient in zip(replica.names, self._base, gradients, strict=True):
            if rule.momentum and name not in self._velocity:
                self._velocity[name] = replica.zeros(base)
            rule.apply(base, self._velocity.get(name), gradient)
        replica.write(self._base)
        if any(weights):
            replica.write_buffers(buffers)
        self._inner_steps += self._position
        self._outer_steps += 1
        self._position, self._weight = 0, 0.0
        self._hold(self._base)

    def _hold(self, base: list[Any]) -> None:
        self._base = base
        rounded = self._replica.rounded
        named = enumerate(zip(self._replica.names, base, strict=True))
        self._masters = {name: array for number, (name, array) in named if rounded(number, array) is not array}


def refuse_new(names: Sequence[str], trained: Iterable[str]) -> None:
    """Raise ``StateError`` for a parameter that is ``trained`` now, and is not among the ``names`` that workers
    exchange."""
    known = set(names)
    new = next((name for name in trained if name not in known), None)
    if new is not None:
        raise StateError(
            f"local steps: {new} is trained, and was frozen when LocalSGD or DiLoCo was created, so that each worker "
            "would keep its own: create it while all parameters are trained that ever will be, and freeze some later"
        )


def _length(every: Every, inner_steps: int) -> int:
    """Inner steps of the outer step that begins here. Raises ``StateError`` for less than 1."""
    found = every(inner_steps) if callable(every) else every
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        what = f"every({inner_steps}) returned {found!r}" if callable(every) else f"every={found!r}"
        raise StateError(f"{what}: an outer step has a whole number of inner steps, at least 1")
    return found
