"""A trainer's stop for a checkpoint: what it reports, and how long it waits at the step boundary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from data_service.loader import trainers
from edl.adapters.clock import SystemClock
from edl.errors import EdlError, PsError
from edl.worker.session import note
from ps.client.master_session import LiveMasterSession
from ps.wait import BoundedWait

STAND_S = 120.0
"""The Master gives up a checkpoint earlier than this; the limit applies when there is no Master any more."""
_now_s = SystemClock().now_s

Value = Callable[[], object]
NameData = Callable[[str], Mapping[str, str]]
Settle = Callable[[], None]


def _nothing() -> None:
    return None


@dataclass
class CheckpointStop:
    """The script's hooks for a checkpoint."""

    value: Value = _nothing
    """Returns the value to be given back after a restore: anything that JSON can hold."""
    name_data: NameData = trainers.name_positions
    """Names the current data positions; returns them by data set."""
    settle: Settle = trainers.settle
    """Returns once everything that this trainer has consumed is accounted for."""

    def stand(self, session: LiveMasterSession, checkpoint: int, step: int) -> None:
        """Wait at a step boundary until the Master releases this trainer. Raises ``RolledBack``, and ``PsError`` if the
        script's value is not JSON."""
        self.settle()
        try:
            value = json.dumps(self.value())
        except (TypeError, ValueError) as error:
            raise PsError(f"the value from on_checkpoint cannot be saved because it is not JSON: {error}") from None
        wait = BoundedWait(f"checkpoint {checkpoint}", deadline_s=None)
        until_s = _now_s() + STAND_S
        session.stand(checkpoint, step, value)
        try:
            while session.halted == checkpoint and _now_s() < until_s:
                session.check()
                if session.to_name:
                    self._name(session, session.to_name)
                session.wait()
                wait.look(lambda: "some trainers have not stopped yet, or some pservers have not marked their rows")
            if session.halted == checkpoint:
                note(f"no decision about checkpoint {checkpoint} within {STAND_S:.0f} s; continuing without it")
            wait.over()
        finally:
            session.go_on(checkpoint)

    def _name(self, session: LiveMasterSession, checkpoint: int) -> None:
        try:
            ledgers = self.name_data(f"checkpoint-{checkpoint}")
        except EdlError as error:
            note(f"cannot name the data positions for checkpoint {checkpoint}, which is abandoned: {error}")
            session.name(checkpoint, (), failed=str(error)[:300])
            return
        session.name(checkpoint, sorted(ledgers.items()))
