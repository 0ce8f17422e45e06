"""What a site tells of metrics of the job itself: those that its file allows, and no others; of
their values, of what these were computed from, and of those of all sites."""

import pytest

from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.site.disclosure import Disclosure

SAID = {"test.task:f1": 0.5, "test.task:f1.micro": 0.25, "test.task:f10": 0.75, "test.other:x": 1.0}


@pytest.mark.parametrize(
    ("allowed", "tells", "told"),
    [
        ({"task:f1"}, True, {"test.task:f1", "test.task:f1.micro"}),
        ({"accuracy"}, True, set()),
        ({"task:f1"}, False, set()),
    ],
)
def test_only_allowed_ones_are_told(allowed: set[str], tells: bool, told: set[str]) -> None:
    sums = [pb.MetricState(metric=name, name="hits", counts=[3]) for name in SAID if "." in name]
    own = pb.OwnMetrics(metrics=SAID, are_measured=True, sums=sums)
    result = pb.ExecuteResult(evaluate=pb.EvaluateResult(own_metrics=own))
    site = Disclosure("anna", frozenset(allowed), tells, shares_logs=False, shares_messages=False)
    found = site.result(result).evaluate
    assert found.own_metrics.metrics == {name: SAID[name] for name in told}
    assert {state.metric for state in found.own_metrics.sums} == told
    merged = site.result(pb.ExecuteResult(measure_sums=own)).measure_sums
    assert merged.metrics == found.own_metrics.metrics
    assert found.HasField("own_metrics") == bool(told)
