"""How often Python looks for cyclic garbage in a launcher."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""New objects after which Python looks for garbage among them; its default is 700. A Master of a thousand nodes makes
tens of thousands for a new world, nearly all of which stay, and looked through them again and again."""


def collect_rarely() -> None:
    """Let this process look for cyclic garbage rarely. Its other garbage is freed at once, as always."""
    gc.set_threshold(YOUNG_OBJECTS)
