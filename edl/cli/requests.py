"""Requests for another size or other members from the command line: submit, then poll the status until it is
reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from edl.cli.find import LOOK_FAILURES
from edl.cli.job_end import JobEnd
from edl.errors import UsageError
from edl.master.events import Kind
from edl.rendezvous.phrases import count, listed
from edl.wire.scale_requests import Granted, ScaleRequest, ScaleView
from edl.wire.status import DroppedSlot, JobStatus

LOOK_S = 0.5
"""Seconds between two reads of the status."""
MOST_SILENT_READS = 120
"""Consecutive reads without an answer after which waiting ends."""


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """The outcome of a request."""

    ok: bool
    text: str
    verdict: str = ""
    """``Verdict`` of the Master."""
    revision: int = 0
    """Store revision of the size."""
    generation: int = 0
    done: bool = False
    """Whether the command has waited until the request was fulfilled."""


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """The progress of a request according to one status."""

    over: bool
    """Whether waiting ends."""
    text: str
    """The outcome; until then what the request is waiting for."""
    ok: bool = True


Goal = Callable[[JobStatus], RequestProgress]
"""A function that judges a status: is the request fulfilled, impossible, or still in progress?"""


class MasterCalls(Protocol):
    """The part of a Master's client that requests use."""

    async def status(self) -> JobStatus:
        """The current status of the job."""
        ...

    async def submit(self, request: ScaleRequest) -> Granted:
        """Submit a request; returns the Master's answer."""
        ...


Connect = Callable[[], AbstractAsyncContextManager[MasterCalls]]
"""Connects to the current Master."""


async def ask(client: MasterCalls, request: ScaleRequest) -> Granted:
    """Submit a request. Raises ``UsageError`` if it is refused."""
    granted = await client.submit(request)
    if not granted.ok:
        raise UsageError(granted.text)
    return granted


def result_of(granted: Granted) -> ScaleResult:
    """The result of a command that does not wait."""
    return ScaleResult(True, granted.text, granted.verdict.value, granted.revision, granted.generation)


async def reach(
    connect: Connect,
    granted: Granted,
    goal: Goal,
    say: Callable[[str], None],
    pause: Callable[[], Awaitable[None]],
    job_end: JobEnd,
) -> ScaleResult:
    """Poll the status until the goal is reached or has become impossible, across changes of the Master. ``say``: called
    with what the request is waiting for, whenever that changes. ``pause``: sleeps between two reads."""
    said, silent = granted.text, 0
    say(said)
    while True:
        try:
            async with connect() as client:
                while True:
                    status, silent = await client.status(), 0
                    job_end.see(status)
                    seen = goal(status)
                    if seen.over:
                        return replace(result_of(granted), ok=seen.ok, text=seen.text, done=seen.ok)
                    if seen.text != said:
                        said = seen.text
                        say(said if said.startswith("waiting") else f"waiting: {said}")
                    await job_end.rest(pause())
        except LOOK_FAILURES as error:
            ending = job_end.ending_of(error)
            if ending:
                return replace(result_of(granted), ok=False, text=ending)
            silent += 1
            if silent >= MOST_SILENT_READS:
                why = str(error) or type(error).__name__
                text = f"no Master answers for the job ({said}). The request is still valid; see edl status"
                text += f". The last attempt: {why}"
                return replace(result_of(granted), ok=False, text=text)
            if silent == 2:
                say("waiting: no Master answers at the moment")
        await job_end.rest(pause())


async def sleep_between_reads() -> None:
    """Sleep for ``LOOK_S`` seconds."""
    await asyncio.sleep(LOOK_S)


def _ended(status: JobStatus) -> RequestProgress | None:
    return RequestProgress(True, f"the job has ended: {status.reason}", ok=False) if status.phase == "ended" else None


def size_is(nodes: int, generation: int) -> Goal:
    """The goal that the running world has the requested size. ``nodes`` 0: whatever size is requested now."""

    def progress(status: JobStatus) -> RequestProgress:
        scale = status.scale
        if scale.generation < generation:
            return RequestProgress(False, "the Master has not confirmed the request yet")
        if nodes and scale.desired != nodes:
            return RequestProgress(
                True, f"superseded: {scale.by or 'another user'} has requested {scale.desired} nodes since", ok=False
            )
        if scale.suspended:
            return RequestProgress(True, f"{scale.desired} nodes will train when the job is resumed (edl resume)")
        if scale.waiting:
            return RequestProgress(False, scale.waiting)
        if scale.observed < generation:
            return RequestProgress(False, f"{count(scale.nodes)} in training, {scale.desired} wanted")
        return RequestProgress(True, f"{count(scale.nodes)} in training (wanted: {scale.desired})")

    return lambda status: _ended(status) or progress(status)


