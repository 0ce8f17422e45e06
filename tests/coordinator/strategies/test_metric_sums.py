"""Sums of an evaluation become the means that one loop over all rows would have given."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.job import JobSpec
from stratagem.coordinator.strategies.evaluation.commit_metrics import (
    commit_metrics,
    is_evaluated,
)
from stratagem.coordinator.strategies.evaluation.metric_sums import added, means
from tests.coordinator.core.jobs import job_text

pytestmark = pytest.mark.core

BATCHES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=8)


@given(BATCHES)
def test_the_mean_is_weighted_by_rows_however_they_were_shared(
    batches: list[tuple[int, int]],
) -> None:
    sums = [{"test/loss": rows * loss, "test/weight:": rows} for rows, loss in batches]
    rows = sum(rows for rows, _ in batches)
    expected = sum(rows * loss for rows, loss in batches) / rows
    assert means(added(sums), []) == {"test.loss": expected}


def test_a_metric_may_have_weights_of_its_own() -> None:
    totals = {"test/loss": 6.0, "test/weight:": 3.0, "test/f1": 2.0, "test/weight:f1": 4.0}
    assert means(totals, []) == {"test.loss": 2.0, "test.f1": 0.5}
    assert means({"test/loss": 6.0, "test/weight:": 0.0}, []) == {}, "nothing was evaluated"


def test_perplexity_is_that_of_the_mean_loss_and_may_be_beyond_all_numbers() -> None:
    totals = {"test/loss": 4.0, "test/weight:": 2.0}
    assert means(totals, ["perplexity"])["test.perplexity"] == math.exp(2.0)
    huge = {"test/loss": 2000.0, "test/weight:": 2.0}
    assert means(huge, ["perplexity"])["test.perplexity"] == math.inf
    unknown = {"test/accuracy": 1.0, "test/weight:": 2.0}
    assert math.isnan(means(unknown, ["perplexity"])["test.perplexity"])


def test_what_an_evaluation_measures_is_known_by_name() -> None:
    evaluation = {"split": "train", "metrics": ["accuracy", "task:f1"]}
    spec = JobSpec.from_json(job_text({"type": "Local"}, evaluation=evaluation))
    names = ["train.loss", "train.accuracy", "train.task:f1", "train.task:f1.recall"]
    names.append("evaluation.mine")
    trained = ["train.grad_norm", "train.accuracy.x", "train.task:f12"]
    values = dict.fromkeys([*names, *trained], 1.0)
    assert commit_metrics(spec, values, {"train.task:f1.a": 2.0}) == (
        ("train.accuracy.x", 1.0),
        ("train.grad_norm", 1.0),
        ("train.task:f1.a", 2.0),
        ("train.task:f12", 1.0),
    )
    assert not is_evaluated(JobSpec.from_json(job_text({"type": "Local"})), "test.loss")
