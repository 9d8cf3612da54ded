"""What this interface says: Scale, Job, Status and events, made from the Master's own words. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from edl.web.conditions import conditions
from edl.web.refusal import REASONS, Refusal
from edl.wire.json_messages import to_plain
from edl.wire.status import Answer, DroppedSlot, JobStatus, JournalEntry, NodeView
from edl.wire.wishes import Granted, Verdict

GROUP = "edl/v1"
CODES = {
    Verdict.ACCEPTED: 202,
    Verdict.KNOWN: 200,
    Verdict.STALE: 409,
    Verdict.REFUSED: 422,
    Verdict.UNKNOWN: 404,
}


def scale_of(status: JobStatus) -> dict[str, Any]:
    """The size as autoscaling/v1 has it; ``status.observedGeneration`` says which wish the world conforms to."""
    scale = status.scale
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {
            "name": status.job,
            "resourceVersion": str(scale.revision),
            "generation": scale.generation,
            "annotations": {
                "edl/minimum": str(scale.minimum),
                "edl/maximum": str(scale.maximum),
                "edl/unit": str(scale.unit),
                "edl/by": scale.by,
                "edl/reason": scale.reason,
                "edl/waiting": scale.waiting,
            },
        },
        "spec": {"replicas": scale.desired},
        "status": {
            "replicas": scale.nodes,
            "selector": f"edl.job={status.job}",
            "observedGeneration": scale.observed,
        },
    }


def job_of(status: JobStatus, history: Sequence[JournalEntry]) -> dict[str, Any]:
    """The whole job. ``history``: as much of it as there is."""
    scale = status.scale
    return {
        "kind": "Job",
        "apiVersion": GROUP,
        "metadata": {
            "name": status.job,
            "resourceVersion": str(scale.revision),
            "generation": scale.generation,
        },
        "spec": {
            "replicas": scale.desired,
            "minimum": scale.minimum,
            "maximum": scale.maximum,
            "unit": scale.unit,
            "suspended": scale.suspended,
            "cordoned": list(scale.cordoned),
            "owner": scale.owner,
            "faultTolerance": status.fault_tolerance,
        },
        "status": {
            "observedGeneration": scale.observed,
            "phase": status.phase,
            "reason": status.reason,
            "waiting": scale.waiting,
            "replicas": scale.nodes,
            "round": status.round,
            "workers": status.world_size,
            "restartsUsed": status.restarts_used,
            "restartsAllowed": status.restarts_allowed,
            "master": status.master,
            "checkpoint": {"commit": status.saved.commit, "era": status.saved.era, "where": status.saved_in},
            "boundary": status.boundary,
            "stopping": status.kill,
            "needSeconds": scale.need_s,
            "proposal": {"replicas": scale.proposal, "reason": scale.proposal_reason},
            "flaws": list(status.flaws),
            "warnings": list(status.warnings),
            "conditions": [
                {
                    "type": one.kind,
                    "status": "True" if one.holds else "False",
                    "reason": one.reason,
                    "message": one.message,
                    "lastTransitionTime": stamp(one.since_s),
                }
                for one in conditions(status, history)
            ],
            "nodes": [_node(node, scale.cordoned) for node in status.nodes],
            "droppedSlots": [_dropped(one) for one in status.dropped],
        },
    }


def _dropped(one: DroppedSlot) -> dict[str, Any]:
    return {
        "node": one.node,
        "host": one.host,
        "slot": one.slot,
        "device": one.device,
        "reason": one.why,
        "round": one.round,
    }


def _node(node: NodeView, cordoned: Sequence[str]) -> dict[str, Any]:
    return {
        "name": node.node,
        "host": node.host,
        "slots": node.slots,
        "state": node.state,
        "attached": node.attached,
        "position": node.position,
        "firstRank": node.first_rank,
        "underway": node.underway,
        "draining": node.draining,
        "cordoned": node.node in cordoned,
        "places": list(node.places),
        "spareSlots": node.spare_slots,
    }


def granted(answer: Granted) -> dict[str, Any]:
    """What became of a wish that was taken on, as a Status."""
    return _status(
        "Success", answer.text, CODES[answer.verdict], str(answer.revision), {"generation": answer.generation}
    )


def answered(answer: Answer) -> dict[str, Any]:
    """The same for a switch, whose outcome comes as history."""
    return _status("Success", answer.text, 202)


def refused(refusal: Refusal) -> dict[str, Any]:
    """Any other answer, as a Status."""
    return _status("Failure", refusal.message, refusal.code)


def _status(
    outcome: str, message: str, code: int, revision: str = "", details: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": revision} if revision else {},
        "status": outcome,
        "message": message,
        **({"reason": REASONS[code]} if outcome == "Failure" else {}),
        "code": code,
        **({"details": details} if details else {}),
    }


def event_of(entry: JournalEntry) -> dict[str, Any]:
    """One line of history, as ``edl events --json`` has it."""
    plain: dict[str, Any] = to_plain(entry)
    return plain


def stamp(at_s: float) -> str:
    """Seconds since 1970 as Kubernetes writes times."""
    try:
        moment = datetime.datetime.fromtimestamp(max(0.0, at_s), tz=datetime.timezone.utc)
    except (OverflowError, ValueError, OSError):
        moment = datetime.datetime.fromtimestamp(0, tz=datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
