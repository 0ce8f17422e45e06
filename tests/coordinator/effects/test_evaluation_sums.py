"""Adding up evaluations: independent of who computed which batch."""

import math

import pytest

from stratagem.coordinator.effects.evaluate import fold_parts
from stratagem.v1 import worker_pb2

pytestmark = pytest.mark.core


def part(batch: int, weight: float, **sums: float) -> worker_pb2.EvaluationPart:
    return worker_pb2.EvaluationPart(split="test", batch=batch, weight=weight, sums=sums)


def test_means_are_weighted_and_do_not_depend_on_the_order_of_parts() -> None:
    """A batch that two members have computed counts once; no rows give no metrics."""
    parts = [part(0, 4, loss=2.0, accuracy=3.0), part(1, 4, loss=0.1), part(2, 1, loss=0.2)]
    assert fold_parts(parts, [])["test.loss"] == (2.0 + 0.1 + 0.2) / 9
    assert fold_parts(reversed(parts), []) == fold_parts(parts, [])
    assert fold_parts([part(0, 2, loss=1.0), part(0, 2, loss=1.0)], []) == {"test.loss": 0.5}
    assert fold_parts([part(0, 0.0, loss=0.0)], []) == {}
    assert fold_parts([], ["perplexity"]) == {}


def test_metric_with_its_own_weight_is_divided_by_that() -> None:
    parts = [part(b, 10, **{"hits": 3.0, "weight:hits": 4.0, "loss": 5.0}) for b in range(2)]
    assert fold_parts(parts, []) == {"test.hits": 0.75, "test.loss": 0.5}


def test_perplexity_follows_from_the_mean_loss() -> None:
    means = fold_parts([part(0, 1, loss=1.0), part(1, 1, loss=2.0)], ["perplexity"])
    assert means["test.perplexity"] == math.exp(1.5)
    assert fold_parts([part(0, 1, loss=1e6)], ["perplexity"])["test.perplexity"] == math.inf
