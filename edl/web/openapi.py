"""The OpenAPI 3.1 document: schemas written by hand, addresses from the table of routes. Pure.

The schemas of requests are also what requests are checked against (``schema.check``), so they promise what is so.
"""

from __future__ import annotations

from typing import Any

from edl import __version__
from edl.web.conditions import TYPES
from edl.web.refusal import REASONS
from edl.web.routes import NAME, ROUTES, Route
from edl.wire.wishes import Care

MOST_NODES = 2**31 - 1
REVISION = r"^([0-9]{1,18})?$"
MOST_AFTER = 10**15

_TEXT = {"type": "string"}
_BOOL = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_REPLICAS = {"type": "integer", "minimum": 0, "maximum": MOST_NODES}
_SEEN = {
    "type": "string",
    "pattern": REVISION,
    "description": "Version of the size that the asker has seen; refused with 409 if it has changed since. Empty: any.",
}
_ASKER = {
    "reason": {"type": "string", "maxLength": 2000, "description": "Goes into the history."},
    "requester": {"type": "string", "maxLength": 200, "description": "Who asks, for people."},
}
_SCALE_META = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 253}, "resourceVersion": _SEEN},
}
_SCALE_WISH: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "kind": {"type": "string", "enum": ["Scale"]},
        "apiVersion": {"type": "string", "enum": ["autoscaling/v1"]},
        "metadata": _SCALE_META,
        "spec": {"type": "object", "additionalProperties": False, "properties": {"replicas": _REPLICAS}},
        "status": {"type": "object", "description": "Not looked at."},
        **_ASKER,
        "idempotencyKey": {
            "type": "string",
            "maxLength": 200,
            "description": "Of several wishes with one key the first counts; the others get the same answer.",
        },
    },
}

REQUESTS: dict[str, dict[str, Any]] = {
    "ScaleWish": {**_SCALE_WISH, "required": ["spec"]},
    "ScalePatch": _SCALE_WISH,
    "BoundsWish": {
        "type": "object",
        "additionalProperties": False,
        "required": ["minimum", "maximum"],
        "properties": {"minimum": _REPLICAS, "maximum": _REPLICAS, "resourceVersion": _SEEN, **_ASKER},
    },
    "DrainWish": {
        "type": "object",
        "additionalProperties": False,
        "required": ["nodes"],
        "properties": {
            "nodes": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1000,
                "items": {"type": "string", "pattern": NAME},
                "examples": [["node-a"]],
            },
            "deadlineSeconds": {
                "type": "number",
                "minimum": 0,
                "maximum": 604800,
                "description": "Until when they have to be gone; 0: as long as --shutdown-timeout.",
            },
            "checkpoint": {
                "type": "string",
                "enum": [care.value for care in Care],
                "description": "must: they stay until a checkpoint is complete; try: if there is time; no: none.",
            },
            **_ASKER,
        },
    },
    "DataWish": {
        "type": "object",
        "additionalProperties": False,
        "required": ["files"],
        "properties": {
            "files": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1000,
                "items": {"type": "string", "minLength": 1, "maxLength": 4096},
                "examples": [["/data/day-17/*.parquet"]],
                "description": "Paths, patterns or URLs, as the workers see them.",
            },
            "when": {
                "type": "string",
                "enum": ["now", "next-epoch"],
                "description": "now: the epoch under way, if records of it are left; else the next one.",
            },
            **_ASKER,
        },
    },
    "Plea": {"type": "object", "additionalProperties": False, "properties": _ASKER},
    "CordonWish": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **_ASKER,
            "device": {
                "type": "string",
                "maxLength": 200,
                "description": "Only this slot: its number, or the UUID of what is in it.",
            },
        },
    },
}
"""Of bodies that come in."""


