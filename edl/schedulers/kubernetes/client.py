"""A minimal client of the Kubernetes API: JSON over HTTP.

Every call retries transient failures (no connection, 429, 5xx) until its timeout, and respects ``Retry-After``. The
token is reread when its file changes, because a pod's token expires after about an hour.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import ssl
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edl.errors import SchedulerError
from edl.schedulers.kubernetes.access import Options
from edl.tasks import Backoff

if TYPE_CHECKING:
    import aiohttp

Json = dict[str, Any]

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which a call is retried."""
LONGEST_LINE_BYTES = 16 * 1024 * 1024
"""Longest line of a watch; an object in etcd has at most 1.5 MB."""
WATCH_S = 60
"""Seconds after which the server ends a watch. Short, so that a silently broken connection is soon noticed."""
WATCH_SPARE_S = 15.0
"""Seconds after ``WATCH_S`` until the client ends a watch that the server has not ended."""


class ApiStatusError(SchedulerError):
    """The API server returned an HTTP error ``status``."""

    def __init__(self, status: int, message: str, *, retry: bool) -> None:
        super().__init__(message, retry=retry)
        self.status = status


@dataclass(frozen=True, slots=True)
class ApiTarget:
    """The target of a call: its path, and what a Role must allow for it."""

    path: str
    """Path without the server: ``/apis/apps/v1/namespaces/ml/statefulsets/train/scale``."""
    group: str
    """API group; empty for the core group."""
    resource: str
    """The resource as written in a Role: ``statefulsets/scale``."""
    verbs: tuple[str, ...] = ("get", "patch")
    """All verbs that edl needs on the resource."""
    cluster: bool = False
    """Whether the resource is not namespaced, so that it needs a ClusterRole."""

    def rule(self) -> str:
        """The rule that a Role must contain, in YAML flow style."""
        verbs = ", ".join(self.verbs)
        return f'{{apiGroups: ["{self.group}"], resources: ["{self.resource}"], verbs: [{verbs}]}}'


