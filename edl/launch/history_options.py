"""``--history-dir`` and ``--history-size``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.errors import SettingError
from edl.history.parts import FOLDER
from edl.launch.options import record
from edl.launch.options.state import AUTO
from edl.launch.settings import HistorySettings


def history_from(options: Mapping[str, Any], checkpoint_dir: str) -> HistorySettings:
    """The history directory of this launcher. Raises ``SettingError``."""
    given = options["history_dir"]
    if "://" in given:
        what = "is not a directory of this host: object stores cannot append to a file"
        raise SettingError("--history-dir", given, what, "Name a path, on each node or shared")
    if given == AUTO:
        beside = checkpoint_dir and "://" not in checkpoint_dir
        given = str(Path(checkpoint_dir) / FOLDER) if beside else ""
    return record(HistorySettings, options, folder=str(Path(given).absolute()) if given else "")