def _object(**properties: Any) -> dict[str, Any]:
    """All of them are there, and nothing else."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
    }


_META = _object(name=_TEXT, resourceVersion={"type": "string", "pattern": "^[0-9]+$"}, generation=_COUNT)

ANSWERS: dict[str, dict[str, Any]] = {
    "Scale": _object(
        kind={"type": "string", "enum": ["Scale"]},
        apiVersion={"type": "string", "enum": ["autoscaling/v1"]},
        metadata={
            **_META,
            "properties": {
                **_META["properties"],
                "annotations": {"type": "object", "additionalProperties": _TEXT},
            },
        },
        spec=_object(replicas=_COUNT),
        status=_object(replicas=_COUNT, selector=_TEXT, observedGeneration=_COUNT),
    ),
    "Status": {
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "apiVersion", "metadata", "status", "message", "code"],
        "properties": {
            "kind": {"type": "string", "enum": ["Status"]},
            "apiVersion": {"type": "string", "enum": ["v1"]},
            "metadata": {"type": "object", "properties": {"resourceVersion": _TEXT}},
            "status": {"type": "string", "enum": ["Success", "Failure"]},
            "message": _TEXT,
            "reason": {"type": "string", "enum": sorted(REASONS.values())},
            "code": {"type": "integer"},
            "details": {"type": "object", "properties": {"generation": _COUNT}},
        },
    },
    "Condition": _object(
        type={"type": "string", "enum": list(TYPES)},
        status={"type": "string", "enum": ["True", "False"]},
        reason=_TEXT,
        message=_TEXT,
        lastTransitionTime={"type": "string", "format": "date-time"},
    ),
    "Node": _object(
        name=_TEXT,
        host=_TEXT,
        slots=_COUNT,
        state=_TEXT,
        attached=_BOOL,
        position={"type": "integer", "minimum": -1},
        firstRank={"type": "integer", "minimum": -1},
        underway=_BOOL,
        draining=_BOOL,
        cordoned=_BOOL,
        places={"type": "array", "items": _COUNT},
        spareSlots=_COUNT,
    ),
    "DroppedSlot": _object(node=_TEXT, host=_TEXT, slot=_COUNT, device=_TEXT, reason=_TEXT, round=_COUNT),
    "Job": _object(
        kind={"type": "string", "enum": ["Job"]},
        apiVersion=_TEXT,
        metadata=_META,
        spec=_object(
            replicas=_COUNT,
            minimum=_COUNT,
            maximum=_COUNT,
            unit=_COUNT,
            suspended=_BOOL,
            cordoned={"type": "array", "items": _TEXT},
            owner=_TEXT,
            faultTolerance=_TEXT,
        ),
        status=_object(
            observedGeneration=_COUNT,
            phase=_TEXT,
            reason=_TEXT,
            waiting=_TEXT,
            replicas=_COUNT,
            round=_COUNT,
            workers=_COUNT,
            restartsUsed=_COUNT,
            restartsAllowed=_COUNT,
            master=_TEXT,
            checkpoint=_object(commit=_COUNT, era=_COUNT, where=_TEXT),
            boundary=_TEXT,
            stopping=_TEXT,
            needSeconds={"type": "number", "minimum": 0},
            proposal=_object(replicas=_COUNT, reason=_TEXT),
            flaws={"type": "array", "items": _TEXT},
            warnings={"type": "array", "items": _TEXT},
            conditions={"type": "array", "items": {"$ref": "#/components/schemas/Condition"}},
            nodes={"type": "array", "items": {"$ref": "#/components/schemas/Node"}},
            droppedSlots={"type": "array", "items": {"$ref": "#/components/schemas/DroppedSlot"}},
        ),
    ),
    "Document": {"type": "object"},
}
"""Of bodies that go out."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "job": {
        "name": "job",
        "in": "path",
        "required": True,
        "description": "Name of the job (--rdzv-id).",
        "schema": {"type": "string", "pattern": NAME},
    },
    "node": {
        "name": "node",
        "in": "path",
        "required": True,
        "description": "Name of the node (--node-id).",
        "schema": {"type": "string", "pattern": NAME},
    },
    "dataset": {
        "name": "dataset",
        "in": "path",
        "required": True,
        "description": "Name of the data set.",
        "schema": {"type": "string", "pattern": NAME},
    },
    "after": {
        "name": "after",
        "in": "query",
        "required": False,
        "description": "Only lines numbered above this.",
        "schema": {"type": "integer", "minimum": 0, "maximum": MOST_AFTER, "default": 0},
    },
    "follow": {
        "name": "follow",
        "in": "query",
        "required": False,
        "description": "Go on with what happens, until the Master goes.",
        "schema": {"type": "boolean", "default": False},
    },
}

_WORDS = {
    200: "It is so.",
    202: "It has been taken on, and the next Master knows it as well; the status says when it is done.",
    307: "Another launcher rules: ask there. Clients leave their token behind unless told otherwise.",
    400: "The request cannot be read.",
    401: "No token, or one that is not known.",
    403: "The token may only look.",
    404: "No such job or node, or no name of a data set.",
    408: "The body did not come in time.",
    409: "Somebody has changed the size since. Read it again.",
    413: "The body is too large.",
    415: "Another media type is needed, and no coding of the content.",
    422: "Refused by the rules of the job; the message says why and what to do.",
    429: "Too many requests or streams of this peer; try again after a while.",
    500: "A defect of edl; the launcher's log has it.",
    503: "No Master at this moment, or the store does not answer; try again after a while.",
}
_HEADERS = {
    307: {"Location": "The same address at the launcher that rules."},
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "Seconds."},
    503: {"Retry-After": "Seconds."},
}


def document(job: str) -> dict[str, Any]:
    """The whole document, for one job's interface."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"edl: the size of job {job}",
            "version": __version__,
            "description": "What a person, an autoscaler or a scheduler asks of an elastic job. See docs/scale.md.",
        },
        "paths": paths,
        "components": {
            "schemas": {**REQUESTS, **ANSWERS},
            "parameters": PARAMETERS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    named = [part for part in ("job", "node", "dataset") if f"{{{part}}}" in route.path]
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in [*named, *route.query]],
        "responses": {},
    }
    if route.public:
        operation["security"] = []
    if route.body:
        content = {kind: {"schema": {"$ref": f"#/components/schemas/{route.body}"}} for kind in route.types}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    for code, answer in route.answers:
        found = operation["responses"].setdefault(str(code), {"description": _WORDS[code], "content": {}})
        if "/" in answer:
            found["content"][answer] = {"schema": {"type": "string"}}
        else:
            found["content"]["application/json"] = {"schema": {"$ref": f"#/components/schemas/{answer}"}}
    for code in route.failures:
        operation["responses"][str(code)] = _failure(code, public=route.public)
    return operation


def _failure(code: int, *, public: bool) -> dict[str, Any]:
    headers = {
        name: {"description": text, "required": True, "schema": {"type": "string"}}
        for name, text in _HEADERS.get(code, {}).items()
    }
    content = (
        {"text/plain": {"schema": {"type": "string"}}}
        if public
        else {"application/json": {"schema": {"$ref": "#/components/schemas/Status"}}}
    )
    return {"description": _WORDS[code], "content": content, **({"headers": headers} if headers else {})}
