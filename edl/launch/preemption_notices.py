"""Preemption notices: polls a cloud's metadata service, which announces that this host will be taken away.

Pure functions, one or two per provider, interpret the answers. The poller sends its requests in a thread, so nothing
else waits for the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edl.adapters.clock import wall_clock_s
from edl.launch.settings import NoticeSettings

ANSWER_S = 2.0
"""Timeout of a request in seconds; these services run on the host itself."""
LARGEST_BYTES = 1 << 16
"""Limit on the size of an answer."""
MOST_PAUSE_S = 15.0
"""Longest pause in seconds between two requests to a service that does not answer."""
TOKEN_LIFE_S = 21600
"""Lifetime in seconds that is requested for an AWS token."""
GCE_PREEMPTION_S = 30.0
GCE_MAINTENANCE_S = 60.0
"""Seconds between notice and end that Google documents; the answers contain no time."""


@dataclass(frozen=True, slots=True)
class Notice:
    """An announcement that this host is about to be taken away."""

    reason: str
    """What the provider announced, for messages."""
    at_s: float
    """When the host ends, in seconds since the Unix epoch; 0: unknown."""
    lead_s: float
    """Seconds from reading the notice until then, at least 1; 0: unknown."""


class BadAnswer(Exception):
    """A metadata service gave an answer that its documentation does not describe."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response of any status."""

    status: int
    body: str
    sent_s: float = 0.0
    """When it was sent, by the service's own clock, in seconds since the Unix epoch; 0: unknown. The times in notices
    are of that clock, and this host's may be wrong."""

    def now_s(self, here_s: float) -> float:
        """The time to compare a notice with. ``here_s``: now, by this host's clock."""
        return self.sent_s or here_s


Ask = Callable[[str, str, Mapping[str, str]], Reply]
"""A function that sends a request, given method, path and headers. Raises ``OSError`` or ``BadAnswer``."""


# --- interpreting answers --------------------------------------------------------------------------------------------


def read_aws(reply: Reply, now_s: float) -> Notice | None:
    """Interpret ``/latest/meta-data/spot/instance-action``; 404 means that there is no notice. Rebalance
    recommendations are not read, because such an instance may run for days. Raises ``BadAnswer``."""
    if reply.status == 404:
        return None
    content = _json(_ok(reply))
    action, at = content.get("action"), content.get("time")
    if not isinstance(action, str) or not isinstance(at, str):
        raise BadAnswer(f"no action and time in the answer {reply.body[:200]!r}")
    return _notice(f"AWS: spot instance-action {action} at {at}", _iso(at), reply.now_s(now_s))


def read_gce_preempted(reply: Reply, now_s: float) -> Notice | None:
    """Interpret ``instance/preempted``. Raises ``BadAnswer``."""
    text = _ok(reply).strip()
    if text not in ("TRUE", "FALSE"):
        raise BadAnswer(f"neither TRUE nor FALSE: {text[:200]!r}")
    return Notice("GCE: the instance is being preempted", 0.0, GCE_PREEMPTION_S) if text == "TRUE" else None


def read_gce_maintenance(reply: Reply, now_s: float) -> Notice | None:
    """Interpret ``instance/maintenance-event``. A live migration is no notice: the instance keeps running. Raises
    ``BadAnswer``."""
    text = _ok(reply).strip()
    if not text.startswith("TERMINATE"):
        return None
    return Notice(f"GCE: maintenance-event {text[:80]}", 0.0, GCE_MAINTENANCE_S)


AZURE_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events that end all processes of the host; ``Freeze`` only pauses it for seconds."""


def read_azure(reply: Reply, machine: str, now_s: float) -> Notice | None:
    """Interpret ``/metadata/scheduledevents``, which lists the events of all machines of a scale set; returns the
    earliest one for ``machine``. Raises ``BadAnswer``."""
    events = _json(_ok(reply)).get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise BadAnswer(f"no list of Events in the answer {reply.body[:200]!r}")
    found, now_s = [], reply.now_s(now_s)
    for event in events:
        kind, names, at = event.get("EventType"), event.get("Resources"), event.get("NotBefore") or ""
        if kind not in AZURE_ENDS or not isinstance(names, list) or not isinstance(at, str):
            continue
        if machine.lower() in (str(name).lower().lstrip("_") for name in names):
            when = f"not before {at}" if at else str(event.get("EventStatus", "now"))
            found.append(_notice(f"Azure: scheduled event {kind}, {when}", _http_date(at), now_s))
    return min(found, key=lambda notice: notice.at_s or now_s, default=None)


def _notice(reason: str, at_s: float, now_s: float) -> Notice:
    lead_s = max(1.0, at_s - now_s) if at_s else 0.0
    return Notice(reason, at_s, lead_s)


def _ok(reply: Reply) -> str:
    if reply.status != 200:
        raise BadAnswer(f"status {reply.status}")
    return reply.body


def _json(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise BadAnswer(f"not a JSON object: {text[:200]!r}")
    return content


def _iso(text: str) -> float:
    """Seconds since the Unix epoch of a time such as ``2017-09-18T08:22:00Z``. Raises ``BadAnswer``."""
    with contextlib.suppress(ValueError):
        at = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)).timestamp()
    raise BadAnswer(f"not a time: {text[:80]!r}")


def _http_date(text: str) -> float:
    """Seconds since the Unix epoch of a time such as ``Mon, 19 Sep 2016 18:29:47 GMT``, or in ISO format, which newer
    API versions use. 0 for an empty text: the event has begun. Raises ``BadAnswer``."""
    if not text:
        return 0.0
    with contextlib.suppress(ValueError, TypeError, IndexError):
        at = email.utils.parsedate_to_datetime(text)
        return (at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)).timestamp()
    return _iso(text)


# --- providers -------------------------------------------------------------------------------------------------------


class Aws:
    """AWS, through IMDSv2, which requires a token."""

    def __init__(self) -> None:
        self._token = ""

    def look(self, ask: Ask, now_s: float) -> Notice | None:
        """Poll once; returns a notice, or None. Raises ``BadAnswer`` and ``OSError``."""
        reply = self._ask(ask)
        if reply.status == 401:  # the token has expired
            self._token = ""
            reply = self._ask(ask)
        return read_aws(reply, now_s)

    def _ask(self, ask: Ask) -> Reply:
        if not self._token:
            reply = ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)})
            self._token = _ok(reply).strip()
        return ask("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})


class Gce:
    """Google Compute Engine: one request about preemption and one about maintenance."""

    def look(self, ask: Ask, now_s: float) -> Notice | None:
        """Poll once; returns a notice, or None. Raises ``BadAnswer`` and ``OSError``."""
        folder, headers = "/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
        found = read_gce_preempted(ask("GET", f"{folder}/preempted", headers), now_s)
        return found or read_gce_maintenance(ask("GET", f"{folder}/maintenance-event", headers), now_s)


class Azure:
    """Azure: reads the name of this host once, then its scheduled events."""

    def __init__(self) -> None:
        self._machine = ""

    def look(self, ask: Ask, now_s: float) -> Notice | None:
        """Poll once; returns a notice, or None. Raises ``BadAnswer`` and ``OSError``."""
        headers = {"Metadata": "true"}
        if not self._machine:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = _ok(ask("GET", path, headers)).strip()
        reply = ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", headers)
        return read_azure(reply, self._machine, now_s)


Looker = Aws | Gce | Azure


@dataclass(frozen=True, slots=True)
class Provider:
    """A cloud provider's metadata service."""

    base: str
    """Its base URL."""
    every_s: float
    """Polling interval in seconds."""
    make: Callable[[], Looker]


