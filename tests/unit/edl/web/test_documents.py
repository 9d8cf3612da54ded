"""Bodies, documents and conditions, without a server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from edl.web import bodies, documents, openapi
from edl.web.conditions import TYPES, Condition, conditions
from edl.web.refusal import REASONS, Refusal
from edl.web.routes import ROUTES
from edl.wire import json_messages
from edl.wire.scale_requests import ScaleView, Verdict
from edl.wire.status import HistoryEntry, JobStatus
from tests.support.fake_master import FakeMaster

STATUS = FakeMaster().status()


def holds(found: tuple[Condition, ...]) -> set[str]:
    return {one.kind for one in found if one.holds}


def changed(status: JobStatus = STATUS, **fields: object) -> JobStatus:
    return dataclasses.replace(status, **fields)  # type: ignore[arg-type]


def scaled(**fields: object) -> JobStatus:
    scale = dataclasses.replace(STATUS.scale, **fields)  # type: ignore[arg-type]
    return changed(scale=scale)


@pytest.mark.parametrize(
    ("status", "expected", "reason"),
    [
        (STATUS, {"Available"}, ("Progressing", "AsRequested")),
        (scaled(generation=5), {"Available", "Progressing"}, ("Progressing", "Resizing")),
        (scaled(waiting="1 node"), {"Available", "Progressing"}, ("Progressing", "Waiting")),
        (changed(boundary="switch"), {"Available", "Progressing"}, ("Progressing", "AtBoundary")),
        (scaled(desired=4, asked=4), {"Available", "Degraded"}, ("Degraded", "FewerNodes")),
        (scaled(desired=4), {"Available"}, ("Degraded", "AllNodes")),  # as many as there are
        (changed(flaws=("a shard",)), {"Available", "Degraded"}, ("Degraded", "Incomplete")),
        (changed(phase="forming", world_size=0), {"Progressing", "Degraded"}, ("Available", "NoWorld")),
        (changed(kill="kim"), {"Available", "Stopping"}, ("Stopping", "Asked")),
        (changed(phase="ended"), {"Ended"}, ("Available", "Ended")),
        (
            dataclasses.replace(scaled(suspended=True, reason="night"), phase="forming"),
            {"Suspended"},
            ("Suspended", "Suspended"),
        ),
        (changed(scale=ScaleView()), {"Available"}, ("Degraded", "AllNodes")),
    ],
)
def test_conditions(status: JobStatus, expected: set[str], reason: tuple[str, str]) -> None:
    found = conditions(status, status.history)
    assert tuple(one.kind for one in found) == TYPES
    assert holds(found) == expected
    assert (reason[0], reason[1]) in {(one.kind, one.reason) for one in found}


def line(number: int, kind: str, text: str = "") -> HistoryEntry:
    return HistoryEntry(number, 1000.0 + number, kind, text)


def since(status: JobStatus, *history: HistoryEntry) -> dict[str, float]:
    return {one.kind: one.since_s - 1000 for one in conditions(status, history)}


def test_since_when_a_condition_holds_is_read_from_the_history() -> None:
    history = [line(1, "node-joined"), line(2, "world-formed"), line(3, "world-formed"), line(4, "node-joined")]
    assert since(STATUS, *history)["Available"] == 2, "a change of the world at a boundary interrupts nothing"
    history += [line(5, "world-stopped"), line(6, "world-formed"), line(7, "state")]
    assert since(STATUS, *history)["Available"] == 6
    asleep = changed(scaled(suspended=True), phase="forming")
    rest = [line(8, "scale", "job suspended by kim"), line(9, "world-stopped"), line(10, "scale", "x")]
    assert since(asleep, *history, *rest)["Suspended"] == 8
    assert since(asleep, *history, *rest)["Available"] == 9
    assert since(STATUS, *history, *rest, line(11, "scale", "job resumed by kim"))["Suspended"] == 11
    assert since(changed(phase="ended"), line(4, "world-formed"), line(5, "job-ended"))["Ended"] == 5


def test_a_job_that_waits_or_sleeps_is_unavailable_since_then() -> None:
    """A lost node stops the world without a line of its own about that."""
    waits = changed(phase="forming", world_size=0)
    lost = [line(1, "world-formed"), line(2, "node-lost"), line(3, "waiting", "0 nodes ready"), line(4, "alarm")]
    assert since(waits, *lost)["Available"] == 3
    assert since(STATUS, *lost, line(5, "world-formed"))["Available"] == 5
    asleep = changed(scaled(suspended=True), phase="forming", world_size=0)
    rest = [line(1, "world-formed"), line(2, "scale", "job suspended by kim"), line(3, "boundary", "suspended by kim")]
    rest += [line(4, "scale", "the job is suspended, as requested by kim"), line(5, "state")]
    assert (since(asleep, *rest)["Available"], since(asleep, *rest)["Progressing"]) == (4, 4)
    assert since(asleep, *rest)["Degraded"] == 1, "it never was"


def test_a_node_that_returns_begins_a_change_like_a_new_one() -> None:
    moving = scaled(generation=5)
    for kind in ("node-joined", "node-returned"):
        assert since(moving, line(1, "world-formed"), line(2, kind), line(3, "state"))["Progressing"] == 2


def test_a_history_that_is_cut_off_gives_its_oldest_line() -> None:
    assert since(STATUS, line(300, "state"), line(301, "state"))["Available"] == 300
    assert since(STATUS, line(300, "world-stopped"))["Available"] == 300, "newer than what was written down"
    assert {one.since_s for one in conditions(STATUS, ())} == {0.0}


def test_times_are_written_as_kubernetes_writes_them() -> None:
    assert documents.stamp(1.8e9) == "2027-01-15T08:00:00Z"
    assert documents.stamp(-5.0) == documents.stamp(1e300) == "1970-01-01T00:00:00Z"


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_what_people_write_stays_on_one_line() -> None:
    assert bodies.words("a\r\n[edl] b\x1b[31m\u2028c\x00") == "a [edl] b [31m c"
    assert len(bodies.words("x" * 10_000)) == bodies.MOST_SHOWN


def test_a_scale_that_was_read_can_be_written_back() -> None:
    read = json_messages.encode(documents.scale_of(STATUS))
    request = bodies.put_scale(bodies.parse(bodies.ScaleBody, read), STATUS, "me")
    assert (request.nodes, request.revision) == (3, 40)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1,]", "Infinity", "-NaN", "\x00", '"\\u"', "[" * 10_000, "1" * 5000, '{"reason":"\\ud800"}'),
        *('{"status":{"a":NaN}}', '{"spec":{"replicas":2.0},"reason":"\\ud800"}', "\udcff"),
    ],
)
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(Refusal) as refusal:
        bodies.parse(bodies.ScalePatchBody, text.encode(errors="surrogateescape"))
    assert refusal.value.code == 400
    assert len(refusal.value.message) < 300


def test_numbers_are_what_json_schema_takes_for_numbers() -> None:
    for good in ("0", "5", "2.0", "2e3"):
        body = bodies.parse(bodies.BoundsBody, b'{"minimum":%b,"maximum":5}' % good.encode())
        assert (type(body.minimum), body.minimum) == (int, float(good))
    for bad in ("true", '"1"', "1.5", "-1", "null", "1e400", str(10**400), "2147483648"):
        with pytest.raises(Refusal, match="minimum"):
            bodies.parse(bodies.BoundsBody, b'{"minimum":%b,"maximum":5}' % bad.encode())


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (bodies.ScaleBody, '{"spec":{"replicas":"two"}}', r"spec\.replicas=two: Expected `int`, got `str`"),
        (bodies.ScaleBody, '{"spec":{"replica":2}}', r"spec={'replica': 2}: Object contains unknown field `replica`"),
        (bodies.ScaleBody, "{}", "required field `spec`"),
        (bodies.ScaleBody, '{"kind":"Job","spec":{}}', "kind=Job: Invalid enum value"),
        (bodies.ScalePatchBody, '{"metadata":{"resourceVersion":"1\\n"}}', r"metadata\.resourceVersion=1"),
        (bodies.DrainBody, '{"nodes":["a","b c"]}', r"nodes\[1\]=b c: Expected `str` matching"),
        (bodies.DrainBody, '{"nodes":["a"],"checkpoint":"maybe"}', "checkpoint=maybe: Invalid enum value"),
        (bodies.DrainBody, '{"nodes":[]}', r"nodes=\[\]: Expected `array` of length >= 1"),
        (bodies.AskBody, '{"reason":7}', "reason=7: Expected `str`, got `int`"),
    ],
)
def test_a_refusal_names_field_and_value(kind: type[bodies.AskBody], text: str, said: str) -> None:
    with pytest.raises(Refusal, match=f"the body: .*{said}") as refusal:
        bodies.parse(kind, text.encode())
    assert refusal.value.code == 400


def test_a_line_break_at_the_end_is_no_part_of_a_name() -> None:
    with pytest.raises(Refusal):
        bodies.parse(bodies.DrainBody, b'{"nodes":["node-a\\n"]}')
    assert bodies.parse(bodies.DrainBody, b'{"nodes":["node-a"]}').nodes == ["node-a"]


# --- the document ----------------------------------------------------------------------------------------------------


def test_every_body_of_the_table_has_its_schema() -> None:
    schemas = openapi.document("train")["components"]["schemas"]
    for route in ROUTES:
        for kind in (route.body, *(answer for _, answer in route.answers)):
            assert kind is None or isinstance(kind, str) or kind.__name__ in schemas
    assert schemas["DrainBody"]["properties"]["nodes"]["items"]["pattern"] == "^[A-Za-z0-9._-]{1,128}$"
    assert schemas["ScaleBody"]["required"] == ["spec"]
    assert schemas["ScaleDocument"]["required"] == ["kind", "apiVersion", "metadata", "spec", "status"]


def test_the_document_and_the_table_are_one() -> None:
    paths = openapi.document("train")["paths"]
    listed = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert listed == {(route.method, route.path) for route in ROUTES}
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert sorted(set(names)) == sorted(names)
    for route in ROUTES:
        codes = {int(code) for code in paths[route.path][route.method.lower()]["responses"]}
        assert codes == {code for code, _ in route.answers} | set(route.failures)
        assert codes - {200, 202} <= set(REASONS)
        assert 404 in codes or "{" not in route.path


def test_every_reference_leads_somewhere() -> None:
    document = openapi.document("train")
    for part in json.dumps(document).split('"#/')[1:]:
        place: object = document
        for name in part.partition('"')[0].split("/"):
            assert isinstance(place, dict) and name in place, part[:60]
            place = place[name]


def test_every_verdict_has_a_code() -> None:
    assert set(documents.CODES) == set(Verdict)
    assert {code for code in documents.CODES.values() if code >= 400} <= set(REASONS)


def test_every_address_is_on_the_page() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "scale.md").read_text()
    assert [route.path for route in ROUTES if f"`{route.method} {route.path}`" not in page] == []
    assert [code for code in REASONS if f"| {code} |" not in page] == []
    assert [kind for kind in TYPES if f"`{kind}`" not in page] == []
