"""Functions that the tests of torch's launcher suite call."""

from __future__ import annotations

import os


def ten_and_rank() -> int:
    """Something that is another one on each rank."""
    return 10 + int(os.environ["RANK"])


def fail() -> None:
    """Raise an error."""
    raise RuntimeError("on purpose")
