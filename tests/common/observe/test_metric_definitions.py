"""Names and values of metrics, as Prometheus wants them."""

import re
from collections.abc import Mapping

import pytest

from stratagem.common.observe.exposition import render
from stratagem.common.observe.metrics import Durations, Metric
from stratagem.coordinator.process.metrics import METRICS as COORDINATOR
from stratagem.worker.process.metrics import METRICS as WORKER
from tests.common.observe.scrape import labelled, parsed

pytestmark = pytest.mark.core

ALL = tuple({metric.name: metric for metric in (*COORDINATOR, *WORKER)}.values())
UNBOUNDED = {"run", "run_id", "worker", "worker_id", "client", "party", "job", "address", "reason"}


def test_names_follow_the_conventions_and_mean_the_same_everywhere() -> None:
    for metric in ALL:
        assert re.fullmatch(r"stratagem_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        assert metric.kind != "histogram" or metric.name.endswith("_seconds"), metric
        assert not set(metric.labels) & UNBOUNDED, metric
        assert metric.meaning, metric
        assert not metric.meaning.endswith("."), metric
    for metrics in (COORDINATOR, WORKER):
        assert len({metric.name for metric in metrics}) == len(metrics)
    by_name = {metric.name: metric for metric in COORDINATOR}
    assert all(by_name.get(metric.name, metric) == metric for metric in WORKER)


def test_durations_count_each_once() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0, -1.0):
        durations.add(seconds)
    assert durations.cumulative() == [("0.1", 3), ("1.0", 4), ("+Inf", 5)]
    assert durations.sum_s == pytest.approx(7.65)


def test_all_kinds_are_written_as_prometheus_reads_them() -> None:
    durations = Durations((0.1,))
    durations.add(0.2)
    readings: list[tuple[Metric, Mapping[tuple[str, ...], float | Durations]]] = [
        (Metric("stratagem_a_total", "counter", "a", ("x",)), {("1",): 2.0}),
        (Metric("stratagem_b", "gauge", "b"), {(): 3.0}),
        (Metric("stratagem_c_seconds", "histogram", "c", ("x",)), {("2",): durations}),
        (Metric("stratagem_d", "gauge", "nothing to say"), {}),
    ]
    text = render(lambda: readings, "here").decode()
    assert 'stratagem_a_total{deployment="here",x="1"} 2.0' in text
    assert 'stratagem_c_seconds_sum{deployment="here",x="2"} 0.2' in text
    found = parsed(text)
    assert found["stratagem_a_total"] == {labelled(x="1"): 2.0}
    assert found["stratagem_b"] == {(): 3.0}
    assert found["stratagem_c_seconds_bucket"] == {
        labelled(x="2", le="0.1"): 0.0,
        labelled(x="2", le="+Inf"): 1.0,
    }
    assert found["stratagem_c_seconds_sum"] == {labelled(x="2"): pytest.approx(0.2)}
    assert found["stratagem_d"] == {}
    assert found["process_open_fds"]
