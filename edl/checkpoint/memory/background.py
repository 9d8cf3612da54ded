"""Low-priority threads for work in parallel with training, which may never end, such as a write to a network file
system whose server is down."""

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
"""High enough that training is not slowed down. At 19, a busy machine might not schedule the thread for a second while
it holds the interpreter lock."""
THREAD_AGAIN_S = 0.5
"""Pause in seconds before another attempt to start a thread."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13


async def in_thread(name: str, work: Callable[[], T], begin: Callable[[], None] | None = None) -> T:
    """Run ``work`` on a separate thread, which does not keep the process alive. It continues when the caller is
    cancelled. ``begin`` is called first in that thread. Waits while the system allows no further thread, as at a
    container's limit on processes: a state that is written late is not lost."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the result
            loop.call_soon_threadsafe(settle, result, error)

    while True:
        try:
            threading.Thread(target=run, name=name, daemon=True).start()
            break
        except RuntimeError:
            await asyncio.sleep(THREAD_AGAIN_S)
    return await future


class WaitingPool(ThreadPoolExecutor):
    """Threads for ``in_pool``. Where the system allows no further one, a call waits for the thread of another call;
    ``ThreadPoolExecutor`` would refuse the call, and perhaps carry it out later all the same."""

    def _adjust_thread_count(self) -> None:
        with contextlib.suppress(RuntimeError):  # the call is in the queue already
            super()._adjust_thread_count()

    def has_thread(self) -> bool:
        """Whether there is a thread; tries to start one otherwise."""
        if not self._threads:
            self._adjust_thread_count()
        return bool(self._threads)


async def in_pool(pool: WaitingPool, work: Callable[..., T], *arguments: Any) -> T:
    """Run ``work`` in a thread of the pool, as soon as there can be one. It runs to its end even when the caller is
    cancelled."""
    future = asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    while not pool.has_thread() and not future.done():  # noqa: ASYNC110 - nothing tells that there can be one
        await asyncio.sleep(THREAD_AGAIN_S)
    return await asyncio.shield(future)


def lower_priority() -> None:
    """Lower this thread's CPU and I/O priority."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)
