"""The OpenAPI 3.1 document: schemas from the types of bodies, addresses from the table of routes. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from edl import __version__
from edl.web.bodies import NAME, REQUESTS
from edl.web.documents import ANSWERS, StatusDocument
from edl.web.routes import ROUTES, Route

MOST_AFTER = 10**15
_COMPONENTS = "#/components/schemas/"


def _ecma(pattern: str) -> str:
    """A Python pattern as ECMAScript has it, whose ``$`` is the very end."""
    return pattern.replace(r"\Z", "$")


def _schemas() -> dict[str, Any]:
    """Of all bodies, by the names of their types."""
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
        found = operation["responses"].setdefault(str(code), {"description": _WORDS[code], "content": {}})
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
    return {"description": _WORDS[code], "content": content, **({"headers": headers} if headers else {})}
