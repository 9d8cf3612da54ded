"""What is done with the time that is left when a node is going to be taken away.

All commit at the next step boundary, and the others go on without it. Nobody waits for more than that, so the question
is only who brings that commit to the checkpoint directory. If no boundary comes in time, the others go on from the
newest commit that lives in their memory or lies in the directory: that needs no decision.
"""

from __future__ import annotations

import enum

DRAIN_SHARE = 0.5
"""Of the time there is: how long a node that leaves waits for the others to form a world without it; the rest is for
its workers to end, and for what it writes."""
SAFETY = 2.0
"""A checkpoint may take so many times as long as the last one: on a host that ends, much happens at once."""


class Saver(enum.Enum):
    """Who writes."""

    LEAVER = "leaver"
    """The node that leaves, while the others train on."""
    OTHERS = "others"
    """Those that go on and hold the whole state: at a boundary of theirs, while they train. The node that leaves
    neither writes nor sends."""


def need_s(step_s: float, save_s: float) -> float:
    """Time that leaving with a checkpoint takes, as far as it has been measured; 0: nothing has been."""
    return step_s + SAFETY * save_s


def saver(grace_s: float, step_s: float, save_s: float) -> Saver:
    """Who is to write. ``grace_s``: how long the workers of the node may go on, its share of the time there is."""
    enough = save_s <= 0 or grace_s / DRAIN_SHARE >= need_s(step_s, save_s)
    return Saver.LEAVER if enough else Saver.OTHERS
