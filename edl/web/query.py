"""Reads query parameters. A value that the OpenAPI document does not allow raises ``Refusal`` (400)."""

from __future__ import annotations

import re

from aiohttp import web

from edl.web.openapi import MOST_AFTER
from edl.web.refusal import Refusal


def number(request: web.BaseRequest, name: str, default: int = 0, most: int = MOST_AFTER) -> int:
    """A number from 0 to ``most``."""
    text = _one(request, name, str(default))
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) > most:
        raise Refusal(400, f"{name} must be a number from 0 to {most}")
    return int(text)


def flag(request: web.BaseRequest, name: str) -> bool:
    """``true`` or ``false``, which is the default."""
    text = _one(request, name, "false")
    if text not in ("true", "false"):
        raise Refusal(400, f"{name} must be true or false")
    return text == "true"


def _one(request: web.BaseRequest, name: str, default: str) -> str:
    found = request.query.getall(name, [default])
    if len(found) > 1:
        raise Refusal(400, f"{name} is given {len(found)} times")
    return found[0]
