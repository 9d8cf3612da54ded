"""Looks for the files by which somebody asks for a checkpoint or for the end of the job, and tells the Master.

A file asks once. It asks again in the next round if nothing has come of it, and when the Master was out of reach, which
may have cost the first message. Every node looks for ``KILL``, also while no world runs; only the node that writes
checkpoints looks after ``SAVE``, or there would be one for each node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from edl.agent.machine.events import Event, Report
from edl.agent.machine.state import AgentPhase, AgentState
from edl.types import Round
from edl.wire.messages import NO_STATE, Asked, Purpose, Version


class SwitchFiles(Protocol):
    """``edl.agent.switches.Switches``. Both calls block; never two at a time."""

    poll_s: float

    def poll(self) -> Collection[Asked]:
        """What is asked for now."""
        ...

    def clear_save(self) -> None:
        """A checkpoint was written."""
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
        self._told: dict[Purpose, Round] = {}
        """What the Master has been told, and in which round."""
        self._after: Version | None = None
        """A checkpoint has been asked for; one of a commit newer than this is the answer."""
        self._answered = asyncio.Event()
        self._round = Round(0)
        self._stale: Mapping[int, int] = {}
        """Progress of the rounds before."""

    async def run(self) -> None:
        """Look for ever."""
        while True:
            if self._answered.is_set():
                self._answered.clear()
                await asyncio.to_thread(self._files.clear_save)
                # A file that is still there was touched meanwhile, and asks for another one.
                self._told.pop(Purpose.SAVE, None)
                self._after = None
            self._tell(await asyncio.to_thread(self._files.poll))
            try:
                await asyncio.wait_for(self._answered.wait(), self._files.poll_s)
            except asyncio.TimeoutError:
                continue

    def kept(self, version: Version) -> None:
        """A commit is complete in the checkpoint directory."""
        if self._after is not None and version > self._after:
            self._answered.set()

    def _tell(self, asked: Collection[Asked]) -> None:
        state = self._state()
        if state.running_round != self._round:
            self._round, self._stale = state.running_round, dict(self._progress)
        wanted = {request.purpose: request for request in asked}
        for gone in self._told.keys() - wanted.keys() if state.connected else tuple(self._told):
            del self._told[gone]
        if Purpose.SAVE not in wanted:
            self._after = None
        for purpose, request in wanted.items():
            told = self._told.get(purpose) == state.running_round
            if told or not state.connected or (purpose is Purpose.SAVE and not _writes(state)):
                continue
            if purpose is Purpose.SAVE and self._after is None:
                self._after = self._newest(state)
            self._told[purpose] = state.running_round
            self._post(Report(request))

    def _newest(self, state: AgentState) -> Version:
        """The newest commit of this round, or the one that it began from."""
        if state.world is None:
            return NO_STATE
        made = [commit for rank, commit in self._progress.items() if self._stale.get(rank) != commit]
        return Version(state.world.era, max(made)) if made else state.world.restore


def _writes(state: AgentState) -> bool:
    """Whether this node is the first of a world in training."""
    first = state.world.members[0].node if state.world is not None else ""
    return state.phase is AgentPhase.RUNNING and state.underway and first == state.info.node
