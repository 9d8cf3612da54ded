"""Types of the ids and numbers that are passed around everywhere.

Each is a ``NewType``, so that mypy rejects a node where a job is expected. Nothing here has behaviour.
"""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)
"""Name of a job: one path segment, so it never contains a slash."""

NodeId = NewType("NodeId", str)
"""Name of a host (or pod) that takes part in a job. Stable across rounds; unique within a job."""

Round = NewType("Round", int)
"""Number of a formed world. The first world is round 1; 0 means "none yet"."""

Rank = NewType("Rank", int)
"""Position of a worker in a world, ``0 .. world_size - 1``."""

Incarnation = NewType("Incarnation", int)
"""One life of a node: the id of the store lease that its key is attached to. A restarted node has another one."""

FencingToken = NewType("FencingToken", int)
"""Fencing token of a Master: the revision at which its election key was created. Larger is newer."""
