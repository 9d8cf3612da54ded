"""Types of the fields of messages, with the bounds that decoding checks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
Whole = Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)]
Number = Annotated[float, Meta(ge=0, le=1e300)]
Name = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]*\Z")]
"""A name that is valid in a key of the store."""
Ranges = tuple[tuple[Natural, Natural], ...]
"""Half-open ranges of shard numbers, in ascending order, without overlaps."""
