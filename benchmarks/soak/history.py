"""Reads the history that a job's Masters write (docs/history.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def files(directory: Path) -> list[Path]:
    """All files, those of the newest Master last."""
    return sorted(directory.glob("*/*.jsonl"), key=lambda path: tuple(int(part) for part in path.stem.split(".")[-2:]))


def newest_master(directory: Path) -> str:
    """The node of the newest Master; empty while there is none."""
    for path in reversed(files(directory)):
        with path.open("rb") as file:
            first = file.readline()
        if first.endswith(b"\n"):
            line = json.loads(first)
            if line["kind"] == "begin":
                return str(line["body"]["node"])
    return ""


def history(directory: Path) -> Iterator[dict[str, Any]]:
    """All complete lines."""
    for path in files(directory):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield json.loads(line)


def end_reason(directory: Path) -> str:
    """Why the job has ended, in the Master's words; empty while it runs."""
    ends = [line["body"] for line in history(directory) if line["kind"] == "end"]
    return f"{ends[-1]['reason']} (exit code {ends[-1]['exit_code']})" if ends else ""
