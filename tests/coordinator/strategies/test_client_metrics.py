"""Metrics of evaluations by clients: sums that become the means of one loop over all rows, how they
spread over the clients, and those of the user's own, merged once by one worker."""

from math import exp, inf, isnan, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.base.text import of_metric, range_of, without_spreads
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import CancelRun, ResumeRun
from stratagem.coordinator.core.effects import EvaluateState, MergeMetrics
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts import ROOT, ClientEvaluated, Evaluated, MetricsMerged
from stratagem.coordinator.core.pending import live_blobs
from stratagem.coordinator.strategies.federated.evaluation import over_clients, spread
from stratagem.coordinator.strategies.schedule import added, commit_metrics, is_evaluated, means
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    digest,
    ending,
    member,
    register,
    start,
)

pytestmark = pytest.mark.core


OWN = "tests.userland.metrics:spread"
F1, RANK = "test.tests.userland.metrics:f1", "test.tests.userland.metrics:rank"
NAMES = ["accuracy", F1.partition(".")[2], RANK.partition(".")[2]]
BATCHES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=8)


@given(BATCHES)
def test_the_mean_is_weighted_by_rows_however_they_were_shared(
    batches: list[tuple[int, int]],
) -> None:
    sums = [{"test/loss": rows * loss, "test/weight:": rows} for rows, loss in batches]
    rows = sum(rows for rows, _ in batches)
    expected = sum(rows * loss for rows, loss in batches) / rows
    assert means(added(sums), []) == {"test.loss": expected}


def test_a_metric_may_have_weights_of_its_own_and_perplexity_is_that_of_the_mean_loss() -> None:
    totals = {"test/loss": 6.0, "test/weight:": 3.0, "test/f1": 2.0, "test/weight:f1": 4.0}
    assert means(totals, []) == {"test.loss": 2.0, "test.f1": 0.5}
    assert means({"test/loss": 6.0, "test/weight:": 0.0}, []) == {}, "nothing was evaluated"
    totals = {"test/loss": 4.0, "test/weight:": 2.0}
    assert means(totals, ["perplexity"])["test.perplexity"] == exp(2.0)
    huge = {"test/loss": 2000.0, "test/weight:": 2.0}
    assert means(huge, ["perplexity"])["test.perplexity"] == inf
    unknown = {"test/accuracy": 1.0, "test/weight:": 2.0}
    assert isnan(means(unknown, ["perplexity"])["test.perplexity"])


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


# ---- the spread over clients ----


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_the_spread_is_numpys(values: list[float]) -> None:
    found = spread([{"test.loss": value} for value in values])
    expected = np.quantile(values, [0.0, 0.1, 0.5, 0.9, 1.0])
    names = ("client_min", "client_p10", "client_median", "client_p90", "client_max")
    assert list(found) == [f"test.loss.{name}" for name in names]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-9, atol=1e-9)


def test_values_that_are_not_finite_or_over_no_rows() -> None:
    assert spread([{"a": nan}, {"a": 1.0}]) == {}
    found = spread([{"a": inf}, {"a": 1.0}, {"a": inf}])
    assert list(found.values()) == [1.0, inf, inf, inf, inf]
    assert spread([]) == spread([{}]) == {}
    assert over_clients([{}], [{"test.a:b": 1.0}], []) == spread([{"test.a:b": 1.0}])


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


def local(rounds: int = 1, num_clients: int = 3, **evaluation: object) -> str:
    spec = {"split": "test", "metrics": ["accuracy"], **evaluation}
    strategy = {**FEDERATED, "num_clients": num_clients, "rounds": rounds}
    return job_text(strategy, data={"worker_local": "ward"}, evaluation=spec)


def evaluating(job: str | None = None, sites: str = "abc") -> Simulation:
    """A federation whose clients are about to evaluate round 1."""
    simulation = start(job or local(metrics=NAMES))
    simulation.sites(sites)
    simulation.until_due(EvaluateState)
    simulation.queue.clear()
    return simulation


def test_an_evaluation_has_the_spread_and_says_its_range() -> None:
    simulation = evaluating(local())
    for client, right in ((2, 4.0), (0, 1.0), (1, 2.0)):
        sums = {"test/accuracy": right, "test/weight:": 4.0}
        simulation.report(says(client, sums=sums, own={f"test.{OWN}": float(client)}, summed=()))
    found = simulation.fact(Evaluated)
    metrics = dict(found.metrics)
    assert metrics["test.accuracy"] == 7 / 12
    assert metrics["test.accuracy.client_min"] == 0.25
    assert metrics["test.accuracy.client_p10"] == pytest.approx(0.3)
    assert metrics["test.accuracy.client_median"] == 0.5
    assert metrics["test.accuracy.client_max"] == 1.0
    assert metrics[f"test.{OWN}.client_mean"] == 1.0
    assert sentence(found) == (
        "segment 1 evaluated: test.accuracy 0.583333 (clients 0.25 to 1), "
        f"test.{OWN}.client_mean 1 (clients 0 to 2)"
    )
    job = JobSpec.from_json(local(metrics=["accuracy", OWN]))
    assert all(is_evaluated(job, name) for name in found.metrics)
    assert not is_evaluated(job, "train.loss.client_min")
    assert of_metric("test.accuracy.client_p90") == "test.accuracy"
    with pytest.raises(InvalidInputError):
        JobSpec.from_json(local(best="accuracy.client_p10", mode="max"))


# ---- metrics of the user's own whose states are sums ----


def says(client: int, **changes: Any) -> ClientEvaluated:
    said = {
        "sums": {"test/accuracy": 1.0 * client, "test/weight:": 4.0},
        "own": {f"{F1}.micro": 0.1 * client, RANK: float(client)},
        "summed": (F1,),
        "states": digest(f"states{client}"),
        **changes,
    }
    return ClientEvaluated(party=ROOT, segment=1, client=client, **said)


