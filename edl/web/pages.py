"""The dashboard's page and its files, and the headers that limit what a browser does with them.

They reveal nothing about the job, so they need no token: the page asks for one, and sends it with each request to the
routes of ``edl.web.routes``.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from edl.web.refusal import Refusal

FOLDER = Path(__file__).parent / "assets"
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".md": "text/plain",
}
"""Media types by suffix. Other files are not served."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self' {scheme}:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content security policy: no inline code, and no text that becomes code or markup. The page may connect to all hosts,
because after the loss of its launcher it looks for the Master at others, whose addresses are not known beforehand."""
_HEADERS = {
    "Cache-Control": "no-cache",  # that is: ask whether it has changed, so that page and launcher belong together
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file as it is sent."""

    body: bytes
    media_type: str
    tag: str
    """Its ``ETag``."""


def read_files(folder: Path = FOLDER) -> dict[str, StaticFile]:
    """All files of a folder by their paths below it. Blocks on the file system. Raises ``OSError``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is not None and path.is_file():
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            found[path.relative_to(folder).as_posix()] = StaticFile(body, media_type, tag)
    return found


class Pages:
    """Serves ``/``, ``/dashboard`` and ``/assets/…``. The files are read at the first request."""

    def __init__(self) -> None:
        self._files: dict[str, StaticFile] = {}

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the routes, none of which is part of the API."""
        for path in ("/", "/dashboard", "/assets/{name:.+}"):
            router.add_route("GET", path, self.serve)

    def serves(self, request: web.Request) -> bool:
        """Whether a request is for one of the routes."""
        return request.match_info.handler == self.serve

    async def serve(self, request: web.Request) -> web.Response:
        """The page, one of its files, or the way to the page. Raises ``Refusal`` (404)."""
        if request.path == "/":
            return web.Response(status=302, headers={"Location": "dashboard"})  # relative: a proxy may add a prefix
        if not self._files:
            self._files = await asyncio.to_thread(read_files)
        found = self._files.get(request.match_info.get("name", PAGE))
        if found is None:
            raise Refusal(404, "no such file of the dashboard")
        policy = _POLICY.format(scheme=request.scheme)
        headers = {**_HEADERS, "ETag": found.tag, "Content-Security-Policy": policy}
        if request.headers.get("If-None-Match") == found.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=found.body, headers=headers, content_type=found.media_type, charset="utf-8")
