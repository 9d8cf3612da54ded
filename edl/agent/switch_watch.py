"""Polls for the files that request a checkpoint or the end of the job, and tells the Master.

A file is reported once per round, and again if the Master was unreachable, which may have lost the message. Every node
looks for ``KILL``, even while no world runs; only the node that writes checkpoints handles ``SAVE``, to avoid a
checkpoint per node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from edl.agent.machine.events import Event, Report
from edl.agent.machine.state import AgentPhase, AgentState
from edl.types import Round
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, Version


class SwitchFiles(Protocol):
    """The interface of ``edl.agent.switches.Switches``. Both calls block; never call two at a time."""

    poll_s: float

    def poll(self) -> Collection[Asked]:
        """The requests that the switch files make now; reads the checkpoint directory."""
        ...

    def clear_save(self) -> None:
        """A checkpoint was written: remove the ``SAVE`` file."""
        ...


class SwitchWatch:
    """Turns files into events. ``progress`` holds the newest commit of each of this node's workers."""

    def __init__(
        self,
        files: SwitchFiles,
        state: Callable[[], AgentState],
        progress: Mapping[int, int],
        post: Callable[[Event], None],
    ) -> None:
        self._files = files
        self._state = state
        self._progress = progress
        self._post = post
        self._sent: dict[Purpose, Round] = {}
        """Requests sent to the Master, with the round in which each was sent."""
        self._after: Version | None = None
        """Set while a checkpoint is requested; a commit newer than this satisfies the request."""
        self._answered = asyncio.Event()
        self._round = Round(0)
        self._stale: Mapping[int, int] = {}
        """Progress as of the previous round."""

    async def run(self) -> None:
        """Poll every ``poll_s`` seconds until cancelled, and post an event for each new request."""
        while True:
            if self._answered.is_set():
                self._answered.clear()
                await asyncio.to_thread(self._files.clear_save)
                # A file that still exists was touched meanwhile, and requests another checkpoint.
                self._sent.pop(Purpose.SAVE, None)
                self._after = None
            self._tell(await asyncio.to_thread(self._files.poll))
            try:
                await asyncio.wait_for(self._answered.wait(), self._files.poll_s)
            except asyncio.TimeoutError:
                continue

    def kept(self, version: Version) -> None:
        """Note that a commit is complete in the checkpoint directory."""
        if self._after is not None and version > self._after:
            self._answered.set()

    def _tell(self, asked: Collection[Asked]) -> None:
        state = self._state()
        if state.running_round != self._round:
            self._round, self._stale = state.running_round, dict(self._progress)
        wanted = {request.purpose: request for request in asked}
        for gone in self._sent.keys() - wanted.keys() if state.connected else tuple(self._sent):
            del self._sent[gone]
        if Purpose.SAVE not in wanted:
            self._after = None
        for purpose, request in wanted.items():
            sent = self._sent.get(purpose) == state.running_round
            if sent or not state.connected or (purpose is Purpose.SAVE and not _writes(state)):
                continue
            if purpose is Purpose.SAVE and self._after is None:
                self._after = self._newest(state)
            self._sent[purpose] = state.running_round
            self._post(Report(request))

    def _newest(self, state: AgentState) -> Version:
        """The newest commit of this round, or the one from which it began."""
        if state.world is None:
            return NO_STATE
        made = [commit for rank, commit in self._progress.items() if self._stale.get(rank) != commit]
        return Version(state.world.era, max(made)) if made else state.world.restore


def _writes(state: AgentState) -> bool:
    """Whether this node is the first one of a training world, and therefore writes checkpoints."""
    first = state.world.members[0].node if state.world is not None else ""
    return state.phase is AgentPhase.RUNNING and state.underway and first == state.info.node
