"""Spans as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from edl.traces.otlp import OtlpExport
from edl.traces.spans import CHANGE, FORM, Span, WorkerError
from tests.support.notification_sinks import webhook_sink

ERROR = WorkerError(11.0, "ValueError", "rank 3 on a ended with exit status 1", "Traceback …")
WHOLE = Span("job run 2", CHANGE, 10.0, 13.5, {"edl.round": 2, "edl.cause": "killed"}, (ERROR,))
PART = Span("job run 2", FORM, 11.0, 12.0, {})


def test_a_collector_gets_one_trace_with_all_of_its_parts() -> None:
    with webhook_sink() as collector:
        for spans in ([PART], [WHOLE]):  # as two Masters would, one after the other
            export = OtlpExport(f"{collector.url}/v1/traces", {"edl.job": "job"}, print)
            export.send(spans)
            export.end()
    found = []
    for headers, body in collector.posts:
        assert headers["content-type"] == "application/x-protobuf"
        (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        about = {one.key: one.value.string_value for one in resource.resource.attributes}
        assert (about["service.name"], about["edl.job"]) == ("edl", "job")
        found += [span for scope in resource.scope_spans for span in scope.spans]
    part, whole = found
    assert (part.name, whole.name) == (FORM, CHANGE)
    assert part.trace_id == whole.trace_id and len(whole.trace_id) == 16
    assert part.parent_span_id == whole.span_id and not whole.parent_span_id
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (10_000_000_000, 13_500_000_000)
    (event,) = whole.events
    assert event.name == "exception" and event.time_unix_nano == 11_000_000_000
    texts = {one.key: one.value.string_value for one in event.attributes}
    assert texts == {
        "exception.type": "ValueError",
        "exception.message": "rank 3 on a ended with exit status 1",
        "exception.stacktrace": "Traceback …",
    }


class Unreliable(SpanExporter):
    """Fails as often as it is told to."""

    def __init__(self, results: Sequence[SpanExportResult]) -> None:
        self.results = list(results)
        self.sent: list[str] = []
        self.asked = threading.Semaphore(0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sent += [span.name for span in spans]
        self.asked.release()
        return self.results.pop(0)

    def shutdown(self) -> None:
        """Nothing to end."""


def test_a_collector_that_is_away_is_complained_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.traces.otlp.SEND_EVERY_S", 0.01)
    bad, good = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    exporter, said = Unreliable([bad, bad, good, good]), list[str]()
    export = OtlpExport("http://me:geheim@collector/v1/traces", {}, said.append, exporter)
    for _ in range(4):
        export.send([PART])
        assert exporter.asked.acquire(timeout=60)
    export.end()
    assert said == [
        "cannot send traces to http://…@collector/v1/traces: they are lost until it answers; the job continues",
        "traces are sent to http://…@collector/v1/traces again",
    ]
