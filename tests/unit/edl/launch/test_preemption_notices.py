"""Notices of preemption: what bodies mean, who is asked what, and a service that fails."""

from __future__ import annotations

import asyncio
import calendar
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from edl.launch import preemption_notices
from edl.launch.preemption_notices import (
    PROVIDERS,
    BadAnswer,
    Notice,
    Poller,
    Reply,
    asker,
    read_aws,
    read_azure,
    read_gce_maintenance,
    read_gce_preempted,
)

AT = calendar.timegm((2026, 11, 22, 8, 0, 0))
NOW = AT - 120.0


def azure(*events: dict[str, Any]) -> Reply:
    return Reply(200, json.dumps({"DocumentIncarnation": 1, "Events": list(events)}))


def event(kind: str = "Preempt", at: str = "Sun, 22 Nov 2026 08:00:00 GMT", *machines: str) -> dict[str, Any]:
    names = list(machines) or ["WestNO_0"]
    return {"EventId": "1", "EventType": kind, "Resources": names, "EventStatus": "Scheduled", "NotBefore": at}


@pytest.mark.parametrize(
    ("status", "body", "lead_s"),
    [
        (404, "", None),
        (404, "<html>no such thing</html>", None),
        (200, '{"action": "terminate", "time": "2026-11-22T08:00:00Z"}', 120.0),
        (200, '{"action": "stop", "time": "2026-11-22T08:00:00+00:00"}', 120.0),
        (200, '{"action": "hibernate", "time": "2026-11-22T07:00:00Z"}', 1.0),
    ],
)
def test_aws(status: int, body: str, lead_s: float | None) -> None:
    found = read_aws(Reply(status, body), NOW)
    assert (found and found.lead_s) == lead_s


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, ""),
        Reply(200, "[]"),
        Reply(200, "{}"),
        Reply(200, '{"action": "stop"}'),
        Reply(200, '{"action": "stop", "time": 7}'),
        Reply(200, '{"action": "stop", "time": "soon"}'),
        Reply(401, ""),
        Reply(500, "oops"),
    ],
)
def test_aws_nonsense(reply: Reply) -> None:
    with pytest.raises(BadAnswer):
        read_aws(reply, NOW)


def test_gce() -> None:
    assert read_gce_preempted(Reply(200, "FALSE"), NOW) is None
    assert read_gce_preempted(Reply(200, "TRUE\n"), NOW) == Notice("GCE: the instance is being preempted", 0.0, 30.0)
    assert read_gce_maintenance(Reply(200, "NONE"), NOW) is None
    assert read_gce_maintenance(Reply(200, "MIGRATE_ON_HOST_MAINTENANCE"), NOW) is None, "it goes on elsewhere"
    ends = read_gce_maintenance(Reply(200, "TERMINATE_ON_HOST_MAINTENANCE"), NOW)
    assert ends is not None and ends.lead_s == 60.0
    for reply in (Reply(403, ""), Reply(200, "<html>")):
        with pytest.raises(BadAnswer):
            read_gce_preempted(reply, NOW)


@pytest.mark.parametrize(
    ("reply", "lead_s"),
    [
        (azure(), None),
        (azure(event()), 120.0),
        (azure(event("Terminate")), 120.0),
        (azure(event("Redeploy", "2026-11-22T08:00:00Z")), 120.0),
        (azure(event("Preempt", "")), 0.0),
        (azure(event("Freeze")), None),
        (azure(event("Preempt", "Sun, 22 Nov 2026 08:00:00 GMT", "another_1")), None),
        (azure(event("Preempt", "Sun, 22 Nov 2026 08:00:00 GMT", "another_1", "westno_0")), 120.0),
        (azure(event("Terminate"), event("Preempt", "Sun, 22 Nov 2026 07:59:00 GMT")), 60.0),
        (azure({"EventType": "Preempt"}, {"EventType": 1, "Resources": 2}), None),
    ],
)
def test_azure(reply: Reply, lead_s: float | None) -> None:
    found = read_azure(reply, "WestNO_0", NOW)
    assert (found.lead_s if found is not None else None) == lead_s


