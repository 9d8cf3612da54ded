"""What a detector says about one thing at one moment."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Sight(enum.Enum):
    """What a detector has seen."""

    FIRED = "fired"
    CLEAR = "clear"
    BLIND = "blind"
    """It cannot see: neither an alarm nor a sign of health."""
    UNSURE = "unsure"
    """It has not watched for long enough to know: an alarm stays, and none is raised."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one detector about one thing."""

    name: str
    """Name of the watchdog."""
    about: str
    """What it has looked at; empty: the job."""
    sight: Sight
    text: str = ""
    """Fired: the values, the limit and the next action. Blind: why."""
    shared: bool = False
    """See ``Alarm``."""


def reading(name: str, text: str | None, about: str = "", *, shared: bool = False) -> Reading:
    """The reading of a detector that sees. ``text``: empty: clear; None: unsure."""
    if text is None:
        return Reading(name, about, Sight.UNSURE, shared=shared)
    return Reading(name, about, Sight.FIRED if text else Sight.CLEAR, text, shared)
