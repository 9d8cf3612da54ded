"""The adapter: implements ``edl.schedulers.port.Scheduler`` with one Kubernetes object.

The size is read from the object (from its ``/scale``, if it has one) whenever a pod is added or removed, and
periodically. So a Role needs only ``get`` and ``patch`` on the object, and ``get``, ``list`` and ``watch`` on pods.
Without permission to see pods, changes are noticed later, and reasons for pending pods are unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

from edl.errors import SchedulerError
from edl.schedulers.kubernetes import pods
from edl.schedulers.kubernetes.access import Options
from edl.schedulers.kubernetes.client import ApiStatusError, ApiTarget, Client, Json
from edl.schedulers.kubernetes.kinds import Workload
from edl.schedulers.kubernetes.mirror import Mirror
from edl.schedulers.port import Disruption, Observation, SchedulerSize, Sized
from edl.tasks import Backoff, end

SHOWN = 5
"""Limit on the names in a message."""
CONFLICTS = 5
"""Number of conflicts (409) after which a change fails."""
GAP_S = 0.1
"""Least time in seconds between two reads of the size, so that a hundred pods that start together cost one read."""
SIZE_FIRST_S = 1.0
"""Seconds that pods which will be removed wait for a read of the size, and between two looks at them meanwhile."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
READ_PODS = ("get", "list", "watch")


