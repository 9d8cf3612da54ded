"""Response bodies: the types of Scale, Job and Status, which also define their schemas, and functions that make them.
Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from edl.web.conditions import TYPES, conditions
from edl.web.refusal import REASONS, Refusal
from edl.wire.scale_requests import Granted, Verdict
from edl.wire.status import Answer, DroppedSlot, HistoryEntry, JobStatus, NodeView

GROUP = "edl/v1"
"""``apiVersion`` of a Job."""
CODES = {
    Verdict.ACCEPTED: 202,
    Verdict.KNOWN: 200,
    Verdict.STALE: 409,
    Verdict.REFUSED: 422,
    Verdict.UNKNOWN: 404,
}
"""HTTP status codes of the Master's verdicts."""
Count = Annotated[int, Meta(ge=0)]
Position = Annotated[int, Meta(ge=-1)]


class Document(Struct, forbid_unknown_fields=True, rename="camel"):
    """Base of response bodies and their parts. A body has exactly the declared fields."""


class MetadataDocument(Document):
    """Name, version and generation of the job."""

    name: str
    resource_version: Annotated[str, Meta(pattern="^[0-9]+$")]
    generation: Count


class ScaleMetadataDocument(MetadataDocument):
    """Metadata of a Scale, with annotations for values that a Scale has no field for."""

    annotations: dict[str, str]


class ScaleSpecDocument(Document):
    """The desired size, in nodes."""

    replicas: Count


class ScaleStatusDocument(Document):
    """The nodes of the current world, and the newest generation that this world conforms to."""

    replicas: Count
    selector: str
    observed_generation: Count


class ScaleDocument(Document, tag_field="kind", tag="Scale"):
    """The size of a job in the form of autoscaling/v1."""

    api_version: Literal["autoscaling/v1"]
    metadata: ScaleMetadataDocument
    spec: ScaleSpecDocument
    status: ScaleStatusDocument


class StatusMetadataDocument(Struct, rename="camel", omit_defaults=True):
    """The version of the size after an accepted request; absent otherwise."""

    resource_version: str | UnsetType = UNSET


class StatusDetailsDocument(Struct):
    """Details of a Status for an accepted request."""

    generation: Count


class StatusDocument(Document, kw_only=True, tag_field="kind", tag="Status"):
    """The outcome of a request."""

    api_version: Literal["v1"]
    metadata: StatusMetadataDocument
    status: Literal["Success", "Failure"]
    message: str
    reason: Annotated[str, Meta(extra_json_schema={"enum": sorted(REASONS.values())})] | UnsetType = UNSET
    code: int
    details: StatusDetailsDocument | UnsetType = UNSET


class ConditionDocument(Document):
    """One condition of the job."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(TYPES)})]
    status: Literal["True", "False"]
    reason: str
    message: str
    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class NodeDocument(Document):
    """The state of one node of the job."""

    name: str
    host: str
    slots: Count
    state: str
    attached: bool
    position: Position
    first_rank: Position
    underway: bool
    draining: bool
    cordoned: bool
    places: list[Count]
    spare_slots: Count


class DroppedSlotDocument(Document):
    """A dropped slot, and why it was dropped."""

    node: str
    host: str
    slot: Count
    device: str
    reason: str
    round: Count
    host_id: str
    by: str


class JobSpecDocument(Document):
    """The desired state of the job."""

    replicas: Count
    minimum: Count
    maximum: Count
    unit: Count
    suspended: bool
    cordoned: list[str]
    owner: str
    fault_tolerance: str


class CheckpointDocument(Document):
    """The newest checkpoint and its location."""

    commit: Count
    era: Count
    where: str


class ProposalDocument(Document):
    """The size that the autoscale policy proposes; 0: none."""

    replicas: Count
    reason: str


class JobStatusDocument(Document):
    """The current state of the job."""

    observed_generation: Count
    phase: str
    reason: str
    waiting: str
    replicas: Count
    round: Count
    workers: Count
    restarts_used: Count
    restarts_allowed: Count
    master: str
    checkpoint: CheckpointDocument
    boundary: str
    stopping: str
    need_seconds: Annotated[float, Meta(ge=0)]
    proposal: ProposalDocument
    flaws: list[str]
    warnings: list[str]
    goodput: dict[str, Annotated[float, Meta(ge=0)]]
    conditions: list[ConditionDocument]
    nodes: list[NodeDocument]
    dropped_slots: list[DroppedSlotDocument]


class JobDocument(Document, tag_field="kind", tag="Job"):
    """The job: its desired and its current state."""

    api_version: str
    metadata: MetadataDocument
    spec: JobSpecDocument
    status: JobStatusDocument


class JobsDocument(Document):
    """The jobs that a launcher serves: its own."""

    jobs: list[str]
    rights: Literal["full", "read"]
    """What the token of the request may do."""
    master: str
    """URL of the Master's launcher; empty: unknown, or it serves no HTTP."""


ANSWERS: tuple[type[Document], ...] = (ScaleDocument, StatusDocument, JobDocument, JobsDocument)
"""All types of response bodies."""


