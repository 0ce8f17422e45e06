"""How metrics spread over the clients that evaluate: against numpy, and through whole runs."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.evaluation.client_spread import of_metric, range_of, without_spreads
from stratagem.coordinator.core.commands import Refusal, Report
from stratagem.coordinator.core.effects import EvaluateState
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import ROOT, ClientEvaluated, Evaluated
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.strategies.evaluation.client_spread_metrics import over_clients, spread
from stratagem.coordinator.strategies.evaluation.commit_metrics import is_evaluated
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, register, start

pytestmark = pytest.mark.core

OWN = "tests.userland.metrics:spread"


def local(**evaluation: object) -> str:
    spec = {"split": "test", "metrics": ["accuracy"], **evaluation}
    strategy = {**FEDERATED, "num_clients": 3, "rounds": 1}
    return job_text(strategy, data={"worker_local": "ward"}, evaluation=spec)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_the_spread_is_numpys(values: list[float]) -> None:
    found = spread([{"test.loss": value} for value in values])
    expected = np.quantile(values, [0.0, 0.1, 0.5, 0.9, 1.0])
    names = ("client_min", "client_p10", "client_median", "client_p90", "client_max")
    assert list(found) == [f"test.loss.{name}" for name in names]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-9, atol=1e-9)


def test_values_that_are_not_finite() -> None:
    assert spread([{"a": nan}, {"a": 1.0}]) == {}
    found = spread([{"a": inf}, {"a": 1.0}, {"a": inf}])
    assert list(found.values()) == [1.0, inf, inf, inf, inf]
    assert spread([]) == spread([{}]) == {}


def test_own_metrics_are_weighted_by_rows() -> None:
    sums = [{"test/loss": 6.0, "test/weight:": 3.0}, {"test/loss": 1.0, "test/weight:": 1.0}]
    found = over_clients([*sums, {}], [{f"test.{OWN}": 1.0}, {f"test.{OWN}": 5.0}, {}], ["loss"])
    assert found[f"test.{OWN}.client_mean"] == 2.0
    assert found[f"test.{OWN}.client_max"] == 5.0
    assert found["test.loss.client_max"] == 2.0
    assert f"test.{OWN}" not in found
    assert range_of(found, f"test.{OWN}.client_mean") == (1.0, 5.0)
    assert without_spreads(found) == {f"test.{OWN}.client_mean": 2.0}
    merged = {**found, f"test.{OWN}": 6.0}  # over all rows, so it may lie outside of the range
    assert range_of(merged, f"test.{OWN}") is None
    assert range_of(merged, f"test.{OWN}.client_mean") == (1.0, 5.0)
    assert range_of(merged, "test.loss") == (1.0, 2.0)


def test_own_metrics_of_clients_without_rows_have_no_mean() -> None:
    assert over_clients([{}], [{"test.a:b": 1.0}], []) == spread([{"test.a:b": 1.0}])


def test_an_evaluation_has_the_spread_and_says_its_range() -> None:
    simulation = start(local())
    for name in "abc":
        simulation.tell(register(name, local_data=("ward",)))
    while not any(isinstance(effect, EvaluateState) for effect in pending(simulation.state)):
        simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    for client, right in ((2, 4.0), (0, 1.0), (1, 2.0)):
        sums = {"test/accuracy": right, "test/weight:": 4.0}
        own = {f"test.{OWN}": float(client)}
        fact = ClientEvaluated(party=ROOT, segment=1, client=client, sums=sums, own=own)
        assert not isinstance(simulation.tell(Report(RUN, fact)), Refusal)
    (found,) = simulation.facts(Evaluated)
    assert found.metrics["test.accuracy"] == 7 / 12
    assert found.metrics["test.accuracy.client_min"] == 0.25
    assert found.metrics["test.accuracy.client_p10"] == pytest.approx(0.3)
    assert found.metrics["test.accuracy.client_median"] == 0.5
    assert found.metrics["test.accuracy.client_max"] == 1.0
    assert found.metrics[f"test.{OWN}.client_mean"] == 1.0
    assert sentence(found) == (
        "segment 1 evaluated: test.accuracy 0.583333 (clients 0.25 to 1), "
        f"test.{OWN}.client_mean 1 (clients 0 to 2)"
    )
    job = JobSpec.from_json(local(metrics=["accuracy", OWN]))
    assert all(is_evaluated(job, name) for name in found.metrics)
    assert not is_evaluated(job, "train.loss.client_min")
    assert of_metric("test.accuracy.client_p90") == "test.accuracy"


def test_what_is_no_metric_is_refused_as_before() -> None:
    with pytest.raises(InvalidInputError):
        JobSpec.from_json(local(best="accuracy.client_p10", mode="max"))
