"""Looks at this launcher's node when somebody scrapes its metrics."""

from __future__ import annotations

import asyncio
import functools
import platform
from collections.abc import Mapping

from edl import __version__
from edl.adapters.file_systems import FileSystem, local_path, look_at
from edl.checkpoint.manager import CheckpointManager
from edl.checkpoint.memory.background import in_thread
from edl.launch.wiring import Wired
from edl.metrics.facts import DirectoryFacts, NodeFacts
from edl.wire.records import NO_STATE

LOOK_S = 1.0
"""Seconds that a scrape waits for the file system of a directory."""


class NodeObserver:
    """Reads the state of the launcher's parts, none of which it changes."""

    def __init__(
        self, wired: Wired, checkpoints: CheckpointManager, directories: Mapping[str, str], lease_ttl_s: float
    ) -> None:
        """``directories``: paths or URLs by name; empty ones and those in object stores are left out."""
        self._wired = wired
        self._checkpoints = checkpoints
        self._lease_ttl_s = lease_ttl_s
        paths = {name: local_path(where) for name, where in directories.items()}
        self._directories = [DirectoryObserver(name, path) for name, path in paths.items() if path]

    async def look(self) -> NodeFacts:
        """The state of the node now. Waits at most ``LOOK_S`` for file systems."""
        directories = await asyncio.gather(*(one.look() for one in self._directories))
        launcher, shell = self._wired.launcher, self._wired.candidate.shell
        agent, usage = self._wired.agent.state, self._checkpoints.usage()
        holdings = self._checkpoints.holdings()
        return NodeFacts(
            version=__version__,
            python=platform.python_version(),
            node=agent.info.node,
            host=agent.info.host,
            role=agent.info.role or "default",
            is_master=shell is not None and shell.serving,
            phase=agent.phase.value,
            slots=agent.info.slots,
            round=agent.running_round,
            attached=agent.connected,
            draining=agent.draining is not None,
            training=len(agent.in_world),
            waiting=len(agent.alive) - len(agent.in_world),
            exits=dict(self._wired.agent.exits),
            store_answers=launcher.store_answers,
            lease_age_s=launcher.lease_age_s,
            lease_ttl_s=agent.info.lease_within(self._lease_ttl_s),
            held=max((one.version for one in holdings), default=NO_STATE),
            stored=self._checkpoints.stored[0],
            parts=len(holdings),
            memory_bytes={"workers": usage.workers, "replicas": usage.replicas, "loaded": usage.loaded},
            memory_limit_bytes=usage.limit,
            directories=directories,
        )


class DirectoryObserver:
    """Asks one file system, which may hang, for its free space, never twice at once."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._path = path
        self._looking: asyncio.Task[FileSystem] | None = None

    async def look(self, limit_s: float = LOOK_S) -> DirectoryFacts:
        """The free space now, or that there was no answer within ``limit_s``."""
        if self._looking is None:
            self._looking = asyncio.create_task(in_thread("edl-disk", functools.partial(look_at, self._path)))
        looking = self._looking
        done, _ = await asyncio.wait({looking}, timeout=limit_s)
        if not done:
            return DirectoryFacts(self._name, answers=False)
        if self._looking is looking:
            self._looking = None
        try:
            found = looking.result()
        except OSError:
            return DirectoryFacts(self._name, answers=False)
        return DirectoryFacts(self._name, True, found.size_bytes, found.free_bytes, found.inodes, found.free_inodes)