def due(simulation: Simulation) -> list[MergeMetrics]:
    return simulation.due(MergeMetrics)


def merged(effect: MergeMetrics, **changes: Any) -> MetricsMerged:
    said = {"metrics": {f"{F1}.micro": 0.75}, "worker_id": effect.member.worker_id, **changes}
    clients = tuple(client for client, _ in effect.states)
    return MetricsMerged(party=ROOT, segment=effect.segment, clients=clients, **said)


def said(job: str | None = None) -> Simulation:
    """All clients have evaluated round 1."""
    simulation = evaluating(job)
    simulation.report(says(2), says(0))
    assert not due(simulation)
    simulation.report(says(1))
    return simulation


def test_what_all_clients_say_is_merged_in_their_order_and_published_by_its_bare_name() -> None:
    best = f"{F1.partition('.')[2]}.micro"
    simulation = said(local(2, metrics=NAMES, best=best, mode="max"))
    effect = simulation.due_one(MergeMetrics)
    assert effect.states == tuple((client, digest(f"states{client}")) for client in range(3))
    assert (effect.metrics, effect.member) == ((F1,), member("a"))
    blobs = {blob for _, blob in effect.states}
    assert blobs <= live_blobs(simulation.state)
    assert not simulation.facts(Evaluated)
    simulation.report(merged(effect))
    found = simulation.fact(Evaluated)
    assert found.metrics[f"{F1}.micro"] == 0.75
    assert found.metrics[f"{F1}.micro.client_mean"] == pytest.approx(0.1)
    assert found.metrics[f"{F1}.micro.client_max"] == pytest.approx(0.2)
    assert found.metrics[f"{RANK}.client_mean"] == 1.0
    assert RANK not in found.metrics
    job = JobSpec.from_json(local(metrics=NAMES))
    assert all(is_evaluated(job, name) for name in found.metrics)
    assert not blobs & live_blobs(simulation.state)
    fact = simulation.fact(MetricsMerged)
    assert sentence(fact) == f"segment 1: 3 clients merged: {F1}.micro 0.75"
    assert "does not wait for these metrics" in simulation.refusal(merged(effect)).reason


KEEPS: dict[str, Any] = {"summed": (), "states": Digest("")}


@pytest.mark.parametrize(
    "changes",
    [
        KEEPS,  # an older worker, or one whose site keeps it
        {"sums": {}, "own": {}, "reason": "it fails", **KEEPS},
        {"own": {}, **KEEPS},  # it has no rows
    ],
)
def test_a_value_over_some_rows_is_not_published_as_one_over_all(changes: Any) -> None:
    simulation = evaluating()
    simulation.report(says(0), says(1, **changes), says(2))
    if changes.get("own", True):
        assert not due(simulation)
        assert not {F1, f"{F1}.micro"} & simulation.fact(Evaluated).metrics.keys()
    else:
        effect = simulation.due_one(MergeMetrics)
        assert effect.metrics == (F1,)
        assert [client for client, _ in effect.states] == [0, 2]


def test_three_workers_are_asked_but_nobody_else_where_states_do_not_go_together() -> None:
    simulation = evaluating(local(1, 4, metrics=NAMES), "abcd")
    simulation.report(*map(says, range(4)))
    for name in "abc":
        effect = simulation.due_one(MergeMetrics)
        assert effect.member == member(name)
        simulation.report(merged(effect, metrics={}, reason=f"{name}: ValueError"))
    assert not due(simulation)
    found = simulation.fact(Evaluated)
    assert f"{F1}.micro" not in found.metrics
    assert f"{F1}.micro.client_mean" in found.metrics
    failed = simulation.facts(MetricsMerged)[0]
    assert "4 clients could not be merged: a: ValueError" in sentence(failed)
    simulation = said()
    effect = simulation.due_one(MergeMetrics)
    simulation.report(merged(effect, metrics={}, worker_id="", reason="client 2 has others"))
    assert not due(simulation)
    assert simulation.fact(Evaluated)


def test_a_lost_worker_leaves_it_to_another_and_one_that_ends_processes_is_not_asked() -> None:
    simulation = said()
    simulation.lose("a")
    for number in range(3):
        assert simulation.due_one(MergeMetrics).member == member("b", number)
        told = ending("b", number, status=1, run_id=RUN, party="measure")
        simulation.tell(register("b", number + 1, told, local_data=("ward",)))
    effect = simulation.due_one(MergeMetrics)
    assert effect.member == member("c")
    simulation.report(merged(effect))
    assert simulation.fact(Evaluated).metrics[f"{F1}.micro"] == 0.75


def test_the_last_worker_here_is_asked_once_and_nothing_is_merged_while_none_is() -> None:
    simulation = said()
    simulation.lose("bc")
    last = simulation.fork()
    last.report(merged(last.due_one(MergeMetrics), metrics={}, reason="a: ValueError"))
    assert not due(last)
    assert f"{F1}.micro" not in last.fact(Evaluated).metrics
    simulation.lose("a")
    assert not due(simulation)
    assert not simulation.facts(Evaluated)
    simulation.sites("c", 1)
    simulation.report(merged(simulation.due_one(MergeMetrics)))
    assert simulation.fact(Evaluated)


def test_a_resumed_run_goes_on_with_what_was_said() -> None:
    simulation = said()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    assert {digest(f"states{client}") for client in range(3)} <= live_blobs(simulation.state)
    simulation.tell(ResumeRun(RUN))
    simulation.complete()
    assert simulation.fact(Evaluated).metrics[F1] == 0.25
