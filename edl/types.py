"""Names for the things everybody passes around.

An id is a ``NewType`` so that mypy refuses a node where a job is meant. Nothing here has behaviour.
"""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)
"""What one launch command describes; one path segment, so it never holds a slash."""

NodeId = NewType("NodeId", str)
"""A host (pod) taking part. Stable across rounds; unique within a job."""

Round = NewType("Round", int)
"""Number of a formed world. The first world is round 1; 0 means "none yet"."""

Rank = NewType("Rank", int)
"""Position of a worker in a world, ``0 .. world_size - 1``."""

Incarnation = NewType("Incarnation", int)
"""Which life of a node this is: the id of the store lease it lives on. A restarted node has another one."""

Token = NewType("Token", int)
"""Fencing token of a Master: the revision at which its election key was created. Larger is newer."""
