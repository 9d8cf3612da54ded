"""The HTTP interface: what each address does, and every code it may answer with."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from edl.errors import FencedOut
from edl.web.routes import ROUTES, Route
from edl.web.settings import HttpLimits
from edl.wire.purpose import Purpose
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Resize, SetBounds, Suspend
from tests.support.fake_master import JOB
from tests.support.web_fixture import TOKEN, Setup, head, play

JOB_PATH = f"/v1/jobs/{JOB}"
MERGE = {"Content-Type": "application/merge-patch+json"}


def test_the_size_is_read_and_written_as_a_scale() -> None:
    async def scenario(on: Setup) -> None:
        read = await on.ask("GET", "JOB/scale")
        assert (read.code, read.json["spec"], read.json["status"]["replicas"]) == (200, {"replicas": 3}, 3)
        scale = read.json
        scale["spec"]["replicas"] = 4
        written = await on.ask("PUT", "JOB/scale", {**scale, "reason": "more\ndata", "requester": "kim"})
        assert written.code == 202
        assert written.json["spec"]["replicas"] == 4
        assert written.json["metadata"]["resourceVersion"] == "43"
        assert written.json["status"]["observedGeneration"] == written.json["metadata"]["generation"] == 2
        assert on.master.requests == [Resize(4, "kim (HTTP, 127.0.0.1)", "more data", 40)]
        assert (await on.ask("PUT", "JOB/scale", scale)).code == 409, "it has changed since it was read"
        assert (await on.ask("PATCH", "JOB/scale", {"spec": {"replicas": 4}})).code == 200, "so it is already"

    play(scenario)


def test_a_part_of_a_scale_changes_that_part() -> None:
    async def scenario(on: Setup) -> None:
        patched = await on.ask("PATCH", "JOB/scale", json.dumps({"spec": {"replicas": 2}}), headers=MERGE)
        assert (patched.code, patched.json["spec"]["replicas"]) == (202, 2)
        assert (await on.ask("PATCH", "JOB/scale", {})).code == 200
        assert (await on.ask("PATCH", "JOB/scale", {"metadata": {"resourceVersion": "43"}})).code == 200
        stale = await on.ask("PATCH", "JOB/scale", {"metadata": {"resourceVersion": "40"}})
        assert (stale.code, stale.json["reason"]) == (409, "Conflict")
        assert len(on.master.requests) == 1
        key = {"spec": {"replicas": 1}, "idempotencyKey": "k1"}
        assert (await on.ask("PATCH", "JOB/scale", key)).code == 202
        assert (await on.ask("PATCH", "JOB/scale", {**key, "spec": {"replicas": 4}})).json["spec"]["replicas"] == 1

    play(scenario)


def test_every_request_reaches_the_master() -> None:
    async def scenario(on: Setup) -> None:
        by = "HTTP, 127.0.0.1"
        bounds = {"minimum": 2, "maximum": 6, "resourceVersion": "40"}
        drain = {"nodes": ["node-c", "node-c"], "deadlineSeconds": 30, "checkpoint": "must", "reason": "disk"}
        assert (await on.ask("PUT", "JOB/bounds", bounds)).code == 202
        assert (await on.ask("POST", "JOB/drain", drain)).code == 202
        assert (await on.ask("POST", "JOB/nodes/node-b/cordon", {"reason": "hot", "device": "GPU-1"})).code == 202
        assert (await on.ask("POST", "JOB/nodes/node-b/cordon")).code == 200
        assert (await on.ask("POST", "JOB/nodes/node-b/uncordon")).code == 202
        taken = await on.ask("POST", "JOB/suspend", {"requester": "kim"})
        assert (taken.code, taken.json["status"], taken.json["details"]) == (202, "Success", {"generation": 6})
        assert (await on.ask("POST", "JOB/resume")).code == 202
        assert on.master.requests == [
            SetBounds(2, 6, by, "", 40),
            Drain(("node-c",), by, "disk", 30.0, DrainMode.MUST),
            Cordon("node-b", True, by, "hot", "GPU-1"),
            Cordon("node-b", True, by),
            Cordon("node-b", False, by),
            Suspend(True, f"kim ({by})"),
            Suspend(False, by),
        ]
        assert (await on.ask("POST", "JOB/checkpoint", {"reason": "now"})).code == 202
        assert (await on.ask("POST", "JOB/stop")).code == 202
        assert [(one.purpose, one.by) for one in on.master.asked] == [(Purpose.SAVE, f"{by}: now"), (Purpose.KILL, by)]

    play(scenario)


def test_files_for_a_data_set_reach_its_service() -> None:
    async def scenario(on: Setup) -> None:
        added = await on.ask(
            "POST", "JOB/data/train/files", {"files": ["/data/*"], "when": "next-epoch", "reason": "17"}
        )
        assert (added.code, added.json["message"]) == (202, "order 1 for data train: a worker will scan 1 pattern")
        (asked,) = on.master.asked
        assert (asked.purpose, asked.by) == (Purpose.DATA, "HTTP, 127.0.0.1: 17")
        assert json.loads(asked.argument) == {"dataset": "train", "files": ["/data/*"], "when": "next-epoch"}
        unknown = await on.ask("POST", "JOB/data/nothing/files", {"files": ["x"]})
        assert unknown.code == 422 and "it has train" in unknown.json["message"]
        refused: list[dict[str, Any]] = [{}, {"files": []}, {"files": ["x"], "when": "later"}, {"files": [7]}]
        for body in refused:
            assert (await on.ask("POST", "JOB/data/train/files", body)).code == 400
        assert (await on.ask("POST", "JOB/data/a%20b/files", {"files": ["x"]})).code == 404

    play(scenario)


def test_the_job_with_its_conditions() -> None:
    async def scenario(on: Setup) -> None:
        job = (await on.ask("GET", "JOB")).json
        holds = {one["type"]: one["status"] for one in job["status"]["conditions"]}
        assert holds == {
            "Available": "True",
            "Progressing": "False",
            "Suspended": "False",
            "Degraded": "False",
            "Stopping": "False",
            "Ended": "False",
        }
        assert [node["name"] for node in job["status"]["nodes"]] == on.master.names
        assert job["status"]["checkpoint"] == {"commit": 120, "era": 2, "where": "/ckpt/commit-120"}

    play(scenario)


REFUSED: list[tuple[int, str, str, object, dict[str, str]]] = [
    (422, "PUT", "JOB/scale", {"spec": {"replicas": 9}}, {}),
    (422, "PUT", "JOB/scale", {"spec": {}}, {}),
    (422, "PUT", "JOB/scale", {"metadata": {"name": "other"}, "spec": {"replicas": 2}}, {}),
    (422, "PUT", "JOB/bounds", {"minimum": 3, "maximum": 2}, {}),
    (409, "PUT", "JOB/bounds", {"minimum": 1, "maximum": 2, "resourceVersion": "7"}, {}),
    (404, "POST", "JOB/drain", {"nodes": ["nobody"]}, {}),
    (404, "POST", "JOB/nodes/nobody/cordon", None, {}),
    (404, "POST", "JOB/nodes/no%20body/cordon", None, {}),
    (404, "GET", "/v1/jobs/other/scale", None, {}),
    (404, "GET", "/v1/jobs/other", None, {}),
    (404, "GET", "/v1", None, {}),
    (404, "GET", "/assets/no.js", None, {}),
    (404, "GET", "/assets/..%2Fserver.py", None, {}),
    (405, "POST", "/dashboard", None, {}),
    (422, "GET", "JOB/events?follow=true&last=3", None, {}),
    (404, "GET", "JOB/scale/", None, {}),
    (405, "DELETE", "JOB/scale", None, {}),
    (405, "GET", "JOB/stop", None, {}),
    (400, "PUT", "JOB/scale", {"spec": {"replica": 2}}, {}),
    (400, "PUT", "JOB/scale", {"spec": {"replicas": "2"}}, {}),
    (400, "PUT", "JOB/scale", {"spec": {"replicas": 2.5}}, {}),
    (400, "PUT", "JOB/scale", {"spec": {"replicas": True}}, {}),
    (400, "PUT", "JOB/scale", {"spec": {"replicas": -1}}, {}),
    (400, "PUT", "JOB/scale", {"spec": {"replicas": 10**30}}, {}),
    (400, "PUT", "JOB/scale", {"kind": "Deployment", "spec": {"replicas": 2}}, {}),
    (400, "PUT", "JOB/scale", {"metadata": {"resourceVersion": "new"}, "spec": {"replicas": 2}}, {}),
    (400, "PUT", "JOB/scale", {"spec": {"replicas": 2}, "reason": "\ud800"}, {}),
    (400, "PUT", "JOB/scale", [], {}),
    (400, "PUT", "JOB/scale", None, {}),
    (400, "PUT", "JOB/scale", "{", {"Content-Type": "application/json"}),
    (400, "PUT", "JOB/scale", "NaN", {"Content-Type": "application/json"}),
    (400, "PUT", "JOB/scale", b"\xff\xfe", {"Content-Type": "application/json"}),
    (400, "PUT", "JOB/scale", "[" * 100_000, {"Content-Type": "application/json"}),
    (400, "PUT", "JOB/scale", "9" * 5000, {"Content-Type": "application/json"}),
    (400, "POST", "JOB/drain", {"nodes": []}, {}),
    (400, "POST", "JOB/drain", {"nodes": ["a b"]}, {}),
    (400, "POST", "JOB/drain", {"nodes": ["a"], "checkpoint": "maybe"}, {}),
    (400, "GET", "JOB/events?after=x", None, {}),
    (400, "GET", "JOB/events?after=1&after=2", None, {}),
    (400, "GET", "JOB/events?follow=1", None, {}),
    (415, "PUT", "JOB/scale", "spec: {replicas: 2}", {"Content-Type": "application/yaml"}),
    (415, "PUT", "JOB/scale", "{}", MERGE),
    (415, "PATCH", "JOB/scale", "[]", {"Content-Type": "application/json-patch+json"}),
    (415, "PATCH", "JOB/scale", b"{}", {}),
    (415, "PATCH", "JOB/scale", "{}", {"Content-Type": "application/json; charset=latin-1"}),
    (415, "PATCH", "JOB/scale", b"x", {"Content-Type": "application/json", "Content-Encoding": "gzip"}),
]


def test_what_is_refused_is_refused_with_its_reason() -> None:
    async def scenario(on: Setup) -> None:
        before = on.master.scale
        for code, method, path, body, headers in REFUSED:
            reply = await on.ask(method, path, body, headers=headers)
            assert (reply.code, reply.json["kind"], reply.json["status"], reply.json["code"]) == (
                code,
                "Status",
                "Failure",
                code,
            ), f"{method} {path} {body!r}: {reply.text}"
            assert len(reply.json["message"]) < 400
            assert code != 405 or reply.headers["Allow"]
        assert on.master.scale == before
        on.master.scale = type(before)(**{**{n: getattr(before, n) for n in before.__slots__}, "suspended": True})
        assert (await on.ask("POST", "JOB/checkpoint")).code == 422

    assert play(scenario).log[1:] == [], "nothing of it is a defect"


def test_addresses_in_other_forms() -> None:
    async def scenario(on: Setup) -> None:
        for method, path, code in (
            ("OPTIONS", "*", 404),
            ("GET", f"http://other{JOB_PATH}/scale", 200),
            ("GET", f"/{JOB_PATH}/scale", 404),
            ("GET", f"{JOB_PATH}/./scale", 404),
            ("GET", f"{JOB_PATH}%2Fscale", 404),
            ("GET", "/v1/jobs/tr%61in/scale", 200),
            ("POST", "/healthz", 405),
            ("TRACE", f"{JOB_PATH}/scale", 405),
        ):
            reader, writer = await on.raw(head(method, path, "Connection: close"))
            answer = await reader.read()
            assert f" {code} " in answer.splitlines()[0].decode(), f"{method} {path}: {answer!r}"
            writer.close()

    assert len(play(scenario).log) == 1, "nothing of it is a defect"


def test_another_launcher_rules() -> None:
    async def scenario(on: Setup) -> None:
        on.url = "https://10.0.0.7:8443"
        reply = await on.ask("PUT", "JOB/scale?dry=1", {"spec": {"replicas": 2}})
        assert (reply.code, reply.headers["Location"]) == (307, f"https://10.0.0.7:8443/v1/jobs/{JOB}/scale?dry=1")
        assert (await on.ask("GET", "JOB/scale", token=None)).code == 401, "where it is, only those learn who may ask"
        assert (await on.ask("GET", "/openapi.json")).code == 200
        assert (await on.ask("GET", "/readyz", token=None)).code == 200

    play(scenario, rules=False)


def test_nobody_rules() -> None:
    async def scenario(on: Setup) -> None:
        for url in (None, "", on.web.url):
            on.url = url
            reply = await on.ask("GET", "JOB/scale")
            assert (reply.code, reply.headers["Retry-After"], reply.json["reason"]) == (503, "1", "ServiceUnavailable")
            ready = (await on.ask("GET", "/readyz", token=None)).code
            assert ready == (503 if url is None else 200), "a Master without HTTP is known as well"
        assert (await on.ask("GET", "/healthz", token=None)).code == 200
        on.master.serving = False
        on.web.use_master(on.master)
        assert (await on.ask("GET", "JOB/scale")).code == 503, "elected, but it has not taken over yet"

    play(scenario, rules=False)


def test_a_request_that_the_store_does_not_take_is_left_to_its_fate() -> None:
    async def scenario(on: Setup) -> None:
        on.master.store.clear()
        reply = await on.ask("PUT", "JOB/scale", {"spec": {"replicas": 2}})
        assert (reply.code, reply.headers["Retry-After"]) == (503, "1")
        on.master.store.set()
        await asyncio.sleep(0)
        assert (await on.ask("GET", "JOB/scale")).json["spec"]["replicas"] == 2, "it is in the Master's hands"

    play(scenario, limits=HttpLimits(master_s=0.05))


@pytest.mark.parametrize("what", ["checkpoint", "stop"])
def test_a_switch_that_is_not_in_the_store_is_not_accepted(what: str) -> None:
    async def scenario(on: Setup) -> None:
        on.master.store.clear()
        assert (await on.ask("POST", f"JOB/{what}", {})).code == 503
        on.master.store.set()
        assert (await on.ask("POST", f"JOB/{what}", {})).code == 202

        async def fenced(request: object) -> None:
            raise FencedOut("another Master has been elected")

        on.master.ask = fenced  # type: ignore[assignment, method-assign]
        assert (await on.ask("POST", f"JOB/{what}", {})).code == 503

    play(scenario, limits=HttpLimits(master_s=0.05))


def test_requests_do_not_heap_up_while_the_store_is_away() -> None:
    async def scenario(on: Setup) -> None:
        on.master.store.clear()
        for nodes in (1, 2, 3):
            assert (await on.ask("PUT", "JOB/scale", {"spec": {"replicas": nodes}})).code == 503
        assert [request.nodes for request in on.master.requests if isinstance(request, Resize)] == [1, 2]
        on.master.store.set()
        await asyncio.sleep(0.01)
        assert (await on.ask("PUT", "JOB/scale", {"spec": {"replicas": 3}})).code == 202

    play(scenario, limits=HttpLimits(master_s=0.05, asking=2))


def test_the_master_is_replaced_meanwhile() -> None:
    async def scenario(on: Setup) -> None:
        async def fenced(request: object) -> None:
            raise FencedOut("another Master has been elected")

        on.master.submit = fenced  # type: ignore[assignment, method-assign]
        assert (await on.ask("PUT", "JOB/scale", {"spec": {"replicas": 2}})).code == 503

    play(scenario)


def test_a_defect_is_logged_and_not_shown() -> None:
    async def scenario(on: Setup) -> None:
        on.master.defect = RuntimeError("in the engine room")
        reply = await on.ask("GET", "JOB/scale")
        assert reply.code == 500 and "engine" not in reply.text and "Traceback" not in reply.text
        on.master.defect = None
        assert (await on.ask("GET", "JOB/scale")).code == 200

    log = "\n".join(play(scenario).log)
    assert "in the engine room" in log and TOKEN not in log


def test_what_is_no_http_is_answered_in_short_and_not_logged() -> None:
    async def scenario(on: Setup) -> None:
        for sent in (b"\x16\x03\x01 hello\r\n\r\n", b"GET\r\n\r\n", head("GET", "JOB/scale", "X: " + "y" * 20_000)):
            reader, writer = await on.raw(sent)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.") and b" 400 " in answer.splitlines()[0]
            assert b"Traceback" not in answer
            writer.close()

    assert len(play(scenario).log) == 1


def test_the_history() -> None:
    async def scenario(on: Setup) -> None:
        on.master.note("node-joined", "b")
        reply = await on.ask("GET", "JOB/events")
        assert reply.headers["Content-Type"].startswith("application/x-ndjson")
        assert [json.loads(line)["number"] for line in reply.text.splitlines()] == [1, 2]
        later = await on.ask("GET", "JOB/events?after=1")
        assert [json.loads(line)["text"] for line in later.text.splitlines()] == ["b"]
        accept = {"Accept": "text/event-stream"}
        stream = await on.ask("GET", "JOB/events", headers={**accept, "Last-Event-ID": "1"})
        assert re.fullmatch(r"id: 2\nevent: node-joined\ndata: \{.*\}\n\n", stream.text)

    play(scenario)


def test_the_history_as_it_happens() -> None:
    async def scenario(on: Setup) -> None:
        on.master.endless = True
        where = f"{on.web.url}/v1/jobs/{JOB}/events?follow=true"
        async with on.session.get(where, headers={"Authorization": f"Bearer {TOKEN}"}) as stream:
            assert json.loads(await stream.content.readline())["number"] == 1
            on.master.note("scale", "two")
            while not (line := (await stream.content.readline()).strip()):
                pass  # a sign of life
            assert json.loads(line)["text"] == "two"
            on.master.close()
            assert await stream.content.read() in (b"", b"\n"), "it ends with the Master"

    play(scenario, limits=HttpLimits(heartbeat_s=0.01))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.name}")
def test_without_a_token_nothing_is_readable(route: Route) -> None:
    path = route.path.format(job=JOB, node="node-a", dataset="train")

    async def scenario(on: Setup) -> None:
        on.url = "http://10.0.0.7:1"
        for rules in (True, False):
            on.web.use_master(on.master if rules else None)
            for headers in ({}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer"}):
                reply = await on.ask(route.method, path, token=None, headers=headers)
                if route.public:
                    assert (reply.code, reply.text) == (200, "ok\n")
                else:
                    assert reply.code == 401 and reply.headers["WWW-Authenticate"].startswith("Bearer")
                    assert "Location" not in reply.headers and "10.0.0" not in reply.text
            wrong = await on.ask(route.method, path, token="the-token-of-the-jo")
            assert wrong.code == (200 if route.public else 401)
            assert route.public or "unknown token" in wrong.text
        assert on.master.requests == [] and on.master.asked == []

    assert TOKEN not in "\n".join(play(scenario).log)
