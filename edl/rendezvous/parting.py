"""Decides which node writes a checkpoint when a node is about to be taken away.

All workers commit at the next step boundary, and the other nodes continue without the leaving one. No node waits for
more than that; the only question is which of them writes that commit to the checkpoint directory. If no boundary is
reached in time, the other nodes continue from the newest commit in memory or in the directory, and no decision is
needed.
"""

from __future__ import annotations

import enum

DRAIN_SHARE = 0.5
"""Share of the grace period that a leaving node waits for the others to form a world without it. The rest is for
stopping its workers and for writing a checkpoint."""
SAFETY = 2.0
"""Safety factor on the duration of the last checkpoint: a host that shuts down is busy."""


class Saver(enum.Enum):
    """The nodes that write the checkpoint."""

    LEAVER = "leaver"
    """The leaving node, while the others train."""
    OTHERS = "others"
    """Remaining nodes that hold the whole state: at one of their step boundaries, while they train. The leaving node
    neither writes nor sends."""


def need_s(step_s: float, save_s: float) -> float:
    """Seconds needed to leave with a checkpoint, from measured durations; 0 if nothing has been measured."""
    return step_s + SAFETY * save_s


def saver(grace_s: float, step_s: float, save_s: float) -> Saver:
    """Choose who writes. ``grace_s``: seconds that the node's workers may still train, ``DRAIN_SHARE`` of the grace
    period."""
    enough = save_s <= 0 or grace_s / DRAIN_SHARE >= need_s(step_s, save_s)
    return Saver.LEAVER if enough else Saver.OTHERS
