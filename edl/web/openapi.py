"""Generates the OpenAPI 3.1 document: schemas from the types of the bodies, paths from the table of routes. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from edl import __version__
from edl.web.bodies import NAME, REQUESTS
from edl.web.documents import ANSWERS, StatusDocument
from edl.web.routes import ROUTES, Route

MOST_AFTER = 10**15
"""Limit on the query parameter ``after``."""
MOST_LINES = 1000
"""Limit on the query parameter ``lines``: as many as a launcher keeps of each worker."""
LINES = 100
"""Its default."""
_COMPONENTS = "#/components/schemas/"


def _ecma(pattern: str) -> str:
    r"""A Python pattern in the syntax of ECMAScript, whose ``$`` means the same as Python's ``\Z``."""
    return pattern.replace(r"\Z", "$")


def _schemas() -> dict[str, Any]:
    """The schemas of all bodies, by the names of the types."""
    _, components = msgspec.json.schema_components((*REQUESTS, *ANSWERS), ref_template=_COMPONENTS + "{name}")
    return {name: _with_ecma(schema) for name, schema in components.items()}


def _with_ecma(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _ecma(part) if key == "pattern" and isinstance(part, str) else _with_ecma(part)
            for key, part in schema.items()
        }
    return [_with_ecma(part) for part in schema] if isinstance(schema, list) else schema


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _COMPONENTS + kind.__name__}


PARAMETERS: dict[str, dict[str, Any]] = {
    "job": {
        "name": "job",
        "in": "path",
        "required": True,
        "description": "Name of the job (--rdzv-id).",
        "schema": {"type": "string", "pattern": _ecma(NAME)},
    },
    "node": {
        "name": "node",
        "in": "path",
        "required": True,
        "description": "Name of the node (--node-id).",
        "schema": {"type": "string", "pattern": _ecma(NAME)},
    },
    "dataset": {
        "name": "dataset",
        "in": "path",
        "required": True,
        "description": "Name of the data set.",
        "schema": {"type": "string", "pattern": _ecma(NAME)},
    },
    "after": {
        "name": "after",
        "in": "query",
        "required": False,
        "description": "Only entries with a higher number.",
        "schema": {"type": "integer", "minimum": 0, "maximum": MOST_AFTER, "default": 0},
    },
    "before": {
        "name": "before",
        "in": "query",
        "required": False,
        "description": "Only entries with a lower number; 0: no limit. Not with follow.",
        "schema": {"type": "integer", "minimum": 0, "maximum": MOST_AFTER, "default": 0},
    },
    "last": {
        "name": "last",
        "in": "query",
        "required": False,
        "description": "Only this many of the entries, the newest; 0: all. Not with follow.",
        "schema": {"type": "integer", "minimum": 0, "maximum": MOST_AFTER, "default": 0},
    },
    "lines": {
        "name": "lines",
        "in": "query",
        "required": False,
        "description": "Most lines of each worker in a first answer, the newest ones.",
        "schema": {"type": "integer", "minimum": 0, "maximum": MOST_LINES, "default": LINES},
    },
    "follow": {
        "name": "follow",
        "in": "query",
        "required": False,
        "description": "Continue with new entries as they are added, until the Master ends.",
        "schema": {"type": "boolean", "default": False},
    },
}

_DESCRIPTIONS = {
    200: "Success; nothing had to be changed.",
    202: "Accepted and stored, so the next Master knows it too; the status shows when it is in effect.",
    307: "Another launcher is the Master: repeat the request there. Many clients drop the token on a redirect.",
    400: "The request is invalid.",
    401: "The token is missing or unknown.",
    403: "The token is read-only.",
    404: "No such job or node, or an invalid name of a data set.",
    408: "The body did not arrive in time.",
    409: "The size has changed since this version. Read it again.",
    413: "The body is too large.",
    415: "The media type is not supported, or the body is compressed.",
    422: "Refused; the message says why and what to do.",
    429: "Too many requests from this address, or too many streams; try again later.",
    500: "A bug in edl; the launcher's log has the details.",
    501: "The launcher lacks an optional package; the message names it.",
    503: "There is no Master at the moment, or the store does not answer; try again later.",
}
"""Descriptions of the status codes."""
_HEADERS = {
    307: {"Location": "The same path at the launcher that is the Master."},
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "Seconds."},
    503: {"Retry-After": "Seconds."},
}


def document(job: str) -> dict[str, Any]:
    """The complete OpenAPI document for the interface of one job."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"edl: the size of job {job}",
            "version": __version__,
            "description": "Requests of people, autoscalers and schedulers to an elastic job. See docs/scale.md.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
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
    if route.body is not None:
        content = {kind: {"schema": _reference(route.body)} for kind in route.types}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    for code, answer in route.answers:
        found = operation["responses"].setdefault(str(code), {"description": _DESCRIPTIONS[code], "content": {}})
        if answer is None:
            found["content"]["application/json"] = {"schema": {"type": "object"}}
        elif isinstance(answer, str):
            found["content"][answer] = {"schema": {"type": "string"}}
        else:
            found["content"]["application/json"] = {"schema": _reference(answer)}
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
        else {"application/json": {"schema": _reference(StatusDocument)}}
    )
    return {"description": _DESCRIPTIONS[code], "content": content, **({"headers": headers} if headers else {})}
