"""Which torchtitan jobs can continue, without torchtitan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edl.errors import StateError
from edl.integrations.titan_rules import data_parallel, refuse


def degrees(**other: int) -> Any:
    usual = {f"{name}_parallel_degree": 1 for name in ("pipeline", "expert", "tensor", "context")}
    return SimpleNamespace(**{**usual, "data_parallel_shard_degree": -1, "data_parallel_replicate_degree": 1, **other})


def config(whole: int = 8, micro: int = 2, mode: str = "default", seed: bool = False, **parallelism: int) -> Any:
    return SimpleNamespace(
        parallelism=degrees(**parallelism),
        training=SimpleNamespace(global_batch_size=whole, local_batch_size=micro),
        comm=SimpleNamespace(mode=mode),
        checkpoint=SimpleNamespace(create_seed_checkpoint=seed),
    )


def test_an_ordinary_job_is_accepted() -> None:
    refuse(config(tensor_parallel_degree=2, context_parallel_degree=2))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (config(pipeline_parallel_degree=2), "pipeline_parallel_degree=2"),
        (config(expert_parallel_degree=4), "expert_parallel_degree=4"),
        (config(mode="fake_backend"), "fake_backend"),
        (config(seed=True), "create_seed_checkpoint"),
        (config(whole=-1), r"global_batch_size=-1: .* multiple of training\.local_batch_size=2"),
        (config(whole=7), "global_batch_size=7: .*=2"),
        (config(micro=0), "local_batch_size=0"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(given: Any, text: str) -> None:
    with pytest.raises(StateError, match=text):
        refuse(given)


def test_all_reasons_are_named_at_once() -> None:
    with pytest.raises(StateError, match=r"pipeline_parallel_degree=2.*; .*global_batch_size"):
        refuse(config(whole=0, pipeline_parallel_degree=2))


@pytest.mark.parametrize(
    ("given", "world", "found"),
    [
        (degrees(), 3, (3, 1)),
        (degrees(tensor_parallel_degree=2), 6, (3, 1)),
        (degrees(data_parallel_shard_degree=2), 6, (6, 3)),
        (degrees(data_parallel_shard_degree=2, tensor_parallel_degree=2), 8, (4, 2)),
        (degrees(data_parallel_replicate_degree=2), 6, (6, 2)),
        (degrees(data_parallel_shard_degree=1), 5, (5, 5)),
    ],
)
def test_the_data_parallel_dimension_takes_what_the_others_leave(
    given: Any, world: int, found: tuple[int, int]
) -> None:
    assert data_parallel(given, world) == found


def test_a_world_of_incomplete_replicas_is_refused_with_the_option_to_give() -> None:
    with pytest.raises(StateError, match=r"multiple of 4 workers, and this world has 6: .*--replica-size=4"):
        data_parallel(degrees(data_parallel_shard_degree=2, tensor_parallel_degree=2), 6)
