"""Variables by which clusters tell every program of its place, in terms of our own options."""

from __future__ import annotations

from collections.abc import Mapping

from edl.launch.told import Told


def apply(told: Told, env: Mapping[str, str]) -> None:
    """Offer what they say for options that nobody has given."""
