"""Records the processes of pytest-xdist that died: their other tests never ran. Read by ``scripts/unstable.py``."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.unstable import LOST_WORKERS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Called where the run is directed, also at the normal end of a process: without an error."""
    cache = getattr(node.config, "cache", None)  # -p no:cacheprovider
    if error is not None and cache is not None:
        cache.set(LOST_WORKERS, [*cache.get(LOST_WORKERS, []), node.gateway.id])
