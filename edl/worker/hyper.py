"""``settings()``: batch size and learning rate prescribed by the Master, for this worker."""

from __future__ import annotations

import os
from dataclasses import dataclass

from edl.arithmetic.hyper import StepPlan, factor_at, from_environment, step_plan
from edl.errors import StateError
from edl.wire.local import AGENT_VARIABLE
from edl.wire.records import Settings
from edl.worker import session as sessions
from edl.worker.context import Context, context
from edl.worker.session import Session


@dataclass(frozen=True, slots=True)
class SettingsView:
    """The settings for the steps after the last commit. Immutable: call ``settings()`` again after each
    ``commit()``."""

    number: int
    """Counts changes over the life of the job; 0: nothing is prescribed."""
    global_batch: int
    """Samples per step over all workers; 0 if neither the job nor the script specified it."""
    local_batch: int
    """This worker's samples per step; 0 as above. Uneven splits give lower ranks one more."""
    micro_batch: int
    """Samples in the largest micro-batch; 0 as above."""
    accumulation: int
    """Micro-batches per step, the same on all workers."""
    lr_factor: float
    """Factor for the script's LR in the next step, as far as the Master knows it."""
    logical_ranks: int
    """Fixed number of logical ranks, 0 for none."""


def current() -> Settings:
    """The settings of this worker's next step; ``NO_SETTINGS`` when nothing is prescribed.

    A worker that was started ahead of its world waits for it. Plain scripts, helper processes and scripts without a
    launcher use the environment.
    """
    session = _session()
    return from_environment(os.environ) if session is None else session.settings


def lr_factor(commit: int | None = None) -> float:
    """LR factor of the step after a commit, by default after the last one."""
    return factor_at(current(), commits() if commit is None else commit)


def commits() -> int:
    """Number of commits of this worker's state; 0 without a state."""
    session = sessions.opened()
    passed = getattr(session.state, "commits", 0) if session is not None else 0
    return passed if isinstance(passed, int) else 0


def plan(batch_size: int = 0) -> StepPlan:
    """Division of the next step's samples among the world's workers. ``batch_size``: the script's own, 0 if unknown.

    Raises ``StateError`` when that cannot be determined.
    """
    settings = current()
    return step_plan(settings, batch_size, _place()[1])


def settings(batch_size: int = 0) -> SettingsView:
    """The settings of the next step. ``batch_size``: the script's own, for one forward pass; without it, numbers that
    depend on it are 0 where the job prescribes no batch size.

    Raises ``StateError`` when the settings do not fit the world.
    """
    return _view(current(), *_place(), commits(), batch_size)


def view(place: Context, batch_size: int = 0) -> SettingsView:
    """The settings for a known place in the world."""
    return _view(current(), place.rank, place.world_size, commits(), batch_size)


def _view(settings: Settings, rank: int, workers: int, commit: int, batch_size: int) -> SettingsView:
    factor = factor_at(settings, commit)
    if not (batch_size or settings.global_batch or settings.local_batch):
        return SettingsView(settings.number, 0, 0, 0, 1, factor, settings.logical_ranks)
    if not 0 <= rank < workers:
        raise StateError(f"rank {rank} in a world of {workers} workers: RANK and WORLD_SIZE contradict each other")
    found = step_plan(settings, batch_size, workers)
    return SettingsView(
        settings.number,
        found.global_batch,
        found.local[rank],
        found.micro_batch,
        found.micros,
        factor,
        settings.logical_ranks,
    )


def _session() -> Session | None:
    """The session whose settings apply; None if the environment's do. Neither makes a plain script wait for worlds nor
    a script without a launcher look for one."""
    session = sessions.opened()
    if session is not None and session.seat is not None:
        return session
    started_with_world = "EDL_ROUND" in os.environ
    if sessions.is_helper(os.environ) or started_with_world or not os.environ.get(AGENT_VARIABLE):
        return None
    context()  # started ahead: the settings come with its place
    return sessions.current()


def _place() -> tuple[int, int]:
    """Rank and world size, from the environment if possible, without joining a world."""
    session = _session()
    if session is not None and session.seat is not None:
        return session.seat.rank, session.seat.world_size

    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default

    return number("RANK", 0), number("WORLD_SIZE", 1)
