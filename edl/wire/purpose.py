"""What workers do at a step boundary that they have agreed on."""

from __future__ import annotations

import enum


class Purpose(enum.Enum):
    """The action to take at an agreed step boundary."""

    SWITCH = "switch"
    """Commit, park, join the next world."""
    SAVE = "save"
    """Commit, write it to the checkpoint directory, continue."""
    KILL = "kill"
    """Commit and park; the commit is written, then the job ends."""
    SET = "set"
    """Commit and continue under other settings."""
    DATA = "data"
    """Not at a boundary: a request to the data service (``edl data add``)."""
    NOTIFY = "notify"
    """Not at a boundary: a test of the Master's notification channels (``edl notify test``)."""
