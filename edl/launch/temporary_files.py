"""The files of a launcher in temporary folders, which must outlive programs that clean up there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from edl.adapters.cleaners import is_temporary, touch
from edl.adapters.etcd_server import EtcdMember
from edl.ports import CommandKind, WorkerCommand

TOUCH_S = 3600.0
"""Seconds between two times at which the files are made to look used; cleaners count in days."""


class RestoredFile(Protocol):
    """A file that is written again if it is gone."""

    def keep(self) -> None:
        """Write the file again if somebody has removed it."""
        ...


def temporary_files(
    command: WorkerCommand, member: EtcdMember | None, log_folder: str, others: Iterable[Path]
) -> tuple[Path, ...]:
    """Those files and folders of a launcher that a cleaner may delete. ``others``: in the user's runtime folder."""
    found = [*(member.files if member is not None else ()), *others]
    found += [Path(log_folder)] if log_folder else []
    found += [Path(folder) for folder in command.arguments] if command.kind is CommandKind.CALL else []
    return tuple(path for path in found if is_temporary(path))


async def keep_temporary(paths: Sequence[Path], note: RestoredFile, pause_s: float = TOUCH_S) -> None:
    """Make the files look used from time to time, until cancelled."""
    while True:
        await asyncio.sleep(pause_s)
        with contextlib.suppress(RuntimeError):  # there can be no further thread at present
            await asyncio.to_thread(_keep, paths, note)


def _keep(paths: Sequence[Path], note: RestoredFile) -> None:
    for path in paths:
        touch(path)
    note.keep()
