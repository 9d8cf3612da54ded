"""The routes for the output and the stacks of a node's workers, which any launcher answers by asking the node's own."""

from __future__ import annotations

from collections.abc import Awaitable

from aiohttp import web

from edl.errors import EdlError, UsageError
from edl.web import query
from edl.web.front import WebDeps, WorkerOutput
from edl.web.openapi import LINES, MOST_LINES
from edl.web.refusal import Refusal
from edl.wire import json_messages
from edl.wire.node_requests import OutputLines, OutputRequest


class OutputRoutes:
    """Handles the routes."""

    def __init__(self, deps: WebDeps) -> None:
        self._deps = deps

    async def output(self, request: web.Request) -> web.Response:
        """The newest lines, or those after the last answer. Raises ``Refusal``."""
        after = query.number(request, "after")
        lines = query.number(request, "lines", LINES, MOST_LINES)
        asked = OutputRequest(lines=lines, after=after)
        return await _answer(self._source().output(request.match_info["node"], asked))

    async def stacks(self, request: web.Request) -> web.Response:
        """The stacks. Raises ``Refusal``."""
        return await _answer(self._source().stacks(request.match_info["node"]))

    def _source(self) -> WorkerOutput:
        if self._deps.worker_output is None:
            raise Refusal(503, "the launcher is starting", {"Retry-After": "1"})
        return self._deps.worker_output


async def _answer(question: Awaitable[OutputLines]) -> web.Response:
    try:
        lines = await question
    except UsageError as error:
        raise Refusal(404, str(error)) from None
    except EdlError as error:
        raise Refusal(503, str(error), {"Retry-After": "1"}) from None
    return web.Response(body=json_messages.encode(lines), content_type="application/json", charset="utf-8")
