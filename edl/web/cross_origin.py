"""Lets the dashboard of one launcher ask another one (CORS).

A page whose own launcher is gone finds the job again at another launcher, which is another origin. Any origin may ask,
because an origin gives no right: browsers send no credential by themselves, neither tokens nor, to other origins,
certificates. Each request has to carry a token, as from any other client.
"""

from __future__ import annotations

from aiohttp import web

API = "/v1/"
"""Prefix of the paths that other origins may ask."""
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Edl-Relay",
    "Access-Control-Max-Age": "600",
}


def preflight(request: web.Request) -> web.Response | None:
    """The answer to a browser's question whether it may send a request; None: this is none."""
    asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    if request.method != "OPTIONS" or not asks or not request.path.startswith(API):
        return None
    return web.Response(status=204, headers=_PREFLIGHT)


async def allow_reading(request: web.Request, response: web.StreamResponse) -> None:
    """Called before each response is sent: let pages of other origins read it."""
    if "Origin" in request.headers and request.path.startswith(API):
        response.headers["Access-Control-Allow-Origin"] = "*"
        response.headers["Access-Control-Expose-Headers"] = "Date, Retry-After"
