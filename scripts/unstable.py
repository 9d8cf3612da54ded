"""Decides whether the failures of a test run may be forgiven if the tests that failed pass alone: ``.ci/run``.

Needs the standard library alone. ``python -m scripts.unstable STATUS`` prints the tests to run again, one a line, and
exits with 1 where nothing is forgiven. ``tests/conftest.py`` writes ``LOST_WORKERS``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(".pytest_cache/v")
LAST_FAILED = "cache/lastfailed"
LOST_WORKERS = "edl/lost_workers"
TESTS_FAILED = 1
"""Pytest's status after a complete run with failures. Others: interrupted, an internal error, wrong arguments."""
MOST = 3
_REAL_PROCESSES = re.compile(r"tests/(process/|contract/|unit/ps/).*::")
"""Tests that depend on how busy the machine is. Those of parameter servers run real ones, on threads and sockets."""


def unstable(status: int, lost_workers: Sequence[str], failed: Sequence[str]) -> list[str]:
    """The tests that may pass alone instead; none where the run has failed for good.

    ``status``: what pytest ended with. ``lost_workers``: the processes of pytest-xdist that died. The tests that such a
    process had still to run never ran, and nothing names them, so that run is not forgiven. ``failed``: node ids.
    """
    if status != TESTS_FAILED or lost_workers or len(failed) > MOST:
        return []
    return list(failed) if all(_REAL_PROCESSES.match(name) for name in failed) else []


def _cached(name: str) -> list[str]:
    """The names in a file of pytest's cache; none where the run wrote no such file."""
    path = CACHE / name
    return list(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    names = unstable(int(sys.argv[1]), _cached(LOST_WORKERS), _cached(LAST_FAILED))
    print("\n".join(names))
    sys.exit(not names)
