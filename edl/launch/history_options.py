"""``--history-dir`` and ``--history-size``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edl.adapters.file_systems import local_path
from edl.errors import SettingError
from edl.history.parts import FOLDER
from edl.launch.options import record
from edl.launch.options.state import AUTO
from edl.launch.settings import HistorySettings


def history_from(options: Mapping[str, Any], checkpoint_dir: str, synced: Sequence[str] = ()) -> HistorySettings:
    """The history directory of this launcher. ``synced``: the directories of ``--sync-dir``, in which there must be
    none, because nodes would wait for files that never stand still. Raises ``SettingError``."""
    given = local_path(options["history_dir"])
    if options["history_dir"] and not given:
        what = "is not a directory of this host: object stores cannot append to a file"
        raise SettingError("--history-dir", options["history_dir"], what, "Name a path, on each node or shared")
    if given == AUTO:
        beside = local_path(checkpoint_dir)
        given = str(Path(beside) / FOLDER) if beside and not _within(beside, synced) else ""
    if given and (root := _within(given, synced)):
        what = f"lies in --sync-dir={root}, whose files must stand still before workers start"
        raise SettingError("--history-dir", given, what, "Name a directory outside it")
    return record(HistorySettings, options, folder=str(Path(given).absolute()) if given else "")


def _within(folder: str, roots: Sequence[str]) -> str:
    """The directory among ``roots`` that contains this one; empty: none does."""
    real = Path(os.path.realpath(folder))
    return next((root for root in roots if real.is_relative_to(root)), "")
