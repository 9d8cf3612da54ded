"""Plays a scenario on the event loop, and waits in it for conditions that the code under test brings about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

LIMIT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    while not condition():  # noqa: ASYNC110 - of the code under test
        await asyncio.sleep(0.001)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    """Run the scenario to its end, within ``LIMIT_S`` seconds."""
    asyncio.run(asyncio.wait_for(scenario, LIMIT_S))
