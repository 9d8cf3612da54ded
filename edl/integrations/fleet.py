"""The functions of ``paddle.distributed.fleet`` that a data-parallel loop calls, on the group that edl forms.

``from edl.integrations import fleet`` takes the place of ``from paddle.distributed import fleet``. Paddle's own groups
cannot be formed a second time in a process, and a rank that dies aborts the others; edl's can, and an exception is
raised.
"""

from __future__ import annotations

from typing import Any

from edl.integrations.versions import TestedVersions

try:
    import paddle
    from paddle.distributed.fleet import DistributedStrategy
except ImportError as error:
    raise ImportError(f"edl.integrations.fleet cannot be used here ({error}): pip install 'edl[paddle]'") from error

import edl.paddle as edl
from edl.errors import StateError

__all__ = [
    "DistributedStrategy", "barrier_worker", "distributed_model", "distributed_optimizer", "init", "is_first_worker",
    "worker_index", "worker_num",
]  # fmt: skip
TESTED = (TestedVersions("paddlepaddle", "3.3", "3.4"), paddle.__version__)
_FEATURES = (
    "adaptive_localsgd", "amp", "asp", "auto", "dgc", "fp16_allreduce", "gradient_merge", "heter_ccl_mode", "lamb",
    "lars", "localsgd", "pipeline", "qat", "recompute", "semi_auto", "sharding", "sync_batch_norm", "tensor_parallel",
)  # fmt: skip
"""What a strategy can switch on, besides how gradients are collected into messages."""
_DEGREES = ("mp_degree", "pp_degree", "sharding_degree", "sep_degree", "ep_degree", "cp_degree")


def init(role_maker: Any = None, is_collective: bool = False, strategy: Any = None, log_level: Any = "INFO") -> None:
    """Check what fleet would be asked for; ``run`` has formed the group. Raises ``StateError`` for anything but
    data parallelism."""
    del log_level  # nothing is logged
    tested, installed = TESTED
    tested.warn(installed)
    if role_maker is not None or not is_collective:
        raise StateError(
            "fleet.init(): edl keeps collective training only: call fleet.init(is_collective=True), without a role "
            "maker. For parameter servers see docs/parameter-servers.md"
        )
    refuse(strategy)


def refuse(strategy: Any) -> None:
    """Raise ``StateError`` for a strategy that is more than data parallelism over all workers."""
    if strategy is None:
        return
    degrees = strategy.hybrid_configs
    found = [f"{name}=True" for name in _FEATURES if getattr(strategy, name, False)]
    found += [f"{name}={degrees[name]}" for name in _DEGREES if degrees.get(name, 1) > 1]
    if degrees["dp_degree"] > 0:
        found.append(f"dp_degree={degrees['dp_degree']}, which a world of another size cannot have (use -1)")
    if found:
        raise StateError(
            f"edl cannot continue a fleet job with {', '.join(found)}: only data parallelism over all workers is kept. "
            "Use what Paddle has for single workers (paddle.amp, recompute, optimizers), or paddle.distributed.fleet "
            "and its own checkpoints"
        )


def distributed_model(layer: Any) -> Any:
    """The layer on all workers, with averaged gradients: ``edl.paddle.parallel``."""
    return edl.parallel(layer)


def distributed_optimizer(optimizer: Any, strategy: Any = None) -> Any:
    """The optimizer itself: gradients are averaged before it sees them. Raises ``StateError`` as ``init`` does."""
    refuse(strategy)
    return optimizer


def worker_index() -> int:
    """This worker's rank in the world; it changes with the world."""
    return edl.context().rank


def worker_num() -> int:
    """Number of workers in the world; it changes with the world."""
    return edl.context().world_size


def is_first_worker() -> bool:
    """Whether the rank is 0."""
    return worker_index() == 0


def barrier_worker() -> None:
    """Wait for all workers."""
    edl.barrier()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"edl.integrations.fleet has no {name}: it has what a data-parallel loop needs ({', '.join(__all__)}). Keep "
        "the state in edl.State, and use paddle itself for the rest"
    )
