"""The configuration of torchtitan's ``Trainer`` for one world of any size."""

from __future__ import annotations

import copy
from typing import Any

from edl.integrations.stream_split import StreamSplit
from edl.integrations.titan_rules import data_parallel
from edl.integrations.titan_streams import DataStreams


def of_world(config: Any, world: int) -> Any:
    """A copy for a world of so many workers. Raises ``StateError`` if they are too many, or not a multiple of a replica
    of the model."""
    made = copy.deepcopy(config)
    training = made.training
    workers, made.parallelism.data_parallel_replicate_degree = data_parallel(made.parallelism, world)
    streams = training.global_batch_size // training.local_batch_size
    made.dataloader = DataStreams.Config(loader=made.dataloader, count=streams)
    # torchtitan calculates its accumulation from it. Workers with fewer streams than others fill up.
    training.global_batch_size = training.local_batch_size * workers * StreamSplit(streams, 0, workers).turns
    return made
