"""Request bodies: their types, which also define their schemas, and the requests to the Master made from them. Pure.

An invalid body raises a ``Refusal`` that names the field and the value.
"""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from edl.rendezvous.phrases import one_line
from edl.web.refusal import Refusal
from edl.wire import json_messages
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Resize, SetBounds, Suspend
from edl.wire.status import JobStatus

MOST_SHOWN = 500
"""Limit on the characters of a reason or a requester."""
NAME = r"^[A-Za-z0-9._-]{1,128}\Z"
"""Pattern of the names of jobs and nodes."""
MOST_NODES = 2**31 - 1

Nodes = Annotated[int, Meta(ge=0, le=MOST_NODES)]
SeenRevision = Annotated[
    str,
    Meta(
        pattern=r"^([0-9]{1,18})?\Z",
        description="The version of the size that the client has seen; 409 if the size has changed since. Empty: any.",
    ),
]


class AskBody(Struct, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """Base of all bodies: the requester and the reason."""

    reason: Annotated[str, Meta(max_length=2000, description="The reason, recorded in the history.")] = ""
    requester: Annotated[str, Meta(max_length=200, description="Name of the requester, for people.")] = ""


class ScaleBodyMetadata(Struct, rename="camel"):
    """Metadata of a Scale. Unknown fields are ignored."""

    name: Annotated[str, Meta(max_length=253)] | UnsetType = UNSET
    resource_version: SeenRevision = ""


class ScaleBodySpec(Struct, forbid_unknown_fields=True):
    """The size in nodes. Without ``replicas``: unchanged in a partial Scale, 0 in a complete one."""

    replicas: Nodes | UnsetType = UNSET


class ScalePatchBody(AskBody, kw_only=True):
    """A partial Scale, with the fields to change."""

    kind: Literal["Scale"] = "Scale"
    api_version: Literal["autoscaling/v1"] = "autoscaling/v1"
    metadata: ScaleBodyMetadata = msgspec.field(default_factory=ScaleBodyMetadata)
    spec: ScaleBodySpec = msgspec.field(default_factory=ScaleBodySpec)
    status: Annotated[dict[str, Any], Meta(description="Ignored.")] = {}
    idempotency_key: Annotated[
        str,
        Meta(
            max_length=200,
            description="Of several requests with the same key only the first is handled; the others get its answer.",
        ),
    ] = ""


class ScaleBody(ScalePatchBody, kw_only=True):
    """A Scale as PUT sends it: unlike in a partial one, ``spec`` is required."""

    spec: ScaleBodySpec


class BoundsBody(AskBody, kw_only=True):
    """Minimum and maximum number of nodes."""

    minimum: Nodes
    maximum: Nodes
    resource_version: SeenRevision = ""


class DrainBody(AskBody, kw_only=True):
    """Nodes to drain, their deadline, and whether a checkpoint must come first."""

    nodes: Annotated[
        list[Annotated[str, Meta(pattern=NAME)]], Meta(min_length=1, max_length=1000, examples=[["node-a"]])
    ]
    deadline_seconds: Annotated[
        float,
        Meta(ge=0, le=604800, description="Seconds until the nodes must have left; 0: --shutdown-timeout."),
    ] = 0.0
    checkpoint: Annotated[
        DrainMode,
        Meta(description="must: nodes stay until a checkpoint is complete; try: write one if there is time; no: none."),
    ] = DrainMode.TRY


class DataBody(AskBody, kw_only=True):
    """Files to add to a data set."""

    files: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=4096)]],
        Meta(
            min_length=1,
            max_length=1000,
            examples=[["/data/day-17/*.parquet"]],
            description="Paths, patterns or URLs, as the workers see them.",
        ),
    ]
    when: Annotated[
        Literal["now", "next-epoch"],
        Meta(description="now: add them to the current epoch, if it has records left, otherwise to the next one."),
    ] = "now"


class CordonBody(AskBody, kw_only=True):
    """A node to cordon or uncordon, or one slot of it."""

    device: Annotated[
        str, Meta(max_length=200, description="Only this slot: its number, or the UUID of its device.")
    ] = ""


REQUESTS: tuple[type[AskBody], ...] = (
    ScaleBody,
    ScalePatchBody,
    BoundsBody,
    DrainBody,
    DataBody,
    AskBody,
    CordonBody,
)
"""All types of request bodies."""

B = TypeVar("B", bound=AskBody)