def gone(names: tuple[str, ...], generation: int) -> Goal:
    """The goal that these nodes have left, even if new launchers have joined under the same names. Fails if they stay
    because no checkpoint could be written."""

    def progress(status: JobStatus) -> RequestProgress:
        left = [node for node in status.nodes if node.node in names]
        if not left:
            return RequestProgress(True, f"{listed(names)} {'has' if len(names) == 1 else 'have'} left")
        if status.scale.observed >= generation:
            stays = _stays(status, names)
            if stays:
                return RequestProgress(True, stays, ok=False)
            return RequestProgress(True, f"{listed(names)} left, and {listed([n.node for n in left])} joined again")
        states = ", ".join(f"{node.node} is {'draining' if node.draining else node.state}" for node in left)
        return RequestProgress(False, f"{states}; {status.boundary or status.reason}")

    return lambda status: _ended(status) or progress(status)


def _stays(status: JobStatus, names: tuple[str, ...]) -> str:
    """The history's line about one of these nodes that stays after all, unless a later drain was accepted; empty:
    none."""
    for entry in reversed(status.history):
        if entry.kind == Kind.DRAIN.value:
            break
        if entry.kind == Kind.DRAIN_FAILED.value and (entry.node in names or not entry.node):
            return entry.text  # without a node: several stay, named in the text
    return ""


def cordoned(name: str, generation: int, *, wanted: bool) -> Goal:
    """The goal that a node is cordoned and does not train, or with ``wanted`` false that it is not cordoned."""

    def progress(status: JobStatus) -> RequestProgress:
        known = next((node for node in status.nodes if node.node == name), None)
        if (name in status.scale.cordoned) != wanted:
            return _contradicted(status.scale, generation, f"{name} is {'not ' if wanted else ''}cordoned")
        if not wanted:
            return RequestProgress(True, f"{name} may take part again")
        if known is not None and known.position >= 0 and status.phase == "running":
            return RequestProgress(False, f"{name} still trains; {status.boundary or status.reason}")
        return RequestProgress(True, f"{name} takes no part")

    return lambda status: _ended(status) or progress(status)


def dropped(name: str, device: str, generation: int, *, wanted: bool) -> Goal:
    """The goal that one slot of a node is dropped and has no worker, or with ``wanted`` false that it is not dropped.
    ``device``: its number, or the UUID of its device."""

    def is_meant(one: DroppedSlot) -> bool:
        uuids = one.device.casefold().split(",") if one.device else []
        return one.node == name and (device == str(one.slot) or device.casefold() in uuids)

    def progress(status: JobStatus) -> RequestProgress:
        found = next((one for one in status.dropped if is_meant(one)), None)
        what = f"slot {found.slot if found is not None else device} of {name}"
        if (found is not None) != wanted:
            return _contradicted(status.scale, generation, f"{what} is {'not ' if wanted else ''}dropped")
        if found is None:
            if status.scale.observed < generation and status.phase == "running":
                return RequestProgress(False, status.scale.waiting or status.reason)
            return RequestProgress(True, f"{what} may take part again")
        member = next((node for node in status.nodes if node.node == name and node.position >= 0), None)
        if status.phase == "running" and member is not None and found.slot in member.places:
            return RequestProgress(False, f"a worker still trains in {what}; {status.boundary or status.reason}")
        return RequestProgress(True, f"{what} takes no part")

    return lambda status: _ended(status) or progress(status)


def suspended(generation: int, *, wanted: bool) -> Goal:
    """The goal that a suspended job has stopped training, or with ``wanted`` false that a world trains again."""

    def progress(status: JobStatus) -> RequestProgress:
        if status.scale.suspended != wanted:
            return _contradicted(status.scale, generation, f"the job is {'not ' if wanted else ''}suspended")
        running = [node.node for node in status.nodes if node.state in ("running", "stopping", "preparing")]
        if wanted and (status.phase == "running" or running):
            ending = f"workers are ending on {listed(running) or 'their nodes'}"
            return RequestProgress(False, f"{ending}; {status.boundary or status.reason}")
        if not wanted and status.phase != "running":
            return RequestProgress(False, status.scale.waiting or status.reason)
        return RequestProgress(
            True, "training has stopped; see edl resume" if wanted else f"the job trains: {status.reason}"
        )

    return lambda status: _ended(status) or progress(status)


def _contradicted(scale: ScaleView, generation: int, how: str) -> RequestProgress:
    """The progress if the status contradicts the request: another request has reversed it, or the Master has not
    confirmed it yet. ``how``: the contradiction."""
    if scale.generation < generation:
        return RequestProgress(False, "the Master has not confirmed the request yet")
    return RequestProgress(True, f"{how}: {scale.by or 'another user'} has requested that since", ok=False)
