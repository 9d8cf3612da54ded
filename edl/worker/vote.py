"""Votes on a commit: ``state.commit(ok=...)`` commits on all workers or on none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Protocol

from edl.errors import CheckpointError
from edl.wire import local
from edl.wire.local import Seat
from edl.wire.records import NO_STATE, Version
from edl.worker.modes import CHANGED
from edl.worker.numbers import SEED, RandomNumbers
from edl.worker.session import Session


class Voter(Protocol):
    """The part of ``State`` that is needed here."""

    _commits: int
    _last: Version
    _first: Any
    _unkept: bool
    _objects: dict[str, Any]
    _values: dict[str, Any]
    _numbers: RandomNumbers

    def _copies(self, seat: Seat) -> bool: ...
    def _exchange(self, session: Session, data: bytes) -> list[bytes]: ...
    def _load(self, found: Any, data: memoryview, objects: frozenset[str]) -> None: ...
    def _ask(self, session: Session, seat: Seat) -> None: ...
    def _restore(self, session: Session, seat: Seat) -> None: ...
    def _put_modes_back(self, commit: int) -> None: ...


def passed(state: Voter, session: Session, seat: Seat, ok: bool) -> bool:
    """Whether all workers agree to the next commit; otherwise the last commit is restored on each.

    Raises ``CheckpointError`` when there is none to restore, ``RoundOver`` when the votes cannot be collected.
    """
    last = [state._last.era, state._last.commit] if state._copies(seat) else None
    votes = [json.loads(vote) for vote in state._exchange(session, json.dumps([bool(ok), last]).encode())]
    if all(agrees for agrees, _ in votes):
        return True
    known = {tuple(one) for _, one in votes if one is not None}
    if len(known) > 1:
        raise CheckpointError(
            f"a worker voted against commit {state._commits + 1}, and the last commit cannot be restored: the nodes "
            f"hold different ones, {sorted(commit for _, commit in known)}; is there too little --state-memory?"
        )
    state._values[CHANGED] = {}  # a commit without changes does not hold it
    _put_back(state, session, seat, Version(*known.pop()))
    state._put_modes_back(state._commits)
    state._numbers.derive(seat.rank, state._commits)
    return False


def _put_back(state: Voter, session: Session, seat: Seat, last: Version) -> None:
    """Restore this commit in the middle of a round, on all workers."""
    if last == NO_STATE or session.link is None:
        kept = state._first
        if kept is None or state._unkept:
            raise CheckpointError(
                f"a worker voted against commit {state._commits + 1}, and there is no earlier state to restore"
            )
        seed = {name: value for name, value in state._values.items() if name == SEED}
        state._load(kept.parsed, kept.view, frozenset(state._objects))
        state._values.update(seed)  # it was not agreed on yet when that was copied
        state._commits = kept.parsed.meta.commit
        return
    began = Version(seat.restore_era, seat.restore_commit)
    there = replace(
        seat,
        restore_era=last.era,
        restore_commit=last.commit,
        stored=seat.stored and last == began,
    )
    # First the workers that have copied it, so that each agent knows the commit before the same worker requests it.
    # Then the others, which find it there.
    copies = state._copies(seat)
    if copies:
        _take_back(state, session, there)
    state._exchange(session, b"")
    if not copies:
        _take_back(state, session, there)
    state._commits = last.commit


def _take_back(state: Voter, session: Session, there: Seat) -> None:
    state._ask(session, there)
    state._restore(session, there)
    if session.link is not None:
        session.link.send(local.TrainingStarted(0))  # of no round: only reports that what the agent lent is read
