"""A killed worker as a trace in a collector."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.process.harness import WORKERS, Job, OutsideEtcd, until
from tests.support.notification_sinks import WebhookSink, webhook_sink

pytestmark = pytest.mark.torch
WHOLE = "world change"


def received(collector: WebhookSink) -> dict[str, dict[str, float]]:
    """Seconds of each span by the cause of its trace and its name; traces whose whole is not there yet are left out."""
    requests = [ExportTraceServiceRequest.FromString(body) for _, body in collector.posts]
    spans = [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    causes = {
        span.trace_id: next((one.value.string_value for one in span.attributes if one.key == "edl.cause"), "")
        for span in spans
        if span.name == WHOLE
    }
    found: dict[str, dict[str, float]] = {cause: {} for cause in causes.values()}
    for span in spans:
        if span.trace_id in causes:
            found[causes[span.trace_id]][span.name] = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    return found


@pytest.mark.slow
def test_a_killed_worker_is_a_trace_with_its_parts(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with webhook_sink() as collector:
        options = (f"--otlp-endpoint={collector.url}",)
        script = (str(WORKERS / "rejoin_plain.py"),)
        with Job(tmp_path, [etcd.endpoint], options=options, script=script) as job:
            job.start("a", "b")
            first = job.wait_world(2)
            os.kill(first.pids[1], signal.SIGKILL)
            job.wait_world(2, after=first.round)
            job.end_soon()
            assert job.exit_codes() == {"a": 0, "b": 0}
        killed = until(
            lambda: [(cause, spans) for cause, spans in received(collector).items() if "SIGKILL" in cause], "the trace"
        )
    ((cause, spans),) = killed
    assert "was killed by SIGKILL" in cause
    assert set(spans) == {WHOLE, "stop workers", "form world", "start training"}
    parts = sum(length for name, length in spans.items() if name != WHOLE)
    assert parts == pytest.approx(spans[WHOLE], abs=1e-3)
