"""``--sync-dir``: which directories of the script are kept alike on all nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edl.adapters.file_systems import local_path
from edl.config import JobSpec
from edl.errors import SettingError
from edl.launch.options import record
from edl.launch.settings import SyncSettings

_ADVICE = "Name the folder that holds the script's checkpoints and nothing else"


def sync_from(options: Mapping[str, Any], spec: JobSpec) -> SyncSettings:
    """The directories as absolute paths. They are created when the launcher starts. Raises ``SettingError``."""
    roots: list[Path] = []
    for given in spec.sync_dirs:
        roots.append(_checked(given, roots))
    if roots and (spec.independent or spec.script_servers):
        what = "trainers of parameter servers keep running when the world changes, so their files never stand still"
        raise SettingError("--sync-dir", spec.sync_dirs[0], what, "Drop it")
    return record(SyncSettings, options, roots=tuple(str(root) for root in roots))


def _not_to_copy() -> Iterator[tuple[Path, str]]:
    """Folders that no synchronised directory may contain, and what they are."""
    yield Path(os.path.realpath(".")), "the folder in which the launcher runs"
    with contextlib.suppress(RuntimeError):  # a container may run as a user who has none
        yield Path(os.path.realpath(Path.home())), "the home folder"


def _checked(given: str, others: list[Path]) -> Path:
    """One directory. ``others``: those before it."""
    path = local_path(given)
    if not path:
        raise SettingError("--sync-dir", given or "''", "is not a directory of this host", _ADVICE)
    root = Path(os.path.realpath(path))
    if root.exists() and not root.is_dir():
        raise SettingError("--sync-dir", given, f"{root} is not a directory", _ADVICE)
    for inside, what in _not_to_copy():
        if inside.is_relative_to(root):
            which = "is" if inside == root else "contains"
            raise SettingError("--sync-dir", given, f"{root} {which} {what}: far more would be copied", _ADVICE)
    for other in others:
        if root.is_relative_to(other) or other.is_relative_to(root):
            raise SettingError(
                "--sync-dir", given, f"{root} overlaps {other}, which is given too", "Name the outer one"
            )
    return root
