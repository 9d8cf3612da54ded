"""Writes metrics in the text format of Prometheus, or in OpenMetrics if the client asks for it.

The only module that imports ``prometheus_client`` (extra ``metrics``). Its global registry is not used: metrics are
read when a client scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import Metric as Family
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from edl.metrics.facts import JobFacts, NodeFacts
from edl.metrics.job import JOB_METRICS
from edl.metrics.metric import Metric, MetricKind
from edl.metrics.node import NODE_METRICS

F = TypeVar("F")
JOB_LABEL = "edl_job"
"""The first label of every series. Not ``job``: Prometheus gives that name to the scrape configuration."""
_FAMILIES: dict[MetricKind, type[CounterMetricFamily | GaugeMetricFamily]] = {
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.COUNTER: CounterMetricFamily,
}


def expose(job: str, node: NodeFacts, facts: JobFacts | None, accept: str) -> tuple[bytes, str]:
    """The metrics of this launcher and their media type. ``facts``: None if this launcher is not the Master.
    ``accept``: the request's ``Accept`` header; empty: none."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([*_families(job, NODE_METRICS, node), *_job_families(job, facts)]))
    encode, media_type = exposition.choose_encoder(accept)
    return encode(registry), media_type


def _job_families(job: str, facts: JobFacts | None) -> Iterator[Family]:
    return iter(()) if facts is None else _families(job, JOB_METRICS, facts)


def _families(job: str, table: Sequence[Metric[F]], facts: F) -> Iterator[Family]:
    """The metrics that have values now."""
    for metric in table:
        values = list(metric.read(facts))
        if values:
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=(JOB_LABEL, *metric.labels))
            for labels, value in values:
                family.add_metric((job, *labels), value)
            yield family


class _Collected(Collector):
    """Families that have been made already, in the form that a registry wants."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        """All families."""
        return self._families
