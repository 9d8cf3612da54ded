"""Bodies of requests become wishes. Pure; what does not fit is a ``Refusal``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edl.rendezvous.phrases import one_line
from edl.web.refusal import Refusal
from edl.wire.messages import Asked, Purpose
from edl.wire.status import JobStatus
from edl.wire.wishes import Care, Cordon, Drain, Rebound, Resize, Suspend

MOST_SHOWN = 500
"""Characters of a person's words that are kept."""

Body = Mapping[str, Any]


def put_scale(body: Body, status: JobStatus, by: str) -> Resize:
    """A whole Scale. Kubernetes leaves ``replicas`` out where it is 0; the Master says what is to be done instead."""
    _same_job(body, status.job)
    return _resize(body, int(body["spec"].get("replicas", 0)), by)


def patch_scale(body: Body, status: JobStatus, by: str) -> Resize | None:
    """A part of a Scale; None: it changes nothing. Raises ``Refusal`` (409) if it knows another version then."""
    _same_job(body, status.job)
    replicas = body.get("spec", {}).get("replicas")
    if replicas is None:
        seen = _revision(body.get("metadata", {}))
        if seen not in (0, status.scale.revision):
            raise Refusal(409, f"resourceVersion {seen} is not the newest ({status.scale.revision}). Read it again")
        return None
    return _resize(body, int(replicas), by)


def _resize(body: Body, replicas: int, by: str) -> Resize:
    return Resize(
        replicas,
        asker(body, by),
        words(body.get("reason", "")),
        _revision(body.get("metadata", {})),
        words(body.get("idempotencyKey", "")),
    )


def _same_job(body: Body, job: str) -> None:
    name = body.get("metadata", {}).get("name", job)
    if name != job:
        raise Refusal(422, f"metadata.name is {words(name)!r}, and the address names {job!r}")


def bounds(body: Body, by: str) -> Rebound:
    """Both of them."""
    minimum, maximum = int(body["minimum"]), int(body["maximum"])
    return Rebound(minimum, maximum, asker(body, by), words(body.get("reason", "")), _revision(body))


def drain(body: Body, by: str) -> Drain:
    """Each node once."""
    nodes = tuple(dict.fromkeys(body["nodes"]))
    care = Care(body.get("checkpoint", Care.TRY.value))
    return Drain(nodes, asker(body, by), words(body.get("reason", "")), float(body.get("deadlineSeconds", 0)), care)


def cordon(body: Body, node: str, by: str, *, cordoned: bool) -> Cordon:
    """One node, or one slot of it."""
    return Cordon(node, cordoned, asker(body, by), words(body.get("reason", "")), words(body.get("device", "")))


def suspend(body: Body, by: str, *, suspended: bool) -> Suspend:
    """Or resume."""
    return Suspend(suspended, asker(body, by), words(body.get("reason", "")))


def switch(body: Body, purpose: Purpose, by: str) -> Asked:
    """A checkpoint, or the end. The reason goes with the asker: a switch has no field for it."""
    reason, who = words(body.get("reason", "")), asker(body, by)
    return Asked(purpose, f"{who}: {reason}" if reason else who)


def add_data(body: Body, dataset: str, by: str) -> Asked:
    """Files for a data set."""
    reason, who = words(body.get("reason", "")), asker(body, by)
    wish = {"dataset": dataset, "files": list(body["files"]), "when": body.get("when", "now")}
    return Asked(Purpose.DATA, f"{who}: {reason}" if reason else who, json.dumps(wish))


def asker(body: Body, by: str) -> str:
    """Who asks: as they call themselves, and as they came."""
    name = words(body.get("requester", ""))
    return f"{name} ({by})" if name else by


def words(text: str) -> str:
    """Somebody's words as they go into the history: on one line, without control characters, not too long."""
    return one_line(text)[:MOST_SHOWN]


def _revision(body: Body) -> int:
    """0: any."""
    return int(body.get("resourceVersion") or 0)
