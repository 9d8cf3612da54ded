"""As much of JSON Schema as the bodies of this interface use: what the document promises is what is checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from edl.web.refusal import Refusal

Schema = Mapping[str, Any]
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
}
_KNOWN = {
    *("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const"),
    *("pattern", "minLength", "maxLength", "minimum", "maximum", "description", "examples", "default", "title"),
}
"""Keywords; one that is not among them would be promised and not kept."""


def parse(data: bytes) -> Any:
    """JSON text. Raises ``Refusal`` (400)."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise Refusal(400, f"the body is not JSON{where}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check(value: Any, schema: Schema, where: str = "the body") -> None:
    """Whether a value is as the schema says. Raises ``Refusal`` (400) that names the first place where it is not."""
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        raise Refusal(400, f"{where}: {_shown(value)} where {_article(kind)} belongs")
    if "enum" in schema and value not in schema["enum"]:
        raise Refusal(400, f"{where}: {_shown(value)} is not one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, str):
        _check_text(value, schema, where)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if not least <= value <= most:
            raise Refusal(400, f"{where}: {_shown(value)} is not from {least} to {most}")
    elif isinstance(value, list):
        _check_list(value, schema, where)
    elif isinstance(value, dict):
        _check_object(value, schema, where)


def _check_text(value: str, schema: Schema, where: str) -> None:
    least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if not least <= len(value) <= most:
        raise Refusal(400, f"{where}: {len(value)} characters, allowed are {least} to {most}")
    if "pattern" in schema and not _matches(schema["pattern"], value):
        raise Refusal(400, f"{where}: {_shown(value)} does not match {schema['pattern']}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise Refusal(400, f"{where}: holds half of a surrogate pair, which is no text")


def _matches(pattern: str, value: str) -> bool:
    """As ECMAScript has it: ``$`` is the very end, not a place before a last line break."""
    return re.search(re.sub(r"\$$", r"\\Z", pattern), value) is not None


def _check_list(value: list[Any], schema: Schema, where: str) -> None:
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not least <= len(value) <= most:
        raise Refusal(400, f"{where}: {len(value)} items, allowed are {least} to {most}")
    for index, item in enumerate(value):
        check(item, schema.get("items", {}), f"{where}[{index}]")


def _check_object(value: dict[str, Any], schema: Schema, where: str) -> None:
    known: Mapping[str, Schema] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            raise Refusal(400, f"{where}: {name} is missing")
    for name, item in value.items():
        if name in known:
            check(item, known[name], name if where == "the body" else f"{where}.{name}")
        elif schema.get("additionalProperties", True) is False:
            raise Refusal(400, f"{where}: unknown field {_shown(name)}. Known: {', '.join(known)}")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) != (kind == "boolean"):
        return False
    if not isinstance(value, _TYPES[kind]):
        return False
    if isinstance(value, float):
        return math.isfinite(value) and (kind == "number" or value.is_integer())
    return True


def _shown(value: Any) -> str:
    """A value in a message: short, on one line, whatever it holds."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeio' else 'a'} {kind}"


def keywords(schema: Any) -> set[str]:
    """Every keyword that a schema uses, at any depth."""
    found = set(schema)
    for name, part in schema.items():
        if name == "properties":
            for item in part.values():
                found |= keywords(item)
        elif name == "items" or (name == "additionalProperties" and isinstance(part, Mapping)):
            found |= keywords(part)
    return found


def understands(schema: Schema) -> bool:
    """Whether all that the schema says is checked."""
    return keywords(schema) <= _KNOWN
