"""Attributes of a trainer's object that are replaced while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replacing(owner: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Set attributes of one object, methods included, for the time of the block."""
    missing = object()
    before = {name: vars(owner).get(name, missing) for name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)