@pytest.mark.parametrize(
    "reply",
    [Reply(400, ""), Reply(200, "{}"), Reply(200, '{"Events": [1]}'), Reply(200, "x"), azure(event("Preempt", "soon"))],
)
def test_azure_nonsense(reply: Reply) -> None:
    with pytest.raises(BadAnswer):
        read_azure(reply, "WestNO_0", NOW)


class Service(ThreadingHTTPServer):
    """A metadata service on this host."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.expired = ""
        """A token that it does not take any more."""
        self.date = ""
        """Its time; empty: it does not say."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Service)
        self.server.asked.append(
            (self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        )
        status, body = self.server.answers.get(self.path, (404, ""))
        if self.server.expired and self.server.expired in self.headers.values():
            status = 401
        self.send_response_only(status)
        if self.server.date:
            self.send_header("Date", self.server.date)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_PUT = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def poller(name: str, service: Service, said: list[str]) -> Poller:
    return Poller(name, PROVIDERS[name].make(), asker(service.url), 0.01, lambda: NOW, said.append)


ACTION = "/latest/meta-data/spot/instance-action"


def test_aws_gets_a_token_first_and_another_when_it_has_expired(service: Service) -> None:
    said: list[str] = []
    looks = poller("aws", service, said)
    service.answers["/latest/api/token"] = (200, "one")
    assert looks.look() == (None, "")
    assert [(method, path) for method, path, _ in service.asked] == [("PUT", "/latest/api/token"), ("GET", ACTION)]
    assert service.asked[0][2]["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
    assert service.asked[1][2]["x-aws-ec2-metadata-token"] == "one"
    service.expired = "one"
    service.answers |= {
        ACTION: (200, '{"action": "terminate", "time": "2026-11-22T08:00:00Z"}'),
        "/latest/api/token": (200, "two"),
    }
    notice, text = looks.look()
    assert notice == Notice("AWS: spot instance-action terminate at 2026-11-22T08:00:00Z", AT, 120.0)
    assert text == "", "nobody has to know"
    assert service.asked[-1][2]["x-aws-ec2-metadata-token"] == "two"
    assert looks.look() == (None, ""), "told once"
    assert not any("rebalance" in path for _, path, _ in service.asked)
    service.answers[ACTION] = (401, "")
    assert (
        looks.look()[1]
        == "cannot read notices from the aws metadata service: status 401 (polling and training continue)"
    )


@pytest.mark.parametrize(
    ("date", "lead_s"),
    [
        ("Sun, 22 Nov 2026 07:59:00 GMT", 60.0),  # this host is a minute behind
        ("Sun, 22 Nov 2026 07:00:00 GMT", 3600.0),
        ("", 120.0),
        ("yesterday", 120.0),
    ],
)
@pytest.mark.parametrize("name", ["aws", "azure"])
def test_the_time_left_is_counted_by_the_clock_that_the_notice_is_from(
    service: Service, name: str, date: str, lead_s: float
) -> None:
    """That of this host may have been set back or forward."""
    service.date = date
    service.answers |= {
        "/latest/api/token": (200, "one"),
        ACTION: (200, '{"action": "terminate", "time": "2026-11-22T08:00:00Z"}'),
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text": (200, "WestNO_0"),
        "/metadata/scheduledevents?api-version=2020-07-01": (200, azure(event()).body),
    }
    notice, _ = poller(name, service, []).look()
    assert notice is not None
    assert (notice.at_s, notice.lead_s) == (AT, lead_s)


def test_gce_and_azure_want_their_headers(service: Service) -> None:
    folder = "/computeMetadata/v1/instance"
    service.answers |= {f"{folder}/preempted": (200, "FALSE"), f"{folder}/maintenance-event": (200, "NONE")}
    assert poller("gce", service, []).look() == (None, "")
    assert [headers["metadata-flavor"] for _, _, headers in service.asked] == ["Google", "Google"]
    service.asked.clear()
    name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    events = "/metadata/scheduledevents?api-version=2020-07-01"
    service.answers |= {name: (200, "WestNO_0"), events: (200, azure(event()).body)}
    looks = poller("azure", service, [])
    found = looks.look()[0]
    assert found is not None and found.reason.startswith("Azure: scheduled event Preempt, not before")
    looks.look()
    assert [(path, headers["metadata"]) for _, path, headers in service.asked] == [
        (name, "true"),
        (events, "true"),
        (events, "true"),
    ]


def test_a_service_that_fails_is_named_once(service: Service) -> None:
    folder, said = "/computeMetadata/v1/instance", list[str]()
    looks = poller("gce", service, said)
    texts = [looks.look()[1] for _ in range(3)]
    assert texts == [
        "cannot read notices from the gce metadata service: status 404 (polling and training continue)",
        "",
        "",
    ]
    service.answers[f"{folder}/preempted"] = (302, "")
    assert looks.look() == (None, ""), "nobody is followed"
    assert not any(path == "/elsewhere" for _, path, _ in service.asked)
    service.answers[f"{folder}/preempted"] = (200, "T" * 1_000_000)
    assert looks.look() == (None, "")


def test_an_answer_that_breaks_off_counts_by_its_status(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_off(self: _Handler) -> None:
        self.send_response(404)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"ff\r\nno such")

    looks = poller("aws", service, [])
    service.answers["/latest/api/token"] = (200, "one")
    looks.look()
    monkeypatch.setattr(_Handler, "do_GET", broken_off)
    assert looks.look() == (None, ""), "404: there is no notice"


def test_it_goes_on_whatever_an_answer_does(service: Service) -> None:
    told: list[Notice] = []

    class Odd:
        def __init__(self) -> None:
            self.looks = 0

        def look(self, ask: Callable[..., Reply], now_s: float) -> Notice | None:
            self.looks += 1
            if self.looks == 1:
                raise RecursionError("an answer of 60,000 brackets")
            return Notice("at last", 0.0, 0.0)

    async def scenario() -> None:
        heard: asyncio.Queue[Notice] = asyncio.Queue()
        said: list[str] = []
        looks = Poller("odd", Odd(), asker(service.url), 0.01, lambda: NOW, said.append)  # type: ignore[arg-type]
        task = asyncio.ensure_future(looks.run(heard.put_nowait))
        told.append(await asyncio.wait_for(heard.get(), 60))
        task.cancel()
        assert "60,000 brackets" in said[0]

    asyncio.run(scenario())
    assert told == [Notice("at last", 0.0, 0.0)]


def test_nobody_listens_and_proxies_are_not_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", service.url)
    monkeypatch.setenv("no_proxy", "")
    looks = Poller("gce", PROVIDERS["gce"].make(), asker("http://127.0.0.1:9"), 1.0, lambda: NOW, print)
    assert "cannot read notices" in looks.look()[1]
    assert service.asked == []


def test_it_runs_beside_everything_else_until_it_is_ended(service: Service) -> None:
    folder, said = "/computeMetadata/v1/instance", list[str]()
    service.answers |= {f"{folder}/preempted": (200, "TRUE"), f"{folder}/maintenance-event": (200, "NONE")}

    async def scenario() -> Notice:
        told: asyncio.Queue[Notice] = asyncio.Queue()
        task = asyncio.ensure_future(poller("gce", service, said).run(told.put_nowait))
        notice = await asyncio.wait_for(told.get(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return notice

    assert asyncio.run(scenario()).lead_s == 30.0


def test_a_service_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Hangs:
        def look(self, ask: Callable[..., Reply], now_s: float) -> Notice | None:
            asked.set()
            go_on.wait(30)
            return Notice("too late", 0.0, 0.0)

    told: list[Notice] = []

    async def scenario() -> None:
        looks = Poller("gce", Hangs(), asker("http://h"), 0.01, lambda: NOW, print)  # type: ignore[arg-type]
        task = asyncio.ensure_future(looks.run(told.append))
        await asyncio.to_thread(asked.wait, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    go_on.set()
    assert told == []
    assert preemption_notices.ANSWER_S <= 2.0
