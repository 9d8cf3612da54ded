"""What a torchtitan job needs so that it can continue in worlds of other sizes; independent of torchtitan."""

from __future__ import annotations

from typing import Any

from edl.errors import StateError


def refuse(config: Any) -> None:
    """Raise ``StateError`` for a configuration whose state or steps edl cannot keep."""
    parallelism, training = config.parallelism, config.training
    whole, micro = training.global_batch_size, training.local_batch_size
    reasons = {
        f"parallelism.pipeline_parallel_degree={parallelism.pipeline_parallel_degree}: set it to 1":
        parallelism.pipeline_parallel_degree > 1,
        f"parallelism.expert_parallel_degree={parallelism.expert_parallel_degree}: set it to 1":
        parallelism.expert_parallel_degree > 1,
        f"comm.mode={config.comm.mode}: edl forms the group; use default": config.comm.mode != "default",
        "checkpoint.create_seed_checkpoint: run torchtitan.train for that": config.checkpoint.create_seed_checkpoint,
        f"training.global_batch_size={whole}: a step would have other samples in each world; set it to a multiple of "
        f"training.local_batch_size={micro}": min(whole, micro) <= 0 or whole % micro != 0,
    }  # fmt: skip
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise StateError(f"edl cannot continue a torchtitan job with {'; '.join(found)}")


def data_parallel(parallelism: Any, world: int) -> tuple[int, int]:
    """The data-parallel workers of a world of so many, and how many replicas of the sharded model they are.

    Without ``data_parallel_shard_degree`` the model is sharded over all workers that the other dimensions leave; with
    one the number of replicas follows the world. Raises ``StateError`` for a world that the other dimensions do not
    divide.
    """
    unit = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    sharded, replicas = parallelism.data_parallel_shard_degree, parallelism.data_parallel_replicate_degree
    whole = unit * (sharded if sharded > 0 else replicas)
    if world % whole:
        raise StateError(
            f"the degrees of parallelism need a multiple of {whole} workers, and this world has {world}: start the job "
            f"with --replica-size={whole}, which keeps each world at such a size"
        )
    workers = world // unit
    return workers, workers // sharded if sharded > 0 else replicas
