"""Ends the collectives of an interrupted round, in an order that hands no garbage to any worker."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from edl.worker.framework import Communicator

GRACE_S = 0.05
"""Seconds between the end of what raises exceptions and the end of the rest. The order to end a round does not reach
all workers at the same moment. A collective that an asynchronous backend aborts in one worker ends in others as well,
with garbage, so by then all of them must know that the round is over. The moments are a few milliseconds apart; this is
a multiple of that, and little compared with forming the next group."""


def interrupt(group: Communicator) -> None:
    """Disconnect a group at once, and abort it after ``GRACE_S``, on another thread."""
    _call("disconnecting", group.disconnect)
    waiting = threading.Timer(GRACE_S, _call, ("aborting", group.abort))
    waiting.name, waiting.daemon = "edl-abort", True
    try:
        waiting.start()
    except RuntimeError:  # there can be no further thread
        waiting.run()


def _call(what: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the link's thread must survive to receive the next world
        sys.stderr.write(f"edl: {what} the communicator failed: {type(error).__name__}: {error}\n")