def parse(kind: type[B], data: bytes) -> B:
    """Parse a body as its type. Raises ``Refusal`` (400) that names the first invalid place."""
    decoder = _decoder(kind)
    try:
        try:
            body: B = decoder.decode(data)
        except msgspec.ValidationError:
            body = decoder.decode(_with_whole_numbers(data))
    except msgspec.ValidationError as error:
        raise Refusal(400, f"the body: {json_messages.problem(error, json.loads(data))}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {json_messages.short(str(error))}") from None
    return body


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _with_whole_numbers(data: bytes) -> bytes:
    """The same JSON with whole numbers as integers (``2.0`` becomes ``2``): JSON Schema accepts both as an integer,
    msgspec only the latter. Raises ``ValueError`` for invalid JSON."""
    return msgspec.json.encode(json.loads(data, parse_float=_number, parse_constant=_no_constant))


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def put_scale(body: ScaleBody, status: JobStatus, by: str) -> Resize:
    """The request in a complete Scale. Kubernetes omits ``replicas`` if it is 0, which the Master refuses with advice.
    Raises ``Refusal`` (422) if the Scale names another job."""
    _same_job(body, status.job)
    return _resize(body, 0 if body.spec.replicas is UNSET else body.spec.replicas, by)


def patch_scale(body: ScalePatchBody, status: JobStatus, by: str) -> Resize | None:
    """The request in a partial Scale; None: it has no ``replicas``. Raises ``Refusal``: 422 if it names another job,
    409 if it has no ``replicas`` and an outdated version."""
    _same_job(body, status.job)
    if body.spec.replicas is UNSET:
        seen = _revision(body.metadata.resource_version)
        if seen not in (0, status.scale.revision):
            raise Refusal(
                409, f"resourceVersion {seen} is not the current one ({status.scale.revision}). Read it again"
            )
        return None
    return _resize(body, body.spec.replicas, by)


def _resize(body: ScalePatchBody, replicas: int, by: str) -> Resize:
    return Resize(
        replicas,
        asker(body, by),
        words(body.reason),
        _revision(body.metadata.resource_version),
        words(body.idempotency_key),
    )


def _same_job(body: ScalePatchBody, job: str) -> None:
    name = body.metadata.name
    if name is not UNSET and name != job:
        raise Refusal(422, f"metadata.name is {words(name)!r}, but the URL names job {job!r}")


def bounds(body: BoundsBody, by: str) -> SetBounds:
    """The request to change the minimum and maximum number of nodes."""
    return SetBounds(body.minimum, body.maximum, asker(body, by), words(body.reason), _revision(body.resource_version))


def drain(body: DrainBody, by: str) -> Drain:
    """The request to drain nodes, without duplicates."""
    nodes = tuple(dict.fromkeys(body.nodes))
    return Drain(nodes, asker(body, by), words(body.reason), body.deadline_seconds, body.checkpoint)


def cordon(body: CordonBody, node: str, by: str, *, cordoned: bool) -> Cordon:
    """The request to cordon or uncordon a node, or one slot of it."""
    return Cordon(node, cordoned, asker(body, by), words(body.reason), words(body.device))


def suspend(body: AskBody, by: str, *, suspended: bool) -> Suspend:
    """The request to suspend the job or to resume it."""
    return Suspend(suspended, asker(body, by), words(body.reason))


def switch(body: AskBody, purpose: Purpose, by: str) -> Asked:
    """The request for a checkpoint or for the end of the job. ``Asked`` has no field for the reason, so the reason is
    appended to the requester."""
    return Asked(purpose, _asker_and_reason(body, by))


def add_data(body: DataBody, dataset: str, by: str) -> Asked:
    """The request to add files to a data set."""
    request = {"dataset": dataset, "files": body.files, "when": body.when}
    return Asked(Purpose.DATA, _asker_and_reason(body, by), json.dumps(request))


def asker(body: AskBody, by: str) -> str:
    """The requester for the history: the name in the body, if any, and ``by``, the origin of the request."""
    name = words(body.requester)
    return f"{name} ({by})" if name else by


def words(text: str) -> str:
    """A client's text for the history: one line without control characters, cut to ``MOST_SHOWN`` characters."""
    return one_line(text)[:MOST_SHOWN]


def _asker_and_reason(body: AskBody, by: str) -> str:
    reason, who = words(body.reason), asker(body, by)
    return f"{who}: {reason}" if reason else who


def _revision(text: str) -> int:
    """``resourceVersion`` as a number; 0 for an empty one, which means any version."""
    return int(text or 0)
