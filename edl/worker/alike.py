"""Checks that all workers of a world hold the same models, since an unsharded state is restored from one worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from edl.errors import StateError
from edl.worker.framework import Framework


def digest(text: str) -> str:
    """Digest (16 hex digits) of a description of what a worker holds."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(framework: Framework, mine: Mapping[str, str]) -> None:
    """Compare digests of models by name. A collective; all workers raise ``StateError`` if one has another model."""
    found = [json.loads(answer) for answer in framework.exchange(json.dumps(mine).encode())]
    for rank, theirs in enumerate(found):
        differing = sorted(name for name in theirs.keys() | found[0].keys() if theirs.get(name) != found[0].get(name))
        if differing:
            raise StateError(
                f"state.{differing[0]} has other parameters on rank {rank} than on rank 0, so it cannot be restored on "
                "all workers from one of them. Where each worker has its own part of a model (pipeline stages, "
                "experts), use fully_shard with State(sharded=True), or checkpoints of your own"
            )
