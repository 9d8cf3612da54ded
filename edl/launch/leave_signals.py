"""The signals that ask a launcher to leave, and what they do before it takes part in the job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from edl.exit_codes import ExitCode

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def handled_signals() -> Iterator[signal.Signals]:
    """Those of ``SIGNALS`` that are to be handled: SIGHUP stays ignored under nohup."""
    return (one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN)


async def cancelled_by_signals(work: Coroutine[Any, Any, int], log: Callable[[str], None]) -> int:
    """Run the launcher; returns its exit status. A signal to leave cancels the work, which then cleans up, until
    ``Launcher`` takes the signals over. The second signal has its default effect."""
    loop, received = asyncio.get_running_loop(), list[signal.Signals]()
    task, handled = asyncio.ensure_future(work), tuple(handled_signals())

    def leave(number: signal.Signals) -> None:
        received.append(number)
        for each in handled:
            loop.remove_signal_handler(each)
        task.cancel()

    for number in handled:
        loop.add_signal_handler(number, leave, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        log(f"{received[0].name}: ended before this node took part in the job")
        return int(ExitCode.INTERRUPTED if received[0] == signal.SIGINT else ExitCode.TERMINATED)
