"""Format readings as the text that Prometheus scrapes.

The module is imported only where metrics are served, since nothing else needs Prometheus' library.
It runs in a separate thread and must touch nothing that belongs to the event loop.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from stratagem.common.observe.metrics import Durations, Metric, Readings, Values

CONTENT_TYPE = CONTENT_TYPE_LATEST


DEPLOYMENT: Final = "deployment"
"""The label with the name of the deployment, so that rules can add up over exactly one deployment,
whatever names the scraper gives to jobs and targets."""


def render(read: Callable[[], Readings], deployment: str) -> bytes:
    """Return all metrics as Prometheus' text, including the standard metrics of a process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_Source(read, deployment))
    return generate_latest(registry)


class _Source(Collector):
    def __init__(self, read: Callable[[], Readings], deployment: str) -> None:
        self._read, self._deployment = read, deployment

    def describe(self) -> list[Family]:
        return []  # registering must read nothing

    def collect(self) -> Iterator[Family]:
        for metric, values in self._read():
            yield _family(metric, values, self._deployment)


def _family(metric: Metric, values: Values, deployment: str) -> Family:
    names = (DEPLOYMENT, *metric.labels)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=names)
        for labels, value in values.items():
            assert isinstance(value, Durations), metric.name
            histogram.add_metric((deployment, *labels), value.cumulative(), value.sum_s)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=names)
    for labels, value in values.items():
        assert not isinstance(value, Durations), metric.name
        family.add_metric((deployment, *labels), value)
    return family
