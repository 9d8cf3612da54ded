"""The checkpoints of all versions of edl, which ``tests/data/checkpoints/make.py`` wrote."""

from __future__ import annotations

import json
from pathlib import Path

STORED = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
VERSIONS = sorted(path.name for path in STORED.iterdir() if path.name[0].isdigit())
NEWER = 9


def of_newer_format(path: Path) -> None:
    """Change a file as a newer version of edl might write it."""
    values = json.loads(path.read_text())
    values.update(format=NEWER, something={"new": [1, 2]})
    path.write_text(json.dumps(values, indent=1) + "\n")
