"""The request of ``edl data add`` to add files to a data set, as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from data_service import fields as needs
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW

MOST_FILES = 1000
"""Most paths or patterns per order; a pattern may match any number of files."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The request of ``edl data add``."""

    dataset: str
    files: tuple[str, ...]
    when: str = NOW


def encode(asked: AddRequest) -> str:
    """Encode as JSON."""
    return json.dumps({"dataset": asked.dataset, "files": asked.files, "when": asked.when})


def parse_add_request(body: str, known: Sequence[str]) -> AddRequest | str:
    """Parse a request; return it, or the reason why it is invalid. ``known``: the names of the data sets."""
    try:
        told = json.loads(body)
        asked = AddRequest(
            needs.name(told["dataset"]), needs.strings(told["files"]), needs.string(told.get("when", NOW))
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"invalid request: {error}"
    if asked.dataset not in known:
        there = ", ".join(sorted(known)) or "none yet"
        return f"the job has no data set named {asked.dataset}; it has {there}"
    if asked.when not in (NOW, NEXT_EPOCH):
        return f"when={asked.when}: must be {NOW} or {NEXT_EPOCH}"
    if not asked.files or len(asked.files) > MOST_FILES or not all(asked.files):
        return f"{len(asked.files)} files: 1 to {MOST_FILES} paths, patterns or URLs are allowed"
    return asked
