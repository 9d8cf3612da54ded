"""Builds what stores a node's commits: memory, copies to other nodes, and the checkpoint directory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from edl.adapters.clock import SystemClock, wall_clock_s
from edl.adapters.copies import TcpCopies
from edl.checkpoint.directory.manifest import Retention
from edl.checkpoint.directory.writer import FileCheckpointStorage, WriterIdentity
from edl.checkpoint.manager import CheckpointManager
from edl.checkpoint.memory.memory_checkpoints import MemoryCheckpoints
from edl.free_memory import available_bytes
from edl.launch.settings import LaunchSettings
from edl.ports import Files, FileSource
from edl.wire.messages import Kept


@dataclass(slots=True)
class CheckpointReports:
    """Callbacks for reports about commits. They do nothing until the agent exists and its methods are set."""

    kept: Callable[[Kept], None] = lambda message: None
    """Called for each commit that was written, or could not be written."""
    room: Callable[[str], None] = lambda why: None
    """Called with the reason when commits do not fit in memory, and with an empty text when they fit again."""
    copied: Callable[[], None] = lambda: None
    """Called when a part of another node's commit has arrived."""


async def open_checkpoints(
    settings: LaunchSettings,
    files: Files | None,
    token: Callable[[], str],
    run: str,
    reports: CheckpointReports,
    log: Callable[[str], None],
    source: FileSource | None = None,
) -> tuple[MemoryCheckpoints, CheckpointManager]:
    """Build the in-memory checkpoints of this launcher and the agent's interface to them. ``files``: the checkpoint
    directory; None if there is none. ``token``: returns the job's token. ``run``: see ``Registration.run``. ``source``:
    what is served of synchronised directories. Raises ``CheckpointError`` if the directory cannot be used."""
    wanted, checkpoint_storage = settings.state, None
    if files is not None:
        checkpoint_storage = FileCheckpointStorage(
            files,
            WriterIdentity(settings.spec.job, run=hashlib.sha256(f"run {run}".encode()).hexdigest()[:16]),
            Retention(wanted.keep_last, wanted.keep_every),
            wall_clock_s=wall_clock_s,
            say=log,
            adopt=wanted.adopt,
        )
        await asyncio.to_thread(checkpoint_storage.check)
    node = settings.node.name
    memory = MemoryCheckpoints(
        node,
        settings.spec.job,
        limit_bytes=wanted.memory_bytes or available_bytes() // 2,
        copies=TcpCopies(node, token, SystemClock(), rate_bytes_per_s=wanted.copy_rate, files=source),
        checkpoint_storage=checkpoint_storage,
        on_kept=lambda outcome: reports.kept(outcome),
        on_room=lambda why: reports.room(why),
        on_copy=lambda: reports.copied(),
        copying=wanted.copying,
    )
    return memory, CheckpointManager(node, memory, checkpoint_storage, log)
