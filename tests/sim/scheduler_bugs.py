"""Bugs planted in the reconciler and in its shell. ``FIRST`` names a schedule that finds each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from edl.errors import SchedulerError
from edl.job_records import SizeOwner
from edl.schedulers import reconcile, shell
from edl.schedulers.plan import JobSummary
from edl.schedulers.shell import Reconciler

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]


def _seen(patch: Patch, change: Callable[[JobSummary], JobSummary]) -> None:
    real = shell.job_of
    patch.setattr(shell, "job_of", lambda status: change(real(status)))


def asks_while_suspended(patch: Patch) -> None:
    """A suspended job asks for nodes."""
    _seen(patch, lambda job: dataclasses.replace(job, suspended=False))


def asks_although_the_size_is_external(patch: Patch) -> None:
    """The owner of the size is not looked at."""
    about = reconcile.About

    def master(name: str, owner: SizeOwner, *rest: Any) -> reconcile.About:
        return about(name, SizeOwner.MASTER, *rest)

    patch.setattr(reconcile, "About", master)


def a_failed_call_stays_under_way(patch: Patch) -> None:
    """The machine does not hear of a call that has failed."""

    async def call(self: Any, work: Any) -> None:
        try:
            self._events.put_nowait(reconcile.CallSucceeded(await work))
        except SchedulerError:
            return

    patch.setattr(Reconciler, "_call", call)


def sees_the_job_once(patch: Patch) -> None:
    """Changes of the job do not reach the machine, unless it asks the Master for something."""

    async def once(self: Any) -> None:
        await self._master.changed()
        self._show()

    patch.setattr(Reconciler, "_look_at_job", once)


def ends_at_once(patch: Patch) -> None:
    """With the job, the reconciler ends without a last call."""
    real = reconcile._Turn._looked

    def looked(self: Any, job: JobSummary) -> None:
        real(self, job)
        if job.ended:
            self._set(finished=True)

    patch.setattr(reconcile._Turn, "_looked", looked)


FIRST: dict[Bug, int] = {
    asks_although_the_size_is_external: 4,
    a_failed_call_stays_under_way: 5,
    sees_the_job_once: 0,
    ends_at_once: 5,
}