class Client:
    """A client of one API server, for use on one event loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._token, self._token_mark = "", (0, 0)

    async def get(self, target: ApiTarget, query: Mapping[str, str] | None = None) -> Json:
        """Read an object or a list. Raises ``SchedulerError``."""
        return await self._call("GET", target, dict(query or {}), None, "")

    async def patch(self, target: ApiTarget, body: object, content_type: str) -> Json:
        """Patch an object; returns the new one. Raises ``SchedulerError``, for a conflict ``ApiStatusError`` with
        status 409."""
        return await self._call("PATCH", target, {"fieldManager": "edl"}, body, content_type)

    async def close(self) -> None:
        """Close the HTTP session, if one is open."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, method: str, target: ApiTarget, query: dict[str, str], body: object, kind: str) -> Json:
        await _load()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._options.timeout_s
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        last: SchedulerError | None = None
        while True:
            left_s = deadline_s - loop.time()
            try:
                return await self._once(method, target, query, body, kind, left_s)
            except asyncio.TimeoutError as error:
                text = f"{self._where(method, target)}: no answer within {self._options.timeout_s:g} s"
                # the last error response is more informative than the timeout
                raise last or SchedulerError(text, retry=True) from error
            except _Transient as error:
                last, wait_s = error.failure, max(pauses.next(), error.after_s)
                if loop.time() + wait_s >= deadline_s:
                    raise error.failure from error
            await asyncio.sleep(wait_s)

    async def _once(
        self, method: str, target: ApiTarget, query: dict[str, str], body: object, kind: str, limit_s: float
    ) -> Json:
        import aiohttp

        data = None if body is None else json.dumps(body).encode()
        headers = self._headers()
        if data is not None:
            headers["Content-Type"] = kind
        try:
            async with self._open().request(
                method,
                self._options.url + target.path,
                params=query,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=max(limit_s, 0.001)),
                allow_redirects=False,
            ) as answer:
                raw = await answer.read()
                self._refuse(answer.status, answer.headers, raw, method, target)
        except asyncio.TimeoutError:
            raise  # from Python 3.11 on it is an OSError, too
        except (aiohttp.ClientError, OSError) as error:
            raise await self._broken(method, target, error) from error
        return self._parsed(raw, method, target)

    async def events(self, target: ApiTarget, query: Mapping[str, str]) -> AsyncGenerator[Json, None]:
        """Yields the events of one watch until the server ends it. Raises ``SchedulerError``, for a version that the
        server no longer has ``ApiStatusError`` with status 410."""
        await _load()
        import aiohttp

        wanted = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        timeout = aiohttp.ClientTimeout(total=WATCH_S + WATCH_SPARE_S, sock_connect=self._options.timeout_s)
        rest = b""
        try:
            async with self._open().get(
                self._options.url + target.path,
                params=wanted,
                headers=self._headers(),
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    self._refuse(answer.status, answer.headers, await answer.read(), "WATCH", target)
                async for part in answer.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    if len(rest) > LONGEST_LINE_BYTES:
                        raise SchedulerError(f"{self._where('WATCH', target)}: a line is too long", retry=True)
                    for line in lines:
                        if line.strip():
                            yield self._parsed(line, "WATCH", target)
        except asyncio.TimeoutError as error:
            raise SchedulerError(f"{self._where('WATCH', target)}: no data for too long", retry=True) from error
        except _Transient as error:
            raise error.failure from error
        except (aiohttp.ClientError, OSError) as error:
            raise (await self._broken("WATCH", target, error)).failure from error

    def _open(self) -> aiohttp.ClientSession:
        """The HTTP session, created at the first call, because aiohttp needs a running event loop for that."""
        if self._session is None:
            import aiohttp

            context: ssl.SSLContext | bool = True
            if self._options.url.startswith("https"):
                context = ssl.create_default_context(cafile=self._options.ca or None)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=8))
        return self._session

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "edl"}
        if token := self._read_token():
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _read_token(self) -> str:
        """The token in the file; the previous one while the file cannot be read. Raises ``SchedulerError`` if it could
        never be read."""
        if not self._options.token_file:
            return ""
        file = Path(self._options.token_file)
        try:
            state = file.stat()
            mark = (state.st_mtime_ns, state.st_ino)
            if mark != self._token_mark:
                self._token, self._token_mark = file.read_text().strip(), mark
        except OSError as error:
            if not self._token:
                raise SchedulerError(f"the token in {file} cannot be read: {error.strerror}", retry=True) from error
        return self._token

    async def _broken(self, method: str, target: ApiTarget, error: Exception) -> _Transient:
        """The error for a failed connection. After a TLS error the session is closed, so that the next attempt reads
        the CA certificates again, which may have been replaced."""
        if isinstance(getattr(error, "certificate_error", error), ssl.SSLError):
            await self.close()
        words = str(error) or type(error).__name__
        return _Transient(SchedulerError(f"{self._where(method, target)}: {words}", retry=True))

    def _refuse(self, status: int, headers: Mapping[str, str], raw: bytes, method: str, target: ApiTarget) -> None:
        """Raise the error for a response that is not a success."""
        if 200 <= status < 300:
            return
        where, said = self._where(method, target), _message(raw)
        text = f"{where}: {status} {said}"
        if status == 403:
            scope = "ClusterRole" if target.cluster else f"Role in namespace {self._options.namespace}"
            text += f". The service account needs a {scope} with the rule {target.rule()}"
        elif status == 401:
            file = self._options.token_file
            text += f". The token in {file} is not accepted" if file else ". No token was given: token_file=…"
        elif status == 404:
            text += f". Check the name, and that the namespace is {self._options.namespace}"
        failure = ApiStatusError(status, text, retry=status in (*TRANSIENT, 401, 409, 410))
        if status in TRANSIENT:
            raise _Transient(failure, _after_s(headers))
        raise failure

    def _parsed(self, raw: bytes, method: str, target: ApiTarget) -> Json:
        try:
            value = json.loads(raw)
        except ValueError as error:
            raise SchedulerError(f"{self._where(method, target)}: the response is not JSON", retry=True) from error
        if not isinstance(value, dict):
            raise SchedulerError(f"{self._where(method, target)}: the response is not an object", retry=True)
        return value

    def _where(self, method: str, target: ApiTarget) -> str:
        return f"Kubernetes {method} {self._options.url}{target.path}"


async def _load() -> None:
    """Import aiohttp in a thread, because the import would block the Master's event loop for a fraction of a second."""
    if "aiohttp" not in sys.modules:
        await asyncio.to_thread(importlib.import_module, "aiohttp")


class _Transient(Exception):
    """A failure after which the call is retried until its timeout. ``after_s``: least pause, from ``Retry-After``."""

    def __init__(self, failure: SchedulerError, after_s: float = 0.0) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.after_s = after_s


def _message(raw: bytes) -> str:
    """The message in the server's ``Status``, or else the beginning of the response."""
    try:
        value = json.loads(raw)
        return str(value["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace").strip()


def _after_s(headers: Mapping[str, str]) -> float:
    """``Retry-After`` in seconds; 0 if it is missing or a date, which API servers do not use."""
    try:
        return max(0.0, float(headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0
