"""A Master with a job that changes size at once, by the rules of the real one, for tests of what stands before it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from edl.errors import FencedOut
from edl.metrics.facts import HistoryTotals
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose
from edl.wire.records import Version
from edl.wire.scale_requests import Cordon, Drain, Granted, Resize, ScaleRequest, ScaleView, SetBounds, Suspend, Verdict
from edl.wire.status import Answer, EventsRequest, HistoryEntry, JobStatus, NodeView

JOB = "train"


def node(name: str, position: int) -> NodeView:
    state = "running" if position >= 0 else "spare"
    return NodeView(name, "10.0.0.1", 2, state, True, position, 2 * position if position >= 0 else -1, position >= 0)


class FakeMaster:
    """Keeps every request; ``store`` away: requests wait."""

    def __init__(self) -> None:
        self.serving = True
        self.requests: list[ScaleRequest] = []
        self.asked: list[Asked] = []
        self.scale = ScaleView(minimum=1, maximum=8, desired=3, nodes=3, revision=40, generation=1, observed=1)
        self.names = ["node-a", "node-b", "node-c", "node-d"]
        self.kill = ""
        self.history = [HistoryEntry(1, 1.8e9, "world-formed", "round 1: 3 nodes", "", 1)]
        self.store = asyncio.Event()
        self.store.set()
        self.defect: Exception | None = None
        self.followers: set[asyncio.Queue[HistoryEntry | None]] = set()
        self.keys: dict[str, Granted] = {}
        self.endless = False
        """Streams stay open."""
        self.totals = HistoryTotals({"world-formed": 1}, {"first": 1})

    def status(self) -> JobStatus:
        if self.defect is not None:
            raise self.defect
        scale = self.scale
        running = not scale.suspended
        nodes = tuple(node(name, at if running and at < scale.nodes else -1) for at, name in enumerate(self.names))
        return JobStatus(
            job=JOB,
            phase="running" if running else "forming",
            round=scale.generation,
            world_size=2 * scale.nodes,
            reason="round 1: 3 nodes",
            nnodes=f"{scale.minimum}:{scale.maximum}",
            fault_tolerance="elastic",
            restarts_used=0,
            restarts_allowed=3,
            master="node-a",
            nodes=nodes,
            history=tuple(self.history[-10:]),
            failures=(),
            saved=Version(2, 120),
            saved_in="/ckpt/commit-120",
            kill=self.kill,
            scale=scale,
        )

    async def events(self, request: EventsRequest) -> AsyncIterator[HistoryEntry]:
        queue: asyncio.Queue[HistoryEntry | None] = asyncio.Queue()
        follow = request.follow and self.endless
        if follow:
            self.followers.add(queue)
        try:
            for entry in tuple(self.history):
                if entry.number > request.after:
                    yield entry
            while follow and (new := await queue.get()) is not None:
                yield new
        finally:
            self.followers.discard(queue)

    def note(self, kind: str, text: str) -> None:
        self.history.append(HistoryEntry(len(self.history) + 1, 1.8e9 + len(self.history), kind, text, "", 1))
        for follower in self.followers:
            follower.put_nowait(self.history[-1])

    async def ask(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        await self.store.wait()
        if asked.purpose is Purpose.SAVE and self.scale.suspended:
            return Answer("no world with edl.State is in training, so there is nothing to save", ok=False)
        return Answer("a checkpoint is written at the next step boundary", ok=True)

    async def order(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        await self.store.wait()
        if '"dataset": "nothing"' in asked.argument:
            return Answer("the job has no data set named nothing; it has train", ok=False)
        return Answer(f"order {len(self.asked)} for data train: a worker will scan 1 pattern", ok=True)

    async def submit(self, request: ScaleRequest) -> Granted:
        self.requests.append(request)
        await self.store.wait()
        if isinstance(request, Resize) and request.key in self.keys:
            return self.keys[request.key]
        if request.by == "fenced":
            raise FencedOut("another Master has been elected")
        granted = self._granted(request)
        if isinstance(request, Resize) and request.key:
            self.keys[request.key] = granted
        return granted

    def _granted(self, request: ScaleRequest) -> Granted:
        match request:
            case Resize(auto=True):
                return self._say(Verdict.KNOWN, "the autoscale policy decides already")
            case Resize(nodes=nodes, revision=revision):
                if revision not in (0, self.scale.revision):
                    return self._say(Verdict.STALE, "the size has changed since")
                if not self.scale.minimum <= nodes <= self.scale.maximum:
                    return self._say(Verdict.REFUSED, f"{nodes} nodes: from 1 to 8 are allowed; to stop, use suspend")
                if nodes == self.scale.desired:
                    return self._say(Verdict.KNOWN, "so it is")
                return self._change(
                    f"size {nodes}",
                    desired=nodes,
                    asked=nodes,
                    by=request.by,
                    reason=request.reason,
                    nodes=min(nodes, len(self.names)),
                )
            case SetBounds(minimum=minimum, maximum=maximum, revision=revision):
                if revision not in (0, self.scale.revision):
                    return self._say(Verdict.STALE, "the size has changed since")
                if not 1 <= minimum <= maximum:
                    return self._say(Verdict.REFUSED, f"{minimum} to {maximum} is no range")
                desired = max(minimum, min(self.scale.desired, maximum))
                return self._change("bounds", minimum=minimum, maximum=maximum, desired=desired)
            case Drain(nodes=names):
                return self._unknown(names) or self._change(f"drain of {', '.join(names)}")
            case Cordon(node=name, cordoned=cordoned):
                had = set(self.scale.cordoned)
                now = had | {name} if cordoned else had - {name}
                if now == had:
                    return self._unknown((name,)) or self._say(Verdict.KNOWN, "so it is")
                return self._unknown((name,)) or self._change("cordon", cordoned=tuple(sorted(now)))
            case Suspend(suspended=suspended):
                if suspended == self.scale.suspended:
                    return self._say(Verdict.KNOWN, "so it is")
                return self._change("suspended" if suspended else "resumed", suspended=suspended)
        raise AssertionError("unreachable")

    def _unknown(self, names: tuple[str, ...]) -> Granted | None:
        missing = [name for name in names if name not in self.names]
        return self._say(Verdict.UNKNOWN, f"there is no node {missing[0]}") if missing else None

    def _say(self, verdict: Verdict, text: str) -> Granted:
        return Granted(verdict, text, self.scale.revision, self.scale.generation)

    def _change(self, text: str, **fields: Any) -> Granted:
        generation = self.scale.generation + 1
        self.scale = dataclasses.replace(
            self.scale,
            **fields,
            revision=self.scale.revision + 3,
            generation=generation,
            observed=generation,
        )
        self.note("scale", text)
        return self._say(Verdict.ACCEPTED, text)

    def close(self) -> None:
        """Stop serving, like a deposed Master."""
        self.serving = False
        for follower in self.followers:
            follower.put_nowait(None)
