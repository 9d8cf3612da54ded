"""Runs a test on an event loop where nothing goes wrong unseen."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_strictly(test: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; an exception that only the event loop's handler sees fails the test, too.

    Such as that of a task whose result nobody reads: ``edl.tasks.end`` ignores it.
    """
    problems: list[str] = []

    async def whole() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
        return await test

    result = asyncio.run(whole())
    gc.collect()  # a task reports an exception that nobody has read when it is collected
    assert problems == []
    return result