PROVIDERS: dict[str, Provider] = {
    "aws": Provider("http://169.254.169.254", 5.0, Aws),
    "gce": Provider("http://metadata.google.internal", 2.0, Gce),
    "azure": Provider("http://169.254.169.254", 2.0, Azure),
}


# --- polling ---------------------------------------------------------------------------------------------------------


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects: a metadata service sends none."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return no request, so that the redirect itself is the response."""
        return


def asker(base: str) -> Ask:
    """A function that sends HTTP requests to this base URL, never through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def ask(method: str, path: str, headers: Mapping[str, str]) -> Reply:
        request = urllib.request.Request(base + path, headers=dict(headers), method=method)  # noqa: S310 - checked
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                body = answer.read(LARGEST_BYTES).decode(errors="replace")
                return Reply(answer.status, body, _sent_s(answer.headers.get("Date", "")))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, _text_of(error))
        except http.client.HTTPException as error:
            raise BadAnswer(f"not HTTP: {error!r}") from error

    return ask


def _sent_s(date: str) -> float:
    try:
        return _http_date(date)
    except BadAnswer:
        return 0.0


def _text_of(error: urllib.error.HTTPError) -> str:
    """The body of an answer whose status says enough: as much of it as has come."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return error.read(LARGEST_BYTES).decode(errors="replace")
    return ""


class Poller:
    """Polls one provider. The first failure of the service is logged, and the next answer after it."""

    def __init__(
        self,
        name: str,
        looker: Looker,
        ask: Ask,
        every_s: float,
        wall_clock_s: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._name = name
        self._looker = looker
        self._ask = ask
        self._every_s = every_s
        self._wall_clock_s = wall_clock_s
        self._log = log
        self._failures = 0
        self._reported: tuple[str, float] | None = None

    async def run(self, tell: Callable[[Notice], None]) -> None:
        """Poll until cancelled. ``tell``: called on the event loop, once for each notice."""
        loop, ended = asyncio.get_running_loop(), threading.Event()

        def deliver(notice: Notice | None, line: str) -> None:
            if ended.is_set():
                return
            if line:
                self._log(line)
            if notice is not None:
                tell(notice)

        def work() -> None:
            while not ended.is_set():
                notice, line = self.look()
                if notice is not None or line:
                    try:
                        loop.call_soon_threadsafe(deliver, notice, line)
                    except RuntimeError:  # the loop is closed
                        return
                ended.wait(min(MOST_PAUSE_S, self._every_s * (1 + self._failures)))

        # Not in a thread pool: at exit, the interpreter would wait for a pending DNS lookup.
        threading.Thread(target=work, name="edl-notices", daemon=True).start()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def look(self) -> tuple[Notice | None, str]:
        """Poll once; returns a notice that has not been reported yet, and a log line about the service or an empty
        string. Blocks for up to ``ANSWER_S`` per request."""
        try:
            notice = self._looker.look(self._ask, self._wall_clock_s())
        except Exception as error:  # noqa: BLE001 - the thread must survive: the next answer may be a notice
            self._failures += 1
            why = f"cannot read notices from the {self._name} metadata service: {str(error) or type(error).__name__}"
            return None, f"{why} (polling and training continue)" if self._failures == 1 else ""
        said = f"the {self._name} metadata service answers again" if self._failures else ""
        self._failures = 0
        key = (notice.reason, notice.at_s) if notice is not None else None
        if key is None or key == self._reported:
            return None, said
        self._reported = key
        return notice, said


def poller_of(wanted: NoticeSettings | None, log: Callable[[str], None]) -> Poller | None:
    """The poller for these settings; None without them."""
    if wanted is None:
        return None
    provider = PROVIDERS[wanted.provider]
    return Poller(wanted.provider, provider.make(), asker(wanted.base), provider.every_s, wall_clock_s, log)
