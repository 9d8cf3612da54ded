"""Sends spans with the OpenTelemetry SDK (extra ``otel``), in its own thread: ``send`` never blocks.

Spans that cannot be sent are tried again for some seconds and then lost; the job does not depend on them. Identifiers
are derived from the change of the world, so the spans of one change belong together even if two Masters send them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from edl import __version__
from edl.traces.spans import CHANGE, Span
from edl.wire.address import without_credentials

SEND_EVERY_S = 2.0
"""Seconds that spans wait for others to be sent with."""
LIMIT_S = 10.0
"""Seconds that one attempt to send may take, with its repetitions."""
_NS = 1_000_000_000


class OtlpExport:
    """Sends spans to one collector."""

    def __init__(
        self, endpoint: str, about: Mapping[str, str], say: Callable[[str], None], exporter: SpanExporter | None = None
    ) -> None:
        """``endpoint``: URL of the collector's OTLP over HTTP for traces. ``about``: attributes of every span.
        ``say``: called in a thread when sending begins to fail and when it works again."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)  # it would repeat what ``say`` says once
        self._resource = Resource.create({"service.name": "edl", "service.version": __version__, **about})
        sender = exporter or OTLPSpanExporter(endpoint, timeout=LIMIT_S)
        self._processor = BatchSpanProcessor(
            _Telling(sender, endpoint, say),
            schedule_delay_millis=1000 * SEND_EVERY_S,
            export_timeout_millis=1000 * LIMIT_S,
        )

    def send(self, spans: Sequence[Span]) -> None:
        """Queue spans. They are lost if too many wait."""
        for span in spans:
            self._processor.on_end(self._readable(span))

    def end(self) -> None:
        """Send what waits, and end the thread. Blocks for at most about ``LIMIT_S``."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> ReadableSpan:
        whole = _context(span.trace, CHANGE)
        events = [
            Event(
                "exception",
                {
                    "exception.type": one.kind,
                    "exception.message": one.message,
                    "exception.stacktrace": one.stack,
                },
                timestamp=round(one.at_s * _NS),
            )
            for one in span.errors
        ]
        return ReadableSpan(
            span.name,
            context=whole if span.whole else _context(span.trace, span.name),
            parent=None if span.whole else whole,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=events,
            status=Status(StatusCode.ERROR if span.errors else StatusCode.UNSET),
            start_time=round(span.begin_s * _NS),
            end_time=round(span.end_s * _NS),
        )


class _Telling(SpanExporter):
    """Says once when spans cannot be sent, and once when they can again."""

    def __init__(self, sender: SpanExporter, endpoint: str, say: Callable[[str], None]) -> None:
        self._sender = sender
        self._endpoint = without_credentials(endpoint)
        self._say = say
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._sender.export(spans)
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            self._say(f"cannot send traces to {self._endpoint}: they are lost until it answers; the job continues")
        elif self._failing and not failing:
            self._say(f"traces are sent to {self._endpoint} again")
        self._failing = failing
        return result

    def shutdown(self) -> None:
        self._sender.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._sender.force_flush(timeout_millis)


def _context(trace: str, name: str) -> SpanContext:
    ids = hashlib.sha256(trace.encode()).digest(), hashlib.sha256(f"{trace} {name}".encode()).digest()
    trace_id, span_id = int.from_bytes(ids[0][:16], "big"), int.from_bytes(ids[1][:8], "big")
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
