"""``run``: calls the script's ``train(state)`` again after every change of the world, with the state restored."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from edl.errors import StateError
from edl.wire.local import TrainingStarted
from edl.worker import session as sessions
from edl.worker.boundary import RoundOver
from edl.worker.framework import Framework
from edl.worker.session import Session
from edl.worker.state import BaseState

LOST_TIMEOUT_S = 10.0
"""Seconds that the Master may take after a failed collective to end the round; after that it is the script's own
failure."""
_FEW = 10
"""Boundaries that a worker may be behind the others without suspicion; an accelerator's queue is not that long."""
Train = TypeVar("Train", bound=Callable[..., Any])


def make_run(framework: Framework, session: Callable[[], Session] = sessions.current) -> Callable[[Train], Train]:
    """The decorator ``run`` of a framework.

    The decorated ``train(state, ...)`` parks until this worker has a place in a world, and is called with the state of
    the world's commit. It is unwound, by a ``BaseException`` from ``state.commit()`` or by the exception of a
    collective that lost a peer, and called again whenever the world changes. Its result is returned.
    """
    sessions.introduce(framework)

    def run(train: Train) -> Train:
        """Decorate ``train(state, …)``, the function that trains. Calling it waits until this worker has a place in a
        world, and calls ``train`` with the state of the world's commit; again whenever the world changes. Returns what
        ``train`` returns in the last world.

        When the world changes, ``train`` is left by a ``BaseException`` from ``state.commit()``, or by the exception of
        a collective that has lost a peer: let both pass. Other exceptions fail the worker. Raises ``StateError`` for a
        first argument that is no ``State`` or another one than before, for a call inside ``train``, and in jobs with
        parameter servers.
        """

        @functools.wraps(train)
        def wrapper(state: BaseState, *args: Any, **kwargs: Any) -> Any:
            return _drive(session(), framework, state, lambda: train(state, *args, **kwargs))

        return cast(Train, wrapper)

    return run


def connect(framework: Framework, why_not: str = "") -> None:
    """Wait for a place and form the communicator now, before ``run``: for models that cannot be built without one.

    ``why_not``: why this worker cannot rejoin in process. Only such workers may call this.
    """
    session = sessions.current()
    session.enter(framework, why_not)
    session.connect()


def _drive(session: Session, framework: Framework, state: BaseState, train: Callable[[], Any]) -> Any:
    _check(session, state)
    session.state, session.expected_bytes = state, state._expected_bytes
    session.enter(framework, state._why_restarted)
    state._model_modes.run(state._modes())
    while True:
        session.place()
        returned = False
        try:
            _join(session, state)
            session.training = True
            state._tell_reset()
            result = train()
            returned = True
            # The result of train may depend on the garbage of an aborted collective, even one that is aborted later.
            if not _left(session):
                session.finish()
                session.check()
                state._check_equal("train returned")
            if session.link is not None and session.link.held:
                # All workers are to stop at a boundary, and this was the last one: make one more here, so that the end
                # of the training does not collide with the change of the world.
                state._finish()
            session.training = False
            if not _left(session):
                session.passed()
                return result
        except (RoundOver, Exception) as error:
            if not _is_over(session, error, returned):
                if isinstance(error, RoundOver):
                    raise StateError(
                        f"a collective of round {session.seat.round if session.seat else 0} failed on this worker, "
                        f"its script went on without the result, and no worker is missing: {error}"
                    ) from error
                raise
            _forget_frames(error)
        finally:
            session.training = False
        session.leave()


def _check(session: Session, state: BaseState) -> None:
    if not isinstance(state, BaseState):
        raise StateError(f"a function decorated with run takes a State first, not a {type(state).__name__}")
    if session.environment.get("EDL_PS"):
        raise StateError(
            "run is for workers that step together; with --run-mode=ps use the framework's ps module instead"
        )
    if session.training:
        raise StateError("a function decorated with run was called inside another one; call the plain function")
    if session.state is not None and session.state is not state:
        raise StateError("only one State per process is supported: run was called with another one before")


def _join(session: Session, state: BaseState) -> None:
    """Prepare communicator and state of the current round, unless an earlier ``run`` in it has done so."""
    if session.underway:
        return
    while True:
        seat = session.place()
        state._ask(session, seat)
        began_s = time.monotonic()
        if session.connect() is seat:  # else that round ended, and this one's state is not requested yet
            break
    connected_s = time.monotonic()
    state._begin(session, seat)
    session.underway = True
    if session.link is not None:
        session.link.send(TrainingStarted(seat.round, connected_s - began_s, time.monotonic() - connected_s))


def _left(session: Session) -> bool:
    """Whether ``train`` returned although it was unwound, because the script swallowed the exception."""
    return session.link is not None and session.link.left


def _is_over(session: Session, error: BaseException, returned: bool) -> bool:
    """Whether ``train`` is called again in the next round. Raises ``StateError`` when the same problem would recur
    there. ``returned``: train had returned, so the error is not from one of its boundaries."""
    over = session.is_over(error, LOST_TIMEOUT_S)
    elsewhere = returned or not isinstance(error, RoundOver)
    if session.link is not None and elsewhere and session.link.missed > _FEW:
        raise StateError(
            f"the other workers have passed {session.link.missed} boundaries in round "
            f"{session.seat.round if session.seat else 0} and this one none: commit() is to be called by every worker"
        ) from error
    return over


def _forget_frames(error: BaseException) -> None:
    """Release everything that ``train`` and its callees held, so that it is freed before the next round."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        chain += [one.__cause__, one.__context__]
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
