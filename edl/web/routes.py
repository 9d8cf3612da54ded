"""Every address of this interface, once: the server dispatches by this table, and the document is made from it."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

JSON = ("application/json",)
PATCHES = ("application/merge-patch+json", "application/json")
ALWAYS = (400, 408, 429, 500, 503)
"""Codes that any address may answer with, apart from those that are open."""
NAME = r"^[A-Za-z0-9._-]{1,128}$"
"""What jobs and nodes are called."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one address."""

    method: str
    path: str
    """With ``{job}`` and ``{node}``."""
    name: str
    """Of the operation, and of what handles it."""
    summary: str
    body: str = ""
    """Schema of the request's body; empty: it has none."""
    types: Sequence[str] = JSON
    """Media types of the body."""
    body_required: bool = True
    query: Sequence[str] = ()
    """Parameters, see ``openapi.PARAMETERS``."""
    answers: Sequence[tuple[int, str]] = ()
    """Codes of success and their schemas; a schema that is no name is a media type other than JSON."""
    codes: Sequence[int] = ()
    """Codes of failure beside ``ALWAYS``, those about tokens, and those that follow from the other fields."""
    public: bool = False
    """Answers without a token, and says nothing."""
    local: bool = False
    """Every launcher answers it, not only the one that rules."""

    @property
    def writes(self) -> bool:
        """Needs a token that may do everything."""
        return self.method != "GET"

    @property
    def failures(self) -> tuple[int, ...]:
        """Every code of failure, sorted."""
        if self.public:
            return tuple(self.codes)
        found = {*ALWAYS, *self.codes, 401}
        if self.writes:
            found |= {403, 413, 415}
        if "{" in self.path:
            found.add(404)
        if not self.local:
            found.add(307)
        return tuple(sorted(found))


_JOB = "/v1/jobs/{job}"
_TAKEN = ((202, "Status"), (200, "Status"))

ROUTES: tuple[Route, ...] = (
    Route(
        "GET", "/healthz", "health", "The launcher lives.", answers=((200, "text/plain"),), codes=(429,), public=True
    ),
    Route(
        "GET",
        "/readyz",
        "ready",
        "The launcher rules, or knows who does.",
        answers=((200, "text/plain"),),
        codes=(429, 503),
        public=True,
    ),
    Route("GET", "/openapi.json", "document", "This document.", answers=((200, "Document"),), local=True),
    Route("GET", _JOB, "job", "The job: settings, conditions, nodes.", answers=((200, "Job"),)),
    Route("GET", f"{_JOB}/scale", "scale", "The size of the job.", answers=((200, "Scale"),)),
    Route(
        "PUT",
        f"{_JOB}/scale",
        "put_scale",
        "Ask for another size with a whole Scale.",
        body="ScaleWish",
        answers=((202, "Scale"), (200, "Scale")),
        codes=(409, 422),
    ),
    Route(
        "PATCH",
        f"{_JOB}/scale",
        "patch_scale",
        "Ask for another size with the part of a Scale that changes.",
        body="ScalePatch",
        types=PATCHES,
        answers=((202, "Scale"), (200, "Scale")),
        codes=(409, 422),
    ),
    Route(
        "PUT",
        f"{_JOB}/bounds",
        "bounds",
        "Let the job have from so many to so many nodes.",
        body="BoundsWish",
        answers=_TAKEN,
        codes=(409, 422),
    ),
    Route(
        "POST",
        f"{_JOB}/drain",
        "drain",
        "Have nodes leave in good order; their launchers end.",
        body="DrainWish",
        answers=_TAKEN,
        codes=(409, 422),
    ),
    *(
        Route(
            "POST",
            f"{_JOB}/{name}",
            name,
            summary,
            body="Plea",
            body_required=False,
            answers=_TAKEN,
            codes=(409, 422),
        )
        for name, summary in (
            ("checkpoint", "Write a checkpoint at the next step boundary and go on."),
            ("suspend", "Commit, end the workers, and wait."),
            ("resume", "Go on after having been suspended."),
            ("stop", "Write a checkpoint at the next step boundary and end the job."),
        )
    ),
    *(
        Route(
            "POST",
            f"{_JOB}/nodes/{{node}}/{name}",
            name,
            summary,
            body="Plea",
            body_required=False,
            answers=_TAKEN,
            codes=(409, 422),
        )
        for name, summary in (
            ("cordon", "Have a node take no part; its launcher stays."),
            ("uncordon", "Let a node take part again."),
        )
    ),
    Route(
        "GET",
        f"{_JOB}/events",
        "events",
        "The history, and with follow what comes.",
        query=("after", "follow"),
        answers=((200, "application/x-ndjson"), (200, "text/event-stream")),
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What an address leads to."""

    route: Route | None
    """None: there is no such method."""
    names: Mapping[str, str]
    allowed: Sequence[str] = ()
    """Methods that there are."""


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile("".join(f"(?P<{part[1:-1]}>[^/]+)" if part[0] == "{" else part for part in _parts(path)))


def _parts(path: str) -> list[str]:
    return [part if part.startswith("{") else re.escape(part) for part in re.split(r"(\{\w+\})", path) if part]


_TABLE: dict[str, tuple[re.Pattern[str], dict[str, Route]]] = {}
for _route in ROUTES:
    _TABLE.setdefault(_route.path, (_pattern(_route.path), {}))[1][_route.method] = _route


def find(method: str, path: str) -> Found | None:
    """What this path, as it came, leads to; None: nothing is there."""
    for pattern, methods in _TABLE.values():
        matched = pattern.fullmatch(path)
        if matched is not None:
            names = {name: urllib.parse.unquote(value) for name, value in matched.groupdict().items()}
            return Found(methods.get(method), names, sorted(methods))
    return None
