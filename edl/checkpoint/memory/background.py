"""Work beside training: threads that step back for everything else, and may never come to an end, as a write to a
network file system whose server is gone."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

BACKGROUND_NICENESS = 18
"""Little enough for training not to feel it; more would let a busy machine stop the thread for a second, perhaps while
it keeps the interpreter from the launcher's other work."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13


async def in_thread(name: str, work: Callable[[], T], begin: Callable[[], None] | None = None) -> T:
    """Do it in a thread of its own, which does not keep the process from ending. It goes on when the caller is
    cancelled. ``begin`` is called there first."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            if begin is not None:
                begin()
            result = work()
        except BaseException as caught:  # noqa: BLE001 - raised again where it is waited for
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


async def in_pool(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    """Do it in a thread of the pool. It comes to its end also when the caller is cancelled."""
    future = asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(future)


def step_back() -> None:
    """Let everything else on the machine go before this thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)
