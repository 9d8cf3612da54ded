"""The accounts of one Master: loaded from the store, kept up to date with each decision, shown and stored again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from edl.errors import ProtocolError
from edl.master import events as ev
from edl.master.goodput import report
from edl.master.goodput.slot_times import NS, Cost, SlotTimes, follow
from edl.master.goodput.stored import StoredSlotTimes, continued, stored
from edl.master.state import MasterState
from edl.wire import plain
from edl.wire.messages import Pace
from edl.wire.status import Count

STORE_S = 60.0
"""Seconds after which the accounts are written although the record has not changed."""


class Goodput:
    """What the slots of the job have spent their time on, as one Master knows it."""

    def __init__(self, wall_clock_s: Callable[[], float]) -> None:
        self._wall_clock_s = wall_clock_s
        self._times = SlotTimes()
        self._stored_ns = 0
        self._paced = False

    def load(self, value: bytes | None, state: MasterState, now_s: float, log: Callable[[str], None]) -> None:
        """Continue the accounts of the last Master, if the store has any. ``state``: of this Master after its
        take-over."""
        self._times = SlotTimes(at_ns=round(now_s * NS))
        self._stored_ns = self._times.at_ns
        if value is None:
            return
        try:
            found = plain.loads(StoredSlotTimes, value)
        except ProtocolError as error:
            log(f"goodput is counted from now on: {error}")
            return
        self._times = continued(found, state, now_s, self._wall_clock_s())

    def follow(
        self, before: MasterState | None, events: Sequence[ev.Event], decision: ev.Decision, now_s: float
    ) -> ev.Decision:
        """Take in a decision. Its notes then also say what a change of the world, or the whole job, has cost."""
        self._paced = any(isinstance(event, ev.NodeSaid) and isinstance(event.message, Pace) for event in events)
        self._times, cost = follow(self._times, before, events, decision.state, now_s)
        return dataclasses.replace(decision, effects=tuple(self._priced(one, cost) for one in decision.effects))

    def _priced(self, effect: ev.Effect, cost: Cost | None) -> ev.Effect:
        if not isinstance(effect, ev.HistoryNote):
            return effect
        text = ""
        if effect.kind is ev.Kind.WORLD_UNDERWAY and cost is not None:
            text = report.cost_text(cost)
        elif effect.kind is ev.Kind.JOB_ENDED:
            text = report.total_text(self._times)
        return dataclasses.replace(effect, text=f"{effect.text}; {text}") if text else effect

    @property
    def times(self) -> SlotTimes:
        """As of the last decision."""
        return self._times

    @property
    def due(self) -> bool:
        """Whether the accounts are to be written although nothing else is."""
        return self._paced and self._times.at_ns - self._stored_ns >= STORE_S * NS

    def stored(self) -> bytes:
        """The accounts for the next Master."""
        self._stored_ns = self._times.at_ns
        return plain.dumps(stored(self._times, self._wall_clock_s()))

    def counts(self, now_s: float) -> tuple[Count, ...]:
        """Slot-seconds by use until now."""
        now_ns = max(self._times.at_ns, round(now_s * NS))
        return report.counts(dataclasses.replace(self._times, at_ns=now_ns))
