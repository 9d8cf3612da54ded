"""The exception for a refused HTTP request."""

from __future__ import annotations

from collections.abc import Mapping

REASONS = {
    307: "TemporaryRedirect",
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "Timeout",
    409: "Conflict",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "ServiceUnavailable",
}
"""The ``reason`` of a Status by HTTP status code: that of Kubernetes, if it has one."""


class Refusal(Exception):
    """Refuses a request with this HTTP status code. ``message``: why, and what to do. ``headers``: for the response."""

    def __init__(self, code: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.headers = dict(headers or {})