def scale_of(status: JobStatus) -> ScaleDocument:
    """The size in the form of autoscaling/v1; ``status.observedGeneration`` is the newest request that the world
    conforms to."""
    scale = status.scale
    return ScaleDocument(
        api_version="autoscaling/v1",
        metadata=ScaleMetadataDocument(
            name=status.job,
            resource_version=str(scale.revision),
            generation=scale.generation,
            annotations={
                "edl/minimum": str(scale.minimum),
                "edl/maximum": str(scale.maximum),
                "edl/unit": str(scale.unit),
                "edl/by": scale.by,
                "edl/reason": scale.reason,
                "edl/waiting": scale.waiting,
            },
        ),
        spec=ScaleSpecDocument(replicas=scale.desired),
        status=ScaleStatusDocument(
            replicas=scale.nodes, selector=f"edl.job={status.job}", observed_generation=scale.observed
        ),
    )


def job_of(status: JobStatus, history: Sequence[HistoryEntry]) -> JobDocument:
    """The Job document. ``history``: all entries of the history, for the conditions."""
    scale = status.scale
    return JobDocument(
        api_version=GROUP,
        metadata=MetadataDocument(name=status.job, resource_version=str(scale.revision), generation=scale.generation),
        spec=JobSpecDocument(
            replicas=scale.desired,
            minimum=scale.minimum,
            maximum=scale.maximum,
            unit=scale.unit,
            suspended=scale.suspended,
            cordoned=list(scale.cordoned),
            owner=scale.owner,
            fault_tolerance=status.fault_tolerance,
        ),
        status=_job_status(status, history),
    )


def _job_status(status: JobStatus, history: Sequence[HistoryEntry]) -> JobStatusDocument:
    scale = status.scale
    return JobStatusDocument(
        observed_generation=scale.observed,
        phase=status.phase,
        reason=status.reason,
        waiting=scale.waiting,
        replicas=scale.nodes,
        round=status.round,
        workers=status.world_size,
        restarts_used=status.restarts_used,
        restarts_allowed=status.restarts_allowed,
        master=status.master,
        checkpoint=CheckpointDocument(commit=status.saved.commit, era=status.saved.era, where=status.saved_in),
        boundary=status.boundary,
        stopping=status.kill,
        need_seconds=scale.need_s,
        proposal=ProposalDocument(replicas=scale.proposal, reason=scale.proposal_reason),
        flaws=list(status.flaws),
        warnings=list(status.warnings),
        goodput={one.name: one.value for one in status.goodput},
        conditions=[
            ConditionDocument(
                type=one.kind,
                status="True" if one.holds else "False",
                reason=one.reason,
                message=one.message,
                last_transition_time=stamp(one.since_s),
            )
            for one in conditions(status, history)
        ],
        nodes=[_node(node, scale.cordoned) for node in status.nodes],
        dropped_slots=[_dropped(one) for one in status.dropped],
    )


def _dropped(one: DroppedSlot) -> DroppedSlotDocument:
    return DroppedSlotDocument(
        node=one.node,
        host=one.host,
        slot=one.slot,
        device=one.device,
        reason=one.why,
        round=one.round,
        host_id=one.host_id,
        by=one.by,
    )


def _node(node: NodeView, cordoned: Sequence[str]) -> NodeDocument:
    return NodeDocument(
        name=node.node,
        host=node.host,
        slots=node.slots,
        state=node.state,
        attached=node.attached,
        position=node.position,
        first_rank=node.first_rank,
        underway=node.underway,
        draining=node.draining,
        cordoned=node.node in cordoned,
        places=list(node.places),
        spare_slots=node.spare_slots,
    )


def granted(answer: Granted) -> StatusDocument:
    """The Status for a scale request that the Master accepted."""
    return StatusDocument(
        api_version="v1",
        metadata=StatusMetadataDocument(str(answer.revision)),
        status="Success",
        message=answer.text,
        code=CODES[answer.verdict],
        details=StatusDetailsDocument(answer.generation),
    )


def answered(answer: Answer) -> StatusDocument:
    """The Status for an accepted request whose outcome will appear in the history."""
    return StatusDocument(
        api_version="v1", metadata=StatusMetadataDocument(), status="Success", message=answer.text, code=202
    )


def refused(refusal: Refusal) -> StatusDocument:
    """The Status for a refused request."""
    return StatusDocument(
        api_version="v1",
        metadata=StatusMetadataDocument(),
        status="Failure",
        message=refusal.message,
        reason=REASONS[refusal.code],
        code=refusal.code,
    )


def stamp(at_s: float) -> str:
    """Seconds since the Unix epoch as RFC 3339 text in UTC, as Kubernetes writes times. An impossible time becomes
    1970."""
    try:
        moment = datetime.datetime.fromtimestamp(max(0.0, at_s), tz=datetime.timezone.utc)
    except (OverflowError, ValueError, OSError):
        moment = datetime.datetime.fromtimestamp(0, tz=datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
