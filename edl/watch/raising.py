"""From readings to alarms: each is raised once, cleared once, and not raised again before a cool-down has passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edl.watch.readings import Reading, Sight
from edl.watch.table import BY_NAME, OUTSIDE_SEVERITY
from edl.wire.alarm import Alarm
from edl.wire.severity import Severity

COOLDOWN_S = 600.0
"""Seconds after an alarm is cleared in which it is not raised again: a value that swings around its limit would
otherwise raise it again and again."""
BLIND = "blind"

Key = tuple[str, str]
"""Name of the watchdog and what it watches."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The alarms that persist, and when others were cleared."""

    alarms: Mapping[Key, Alarm] = field(default_factory=dict)
    cleared_s: Mapping[Key, float] = field(default_factory=dict)

    @property
    def sorted(self) -> tuple[Alarm, ...]:
        """The alarms, in a stable order."""
        return tuple(alarm for _, alarm in sorted(self.alarms.items()))


def resumed(alarms: Sequence[Alarm]) -> Raised:
    """The alarms that an earlier observer has raised and not cleared."""
    return Raised({(alarm.name, alarm.about): alarm for alarm in alarms})


def update(
    before: Raised, readings: Sequence[Reading], now_s: float, on: bool = True, cooldown_s: float = COOLDOWN_S
) -> Raised:
    """The alarms after one look at everything. ``on``: whether a blind watchdog raises an alarm of its own.

    An alarm keeps the text with which it was raised. A watchdog that is blind or unsure keeps its alarm, if it has one:
    it does not know that it is over. An alarm without a reading is over, since nothing is watched that could raise it.
    """
    alarms: dict[Key, Alarm] = {}
    for one in (*readings, *(_blindness(readings) if on else ())):
        key = one.name, one.about
        persists = before.alarms.get(key)
        if one.sight in (Sight.BLIND, Sight.UNSURE):
            if persists is not None:
                alarms[key] = persists
        elif one.sight is Sight.FIRED:
            rests = now_s - before.cleared_s.get(key, -cooldown_s) < cooldown_s
            if persists is not None:
                alarms[key] = persists
            elif not rests:
                alarms[key] = Alarm(one.name, one.about, _severity(one.name).value, one.text, shared=one.shared)
    cleared = {key: at_s for key, at_s in before.cleared_s.items() if now_s - at_s < cooldown_s and key not in alarms}
    cleared |= {key: now_s for key in before.alarms if key not in alarms}
    return Raised(alarms, cleared)


def _severity(name: str) -> Severity:
    return BY_NAME[name].severity if name in BY_NAME else OUTSIDE_SEVERITY


def _blindness(readings: Sequence[Reading]) -> list[Reading]:
    """One reading about each thing that watchdogs cannot see."""
    names: dict[tuple[str, str], list[str]] = {}
    for one in readings:
        if one.sight is Sight.BLIND:
            names.setdefault((one.about, one.text), []).append(one.name)
    return [
        Reading(BLIND, about, Sight.FIRED, f"{', '.join(found)} cannot look: {why}. Until then they say nothing")
        for (about, why), found in names.items()
    ]
