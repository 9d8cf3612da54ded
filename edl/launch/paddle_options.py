"""Options and variables of paddle.distributed.launch, in terms of our own options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edl.launch.told import Told

PADDLE_OPTIONS: list[Callable[[Any], Any]] = []


def apply(told: Told, env: Mapping[str, str]) -> None:
    """Make of them what they mean here. Raises ``UsageError`` for what cannot be honoured."""
