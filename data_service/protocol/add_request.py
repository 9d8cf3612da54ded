"""The request of ``edl data add`` to add files to a data set, as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_service.protocol.fields import Name
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW
from edl.errors import ProtocolError
from edl.wire import json_messages

MOST_FILES = 1000
"""Most paths or patterns per request; a pattern may match any number of files."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The body of a request to add files."""

    dataset: Name
    files: tuple[str, ...]
    when: str = NOW


def encode(asked: AddRequest) -> str:
    """Encode the request as JSON."""
    return json_messages.encode(asked).decode()


def parse_add_request(body: str, known: Sequence[str]) -> AddRequest | str:
    """Parse a request; return it, or the reason why it is invalid. ``known``: the names of the data sets."""
    try:
        asked = json_messages.decode(AddRequest, body)
    except ProtocolError as error:
        return f"not understood: {error}"
    if asked.dataset not in known:
        there = ", ".join(sorted(known)) or "none yet"
        return f"the job has no data set named {asked.dataset}; it has {there}"
    if asked.when not in (NOW, NEXT_EPOCH):
        return f"when={asked.when}: must be {NOW} or {NEXT_EPOCH}"
    if not asked.files or len(asked.files) > MOST_FILES or not all(asked.files):
        return f"{len(asked.files)} files: 1 to {MOST_FILES} paths, patterns or URLs are allowed"
    return asked
