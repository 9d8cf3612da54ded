"""What somebody outside of the world asks of the data service: a JSON text. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from data_service import fields as needs
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW

MOST_FILES = 1000
"""Paths or patterns of one order; a pattern may stand for any number of files."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """``edl data add``."""

    dataset: str
    files: tuple[str, ...]
    when: str = NOW


def encode(asked: Wanted) -> str:
    """As text."""
    return json.dumps({"dataset": asked.dataset, "files": asked.files, "when": asked.when})


def wanted(body: str, known: Sequence[str]) -> Wanted | str:
    """What is asked for, or why it cannot be done. ``known``: the data sets that there are."""
    try:
        told = json.loads(body)
        asked = Wanted(needs.name(told["dataset"]), needs.strings(told["files"]), needs.string(told.get("when", NOW)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"not understood: {error}"
    if asked.dataset not in known:
        there = ", ".join(sorted(known)) or "none yet"
        return f"the job has no data set named {asked.dataset}; it has {there}"
    if asked.when not in (NOW, NEXT_EPOCH):
        return f"when={asked.when}: {NOW} or {NEXT_EPOCH} is needed"
    if not asked.files or len(asked.files) > MOST_FILES or not all(asked.files):
        return f"{len(asked.files)} files: give 1 to {MOST_FILES} paths, patterns or URLs"
    return asked
