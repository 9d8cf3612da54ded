"""The configuration of torchtitan's ``Trainer`` for one world of any size."""

from __future__ import annotations

import copy
from typing import Any

from edl.errors import StateError
from edl.integrations.titan_streams import Streams


def refuse(config: Any) -> None:
    """Raise ``StateError`` for a job whose state or steps edl cannot keep."""
    parallelism, training = config.parallelism, config.training
    reasons = {
        f"parallelism.pipeline_parallel_degree={parallelism.pipeline_parallel_degree}: its stages are not kept":
        parallelism.pipeline_parallel_degree > 1,
        f"parallelism.expert_parallel_degree={parallelism.expert_parallel_degree}: its experts are not kept":
        parallelism.expert_parallel_degree > 1,
        f"comm.mode={config.comm.mode}: edl forms the group": config.comm.mode != "default",
        "checkpoint.create_seed_checkpoint: run torchtitan.train for that":
        config.checkpoint.create_seed_checkpoint,
        f"training.global_batch_size={training.global_batch_size}, so that a step would have other samples in each "
        "world: set it to a multiple of training.local_batch_size": training.global_batch_size <= 0,
        f"training.global_batch_size={training.global_batch_size}: it must be a multiple of local_batch_size="
        f"{training.local_batch_size}": training.global_batch_size > 0
        and training.global_batch_size % training.local_batch_size != 0,
    }  # fmt: skip
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise StateError(f"edl cannot continue a torchtitan job with {'; '.join(found)}")


def of_world(config: Any, world: int) -> Any:
    """A copy for a world of so many workers. The data-parallel dimension takes what the others leave.

    Raises ``StateError`` for a world that the other dimensions do not divide.
    """
    made = copy.deepcopy(config)
    parallelism, training = made.parallelism, made.training
    unit = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    sharded = parallelism.data_parallel_shard_degree
    whole = unit * (sharded if sharded > 0 else parallelism.data_parallel_replicate_degree)
    if world % whole:
        raise StateError(
            f"the degrees of parallelism need a multiple of {whole} workers, and this world has {world}: start the job "
            f"with --replica-size={whole}, which keeps each world at such a size"
        )
    workers = world // unit
    if sharded > 0:
        parallelism.data_parallel_replicate_degree = workers // sharded
    streams = training.global_batch_size // training.local_batch_size
    made.dataloader = Streams.Config(loader=made.dataloader, count=streams)
    # What torchtitan calculates its accumulation from; a worker with fewer streams than others fills up.
    training.global_batch_size = training.local_batch_size * workers * -(-streams // workers)
    return made
