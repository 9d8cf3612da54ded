"""The table of all routes, from which the server's dispatch and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl.web.bodies import AskBody, BoundsBody, CordonBody, DataBody, DrainBody, ScaleBody, ScalePatchBody
from edl.web.documents import Document, JobDocument, JobsDocument, ScaleDocument, StatusDocument

JSON = ("application/json",)
PATCHES = ("application/merge-patch+json", "application/json")
"""Media types of a partial Scale."""
ALWAYS = (400, 408, 429, 500, 503)
"""Status codes of failures that any route may return, except public ones."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    """The path, with placeholders such as ``{job}`` and ``{node}``."""
    name: str
    """Operation id, and key of its handler in the server."""
    summary: str
    body: type[AskBody] | None = None
    """Type of the request body; None: no body."""
    types: Sequence[str] = JSON
    """Accepted media types of the body."""
    body_required: bool = True
    query: Sequence[str] = ()
    """Names of query parameters, see ``openapi.PARAMETERS``."""
    answers: Sequence[tuple[int, type[Document] | str | None]] = ()
    """Status codes of success with their bodies: a type; a string: a media type other than JSON; None: any JSON
    object."""
    codes: Sequence[int] = ()
    """Status codes of failure that do not follow from ``ALWAYS`` and the other fields."""
    public: bool = False
    """Whether it requires no token, because it reveals nothing about the job."""
    local: bool = False
    """Whether every launcher serves it, not only the Master's."""
    private: bool = False
    """Whether it requires a token with full access although it only reads."""

    @property
    def writes(self) -> bool:
        """Whether it requires a token with full access."""
        return self.method != "GET"

    @property
    def failures(self) -> tuple[int, ...]:
        """All status codes of failure, sorted."""
        if self.public:
            return tuple(self.codes)
        found = {*ALWAYS, *self.codes, 401}
        if self.writes:
            found |= {403, 413, 415}
        if self.private:
            found.add(403)
        if "{" in self.path:
            found.add(404)
        if not self.local:
            found.add(307)
        return tuple(sorted(found))


_JOB = "/v1/jobs/{job}"


def _probe(path: str, name: str, summary: str, codes: Sequence[int]) -> Route:
    """A route for a health probe, which needs no token."""
    return Route("GET", path, name, summary, answers=((200, "text/plain"),), codes=codes, public=True)


def _change(
    name: str,
    summary: str,
    *,
    body: type[AskBody],
    path: str = "",
    method: str = "POST",
    answer: type[Document] = StatusDocument,
    types: Sequence[str] = JSON,
) -> Route:
    """A route that changes the job: 202 if the request is accepted, 200 if there is nothing to change."""
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


def _node_change(name: str, summary: str) -> Route:
    return _change(name, summary, body=CordonBody, path=f"nodes/{{node}}/{name}")


ROUTES: tuple[Route, ...] = (
    _probe("/healthz", "health", "The launcher is alive.", (429,)),
    _probe("/readyz", "ready", "The launcher is the Master, or knows it.", (429, 503)),
    Route("GET", "/openapi.json", "document", "This document.", answers=((200, None),), local=True),
    Route(
        "GET",
        "/metrics",
        "metrics",
        "Metrics of this launcher's node and, on the Master, of the job, for Prometheus.",
        answers=((200, "text/plain"), (200, "application/openmetrics-text")),
        codes=(501,),
        local=True,
    ),
    Route(
        "GET",
        "/v1/jobs",
        "jobs",
        "The job of this launcher, what the token may do, and where the Master serves HTTP.",
        answers=((200, JobsDocument),),
        local=True,
    ),
    Route("GET", _JOB, "job", "The job: settings, conditions, nodes.", answers=((200, JobDocument),)),
    Route("GET", f"{_JOB}/scale", "scale", "The size of the job.", answers=((200, ScaleDocument),)),
    _change(
        "put_scale",
        "Request another size with a complete Scale.",
        body=ScaleBody,
        path="scale",
        method="PUT",
        answer=ScaleDocument,
    ),
    _change(
        "patch_scale",
        "Request another size with a partial Scale.",
        body=ScalePatchBody,
        path="scale",
        method="PATCH",
        answer=ScaleDocument,
        types=PATCHES,
    ),
    _change("bounds", "Set the minimum and maximum number of nodes.", body=BoundsBody, method="PUT"),
    _change("drain", "Drain nodes: they leave gracefully, and their launchers end.", body=DrainBody),
    _change("checkpoint", "Write a checkpoint at the next step boundary and continue.", body=AskBody),
    _change("suspend", "Commit, end the workers, and wait for resume.", body=AskBody),
    _change("resume", "Continue a suspended job.", body=AskBody),
    _change("stop", "Write a checkpoint at the next step boundary and end the job.", body=AskBody),
    _change("add_data", "Add files to a data set.", body=DataBody, path="data/{dataset}/files"),
    _node_change("cordon", "Keep a node, or one slot of it, out of every world; its launcher keeps running."),
    _node_change("uncordon", "Let a node, or one slot of it, take part again."),
    Route(
        "GET",
        f"{_JOB}/events",
        "events",
        "The history; with follow, also new entries as they are added.",
        query=("after", "before", "last", "follow"),
        answers=((200, "application/x-ndjson"), (200, "text/event-stream")),
        codes=(422,),
    ),
    Route(
        "GET",
        f"{_JOB}/nodes/{{node}}/output",
        "output",
        "The last lines that the workers of a node have written; with after, the lines since then.",
        query=("after", "lines"),
        answers=((200, None),),
        local=True,
        private=True,
    ),
    Route(
        "POST",
        f"{_JOB}/nodes/{{node}}/stacks",
        "stacks",
        "The stacks of the workers of a node, which continue to run.",
        answers=((200, None),),
        local=True,
    ),
    Route(
        "GET",
        f"{_JOB}/status",
        "status",
        "The status, as of `edl status --json`; as text/event-stream also each change of it, at most once a second.",
        answers=((200, None), (200, "text/event-stream")),
    ),
)
