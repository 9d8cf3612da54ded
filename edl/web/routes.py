"""Every address of this interface, once: the server dispatches by this table, and the document is made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl.web.bodies import AskBody, BoundsBody, CordonBody, DataBody, DrainBody, ScaleBody, ScalePatchBody
from edl.web.documents import Document, JobDocument, ScaleDocument, StatusDocument

JSON = ("application/json",)
PATCHES = ("application/merge-patch+json", "application/json")
ALWAYS = (400, 408, 429, 500, 503)
"""Codes that any address may answer with, apart from those that are open."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one address."""

    method: str
    path: str
    """With ``{job}`` and ``{node}``."""
    name: str
    """Of the operation, and of what handles it."""
    summary: str
    body: type[AskBody] | None = None
    """Type of the request's body; None: it has none."""
    types: Sequence[str] = JSON
    """Media types of the body."""
    body_required: bool = True
    query: Sequence[str] = ()
    """Parameters, see ``openapi.PARAMETERS``."""
    answers: Sequence[tuple[int, type[Document] | str | None]] = ()
    """Codes of success and the types of their bodies; a text: a media type other than JSON; None: any JSON object."""
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


def _open(path: str, name: str, summary: str, codes: Sequence[int]) -> Route:
    """For whoever looks whether a launcher is well."""
    return Route("GET", path, name, summary, answers=((200, "text/plain"),), codes=codes, public=True)


def _order(
    name: str,
    summary: str,
    *,
    body: type[AskBody],
    path: str = "",
    method: str = "POST",
    answer: type[Document] = StatusDocument,
    types: Sequence[str] = JSON,
) -> Route:
    """What changes the job: 202 where it begins to come about, 200 where it is so already."""
    return Route(
        method,
        f"{_JOB}/{path or name}",
        name,
        summary,
        body=body,
        types=types,
        body_required=body not in (AskBody, CordonBody),
        answers=((202, answer), (200, answer)),
        codes=(409, 422),
    )


def _node_order(name: str, summary: str) -> Route:
    return _order(name, summary, body=CordonBody, path=f"nodes/{{node}}/{name}")


ROUTES: tuple[Route, ...] = (
    _open("/healthz", "health", "The launcher lives.", (429,)),
    _open("/readyz", "ready", "The launcher rules, or knows who does.", (429, 503)),
    Route("GET", "/openapi.json", "document", "This document.", answers=((200, None),), local=True),
    Route("GET", _JOB, "job", "The job: settings, conditions, nodes.", answers=((200, JobDocument),)),
    Route("GET", f"{_JOB}/scale", "scale", "The size of the job.", answers=((200, ScaleDocument),)),
    _order(
        "put_scale",
        "Ask for another size with a whole Scale.",
        body=ScaleBody,
        path="scale",
        method="PUT",
        answer=ScaleDocument,
    ),
    _order(
        "patch_scale",
        "Ask for another size with the part of a Scale that changes.",
        body=ScalePatchBody,
        path="scale",
        method="PATCH",
        answer=ScaleDocument,
        types=PATCHES,
    ),
    _order("bounds", "Let the job have from so many to so many nodes.", body=BoundsBody, method="PUT"),
    _order("drain", "Have nodes leave in good order; their launchers end.", body=DrainBody),
    _order("checkpoint", "Write a checkpoint at the next step boundary and go on.", body=AskBody),
    _order("suspend", "Commit, end the workers, and wait.", body=AskBody),
    _order("resume", "Go on after having been suspended.", body=AskBody),
    _order("stop", "Write a checkpoint at the next step boundary and end the job.", body=AskBody),
    _order("add_data", "Add files to a data set.", body=DataBody, path="data/{dataset}/files"),
    _node_order("cordon", "Have a node, or one slot of it, take no part; its launcher stays."),
    _node_order("uncordon", "Let a node, or one slot of it, take part again."),
    Route(
        "GET",
        f"{_JOB}/events",
        "events",
        "The history, and with follow what comes.",
        query=("after", "follow"),
        answers=((200, "application/x-ndjson"), (200, "text/event-stream")),
    ),
)