class KubernetesScheduler:
    """Implements ``port.Scheduler``. A node has the name of its pod (the launcher's ``--node-id``)."""

    def __init__(self, kind: Workload, options: Options) -> None:
        self.name = f"{kind.title} in namespace {options.namespace}"
        self.indexed = kind.indexed
        self.ask_none_at_end = not kind.completes
        self._kind = kind
        self._options = options
        self._client = Client(options)
        self._pods: Mirror | None = None
        """The job's pods, while a watch runs."""

    async def current(self) -> SchedulerSize:
        """The size of the object, with pending pods if this launcher may see pods. Raises ``SchedulerError``."""
        found = await self._client.get(self._kind.target)
        nodes = self._kind.nodes(found)
        mirror = self._pods
        if mirror is not None and mirror.complete and not mirror.problem:
            return _size(nodes, mirror)
        selector = self._kind.selector(found)
        if not selector:
            return SchedulerSize(nodes)
        mirror = self._mirror(selector)
        try:
            await mirror.refresh()
        except SchedulerError as error:
            return SchedulerSize(nodes, detail=f"the pods cannot be seen: {error}")
        return _size(nodes, mirror)

    async def request(self, nodes: int, reason: str) -> None:
        """Raise the size to ``nodes``, unless it is as large already. Raises ``SchedulerError``."""
        await self._change(nodes, reason, lambda now: now >= nodes)

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Lower the size to ``nodes``. Raises ``SchedulerError``, also if Kubernetes would keep one of ``names``: it
        removes the pods with the highest indexes."""
        if nodes == 0 and self._kind.completes:
            return  # its pods complete with the job
        if nodes == 0 and names and not any(self._kind.makes(name) for name in names):
            who = ", ".join(sorted(names)[:SHOWN])
            text = f"{self.name} is not scaled to 0: none of the job's nodes ({who}) is named like one of its pods"
            raise SchedulerError(f"{text}. Check --scheduler, and that --node-id is the pod's name", retry=False)
        kept = [name for name in names if 0 <= self._kind.index(name) < nodes]
        if kept:
            text = f"{self.name} removes the pods with the highest indexes first, so with {nodes} pods left it keeps"
            raise SchedulerError(f"{text} and restarts {', '.join(sorted(kept))}", retry=False)
        await self._change(nodes, reason, lambda now: now <= nodes)

    async def _change(self, nodes: int, reason: str, enough: Callable[[int], bool]) -> None:
        for _ in range(CONFLICTS):
            found = await self._client.get(self._kind.target)
            if enough(self._kind.nodes(found)):
                return
            change = self._kind.patch(found, nodes)
            try:
                await self._client.patch(self._kind.target, change.body, change.content_type)
                return
            except ApiStatusError as error:
                if error.status != 409:
                    raise
        text = f"{self.name}: changed by others {CONFLICTS} times while edl tried to set it to {nodes} ({reason})"
        raise SchedulerError(text, retry=True)

    async def watch(self) -> AsyncIterator[Observation]:
        """Yields the size whenever it or its detail has changed, and nodes that will be removed. Raises
        ``SchedulerError``."""
        found = await self._client.get(self._kind.target)
        selector = self._kind.selector(found)
        mirrors = [self._mirror(selector)] if selector else []
        self._pods = mirrors[0] if mirrors else None
        if mirrors and self._options.watch_nodes:
            hosts = ApiTarget("/api/v1/nodes", "", "nodes", READ_PODS, cluster=True)
            mirrors.append(Mirror(self._client, hosts, "", lambda host: True, pods.of_host))
        tasks = [asyncio.ensure_future(mirror.run()) for mirror in mirrors]
        try:
            async with contextlib.aclosing(self._follow(mirrors)) as observations:
                async for observation in observations:
                    yield observation
        finally:
            self._pods = None
            for task in tasks:
                await end(task)

    async def _follow(self, mirrors: Sequence[Mirror]) -> AsyncGenerator[Observation, None]:
        said: SchedulerSize | None = None
        reported: dict[str, str] = {}
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            for mirror in mirrors:
                mirror.changed.clear()
            # The size goes before the pods that it costs, but no pod waits for a size that the server does not give.
            reading = asyncio.ensure_future(self._nodes())
            try:
                while not (await asyncio.wait({reading}, timeout=SIZE_FIRST_S))[0]:
                    for disruption in self._disruptions(mirrors, reported):
                        yield disruption
            finally:
                await end(reading)
            nodes, wait_s = reading.result(), self._options.poll_s
            if isinstance(nodes, int):
                pauses.reset()
                size = _size(nodes, mirrors[0]) if mirrors else SchedulerSize(nodes)
                if size != said:
                    said = size
                    yield Sized(size)
            elif nodes.retry:
                wait_s = pauses.next()
            for disruption in self._disruptions(mirrors, reported):
                yield disruption
            if isinstance(nodes, SchedulerError) and not nodes.retry:
                raise nodes
            await asyncio.sleep(GAP_S)
            await _any_change(mirrors, wait_s)

    async def _nodes(self) -> int | SchedulerError:
        """The size of the object, or why it cannot be read."""
        try:
            return self._kind.nodes(await self._client.get(self._kind.target))
        except SchedulerError as error:
            return error

    def _disruptions(self, mirrors: Sequence[Mirror], reported: dict[str, str]) -> Iterator[Disruption]:
        """Yields pods that will be removed, each once. ``reported``: uids of pods reported so far, by name."""
        if not mirrors:
            return
        hosts = mirrors[1].found if len(mirrors) > 1 else {}
        here = mirrors[0].found
        for name in [name for name in reported if name not in here]:
            del reported[name]
        for name, pod in here.items():
            uid = str(pod["metadata"].get("uid", ""))
            if reported.get(name) == uid:
                continue
            why = pods.pending_removal(pod) or pods.removal_by_taint(
                pod, hosts.get(str(pod.get("spec", {}).get("nodeName", "")))
            )
            if why is not None:
                reported[name] = uid
                yield Disruption(name, why[0], why[1])

    def _mirror(self, selector: str) -> Mirror:
        where = f"/api/v1/namespaces/{self._options.namespace}/pods"
        return Mirror(self._client, ApiTarget(where, "", "pods", READ_PODS), selector, self._kind.mine)

    async def close(self) -> None:
        """Close the connections to the API server."""
        await self._client.close()


def _size(nodes: int, mirror: Mirror) -> SchedulerSize:
    if mirror.problem or not mirror.complete:
        return SchedulerSize(nodes, detail=f"the pods cannot be seen: {mirror.problem}" if mirror.problem else "")
    here: list[Json] = list(mirror.found.values())
    return SchedulerSize(nodes, sum(map(pods.placed, here)), pods.pending_reasons(here, nodes))


async def _any_change(mirrors: Sequence[Mirror], limit_s: float) -> None:
    """Wait until one of the mirrors has changed, at most ``limit_s`` seconds."""
    waits = [asyncio.ensure_future(mirror.changed.wait()) for mirror in mirrors]
    try:
        if waits:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(limit_s)
    finally:
        for wait in waits:
            await end(wait)
