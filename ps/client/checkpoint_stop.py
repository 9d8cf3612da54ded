"""A trainer stops for a checkpoint: what it says, whom it asks, and for how long it stands there."""

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
"""The Master gives a cut up earlier; this is for the case that there is none any more."""
_now_s = SystemClock().now_s

Value = Callable[[], object]
NameData = Callable[[str], Mapping[str, str]]
Settle = Callable[[], None]


def _nothing() -> None:
    return None


@dataclass
class CheckpointStop:
    """What a script wants done when a checkpoint is taken."""

    value: Value = _nothing
    """What it wants back after a restore: anything that JSON can hold."""
    name_data: NameData = trainers.name_positions
    """Gives data positions a name, and returns them by data set."""
    settle: Settle = trainers.settle
    """Returns when all that this trainer has consumed is counted."""

    def stand(self, session: LiveMasterSession, cut: int, step: int) -> None:
        """Stand at a boundary until the Master lets this trainer go on. Raises ``RolledBack``."""
        self.settle()
        try:
            value = json.dumps(self.value())
        except (TypeError, ValueError) as error:
            raise PsError(f"what on_cut's value gives cannot be kept, as it is not JSON: {error}") from None
        patience = BoundedWait(f"the checkpoint {cut} to be taken", deadline_s=None)
        until_s = _now_s() + STAND_S
        session.stand(cut, step, value)
        try:
            while session.halted == cut and _now_s() < until_s:
                session.check()
                if session.to_name:
                    self._name(session, session.to_name)
                session.wait()
                patience.look(lambda: "not all trainers have stopped, or the pservers have not marked their rows yet")
            if session.halted == cut:
                note(f"nobody has said for {STAND_S:.0f} s what becomes of checkpoint {cut}: this trainer goes on")
            patience.over()
        finally:
            session.go_on(cut)

    def _name(self, session: LiveMasterSession, cut: int) -> None:
        try:
            ledgers = self.name_data(f"cut-{cut}")
        except EdlError as error:
            note(f"data positions could not be named for checkpoint {cut}, so it will be without them: {error}")
            ledgers = {}
        session.name(cut, sorted(ledgers.items()))
