"""The three kinds of patches that an API server takes."""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes_fake.store import ApiFailure, Json

MERGE_KEYS = {"containers": "name", "env": "name", "ports": "containerPort", "volumes": "name", "conditions": "type"}
"""How lists are merged in a strategic merge patch; other lists are replaced."""


def patched(entry: Json, body: Any, content_type: str, *, strategic: bool) -> Json:
    """The object after the patch. ``strategic``: the resource is a built-in one."""
    match content_type:
        case "application/merge-patch+json":
            return _object(_merged(entry, body, strategic=False))
        case "application/strategic-merge-patch+json" if strategic:
            return _object(_merged(entry, body, strategic=True))
        case "application/json-patch+json":
            return _object(_changed(entry, body))
    allowed = "application/json-patch+json, application/merge-patch+json"
    raise ApiFailure(
        415,
        "UnsupportedMediaType",
        f"the body of the request was in an unknown format - accepted media types include: {allowed}",
    )


def _object(value: Any) -> Json:
    if not isinstance(value, dict) or "metadata" not in value:
        raise ApiFailure(400, "BadRequest", "the patch leaves no object")
    return value


def _merged(old: Any, new: Any, *, strategic: bool, name: str = "") -> Any:
    """RFC 7396, and for the strategic kind lists that are merged by a key."""
    if strategic and isinstance(new, list) and isinstance(old, list) and name in MERGE_KEYS:
        return _merged_list(old, new, MERGE_KEYS[name])
    if not isinstance(new, dict):
        return copy.deepcopy(new)
    merged: Json = copy.deepcopy(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value, strategic=strategic, name=key)
    return merged


def _merged_list(old: list[Any], new: list[Any], key: str) -> list[Any]:
    merged = copy.deepcopy(old)
    for entry in new:
        place = next((at for at, one in enumerate(merged) if one.get(key) == entry.get(key)), None)
        if place is None:
            merged.append(copy.deepcopy(entry))
        else:
            merged[place] = _merged(merged[place], entry, strategic=True)
    return merged


def _changed(entry: Json, changes: Any) -> Any:
    """RFC 6902: add, remove, replace, test."""
    if not isinstance(changes, list):
        raise ApiFailure(400, "BadRequest", "a JSON patch is a list")
    result: Any = copy.deepcopy(entry)
    for change in changes:
        path = [part.replace("~1", "/").replace("~0", "~") for part in change["path"].split("/")[1:]]
        try:
            _apply(result, path, change)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            text = f"the server rejected our request due to an error in our request: {change['path']}: {error}"
            raise ApiFailure(422, "Invalid", text) from error
    return result


def _apply(entry: Any, path: list[str], change: Json) -> None:
    for part in path[:-1]:
        entry = entry[int(part)] if isinstance(entry, list) else entry[part]
    last: Any = path[-1]
    inside = isinstance(entry, list)
    if inside and last != "-":
        last = int(last)
    match change["op"]:
        case "add" if inside and last == "-":
            entry.append(change["value"])
        case "add" if inside:
            entry.insert(last, change["value"])
        case "add":
            entry[last] = change["value"]
        case "replace":
            if not inside and last not in entry:
                raise KeyError(last)
            entry[last] = change["value"]
        case "remove":
            del entry[last]
        case "test":
            if entry[last] != change["value"]:
                raise ValueError("test failed")
        case other:
            raise ValueError(f"op {other}")
