"""A worker that builds its trainer before it has a place in a world, as a process that is started ahead of one does.

Trainers form a process group as soon as they are created if they find a rank in the environment. That group would be
the one of the first world only.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from edl.errors import StateError
from edl.wire.local import AGENT_VARIABLE
from edl.worker import session as sessions
from edl.worker.session import AHEAD_VARIABLE

_PLACE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EDL_ROUND", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT", "PADDLE_GLOBAL_RANK", "PADDLE_GLOBAL_SIZE",
    "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "PADDLE_RANK_IN_NODE", "PADDLE_NNODES", "PADDLE_MASTER",
)  # fmt: skip
"""What a process finds a world by. ``run`` sets all of them when the worker has its place."""
_OF_MPI = (
    "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
"""The launcher's own, if ``mpirun`` has started it: Accelerate would take its launchers for the world."""


def is_worker(environment: MutableMapping[str, str]) -> bool:
    """Whether this process is a worker of edl's launcher; false in processes that a worker has started."""
    return bool(environment.get(AGENT_VARIABLE)) and not sessions.is_helper(environment)


def give_up_place(environment: MutableMapping[str, str], what: str, *, grouped: bool) -> None:
    """Remove the place in a world from the environment until ``run`` has one; a worker that was started ahead of its
    world keeps its local rank, to warm its device up. ``what`` is named in errors. ``grouped``: whether the framework
    has a process group.

    Raises ``StateError`` when it has, or when the worker has a place already.
    """
    opened = sessions.opened()
    if grouped or (opened is not None and opened.seat is not None):
        raise StateError(
            f"{what} must be created before the process has a place in a world, and it has one already: create "
            f"{what} at the top of the script, before TrainingArguments, Accelerator and the like, and call "
            "edl.context() only in training"
        )
    if "EDL_ROUND" not in environment and "LOCAL_RANK" in environment:
        environment[AHEAD_VARIABLE] = environment["LOCAL_RANK"]
    for name in (*_PLACE, *_OF_MPI):
        environment.pop(name, None)
