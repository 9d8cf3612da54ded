"""The signals that ask a launcher to leave, and what they do before it takes part in the job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from edl.exit_codes import ExitCode
from edl.launch.settings import LeaveSettings

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def handled_signals() -> Iterator[signal.Signals]:
    """Those of ``SIGNALS`` that are to be handled: SIGHUP stays ignored under nohup."""
    return (one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN)


async def cancelled_by_signals(
    work: Coroutine[Any, Any, int], log: Callable[[str], None], wanted: LeaveSettings
) -> int:
    """Run the launcher; returns its exit status. A signal to leave cancels the work, which then cleans up, until
    ``Launcher`` takes the signals over. The second one has its default effect; one that announces another is not
    counted. There are no workers yet to which a signal could be forwarded."""
    loop, received = asyncio.get_running_loop(), list[signal.Signals]()
    task, counted = asyncio.ensure_future(work), (*handled_signals(), *map(signal.Signals, wanted.passed))

    def cancel(number: signal.Signals) -> None:
        if not received:  # a second time, it would end the cleaning up
            task.cancel()
        received.append(number)

    def leave(number: signal.Signals) -> None:
        for each in counted:
            loop.remove_signal_handler(each)
        cancel(number)

    for number in counted:
        loop.add_signal_handler(number, leave, number)
    for announced in set(wanted.signals) - set(SIGNALS):
        loop.add_signal_handler(announced, cancel, signal.Signals(announced))
    for forwarded in wanted.forwarded:
        loop.add_signal_handler(forwarded, lambda: None)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        log(f"{received[0].name}: ended before this node took part in the job")
        return int(ExitCode.INTERRUPTED if received[0] == signal.SIGINT else ExitCode.TERMINATED)


def outlive_loop() -> None:
    """Replace the event loop's handlers of signals, which end with it: otherwise a signal just after the loop's end
    would kill this process. Those to leave do nothing for now, all others are ignored from now on."""
    loop = asyncio.get_running_loop()
    for number in signal.valid_signals():
        if loop.remove_signal_handler(number):
            signal.signal(number, signal.SIG_IGN)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
