"""Metrics of the user's own whose states are sums: merged once all clients have evaluated, by one
worker, and published beside the means of the others."""

from typing import Any

import pytest

from stratagem.common.base.ids import Digest
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import CancelRun, LoseWorker, Refusal, Report, ResumeRun
from stratagem.coordinator.core.effects import EvaluateState, MergeMetrics
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ROOT,
    ClientEvaluated,
    Evaluated,
    MetricsMerged,
)
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from stratagem.coordinator.strategies.evaluation.commit_metrics import is_evaluated
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    digest,
    ending,
    member,
    phase,
    register,
    start,
)

pytestmark = pytest.mark.core

F1, RANK = "test.tests.userland.metrics:f1", "test.tests.userland.metrics:rank"


def local(rounds: int = 1, **evaluation: object) -> str:
    metrics = ["accuracy", F1.partition(".")[2], RANK.partition(".")[2]]
    spec = {"split": "test", "metrics": metrics, **evaluation}
    strategy = {**FEDERATED, "num_clients": 3, "rounds": rounds}
    return job_text(strategy, data={"worker_local": "ward"}, evaluation=spec)


def evaluating(job: str) -> Simulation:
    """A federation whose clients are about to evaluate round 1."""
    simulation = start(job)
    for name in "abc":
        simulation.tell(register(name, local_data=("ward",)))
    while not any(isinstance(effect, EvaluateState) for effect in pending(simulation.state)):
        simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    return simulation


def says(client: int, **changes: Any) -> ClientEvaluated:
    said = {
        "sums": {"test/accuracy": 1.0 * client, "test/weight:": 4.0},
        "own": {f"{F1}.micro": 0.1 * client, RANK: float(client)},
        "summed": (F1,),
        "states": digest(f"states{client}"),
        **changes,
    }
    return ClientEvaluated(party=ROOT, segment=1, client=client, **said)


def report(simulation: Simulation, *facts: ClientEvaluated | MetricsMerged) -> None:
    for fact in facts:
        assert not isinstance(simulation.tell(Report(RUN, fact)), Refusal)


def due(simulation: Simulation) -> list[MergeMetrics]:
    return [effect for effect in pending(simulation.state) if isinstance(effect, MergeMetrics)]


def merged(effect: MergeMetrics, **changes: Any) -> MetricsMerged:
    said = {"metrics": {f"{F1}.micro": 0.75}, "worker_id": effect.member.worker_id, **changes}
    clients = tuple(client for client, _ in effect.states)
    return MetricsMerged(party=ROOT, segment=effect.segment, clients=clients, **said)


def test_what_all_clients_say_is_merged_in_their_order_and_published_by_its_bare_name() -> None:
    simulation = evaluating(local(2, best=f"{F1.partition('.')[2]}.micro", mode="max"))
    report(simulation, says(2), says(0))
    assert not due(simulation)
    report(simulation, says(1))
    (effect,) = due(simulation)
    assert effect.states == tuple((client, digest(f"states{client}")) for client in range(3))
    assert (effect.metrics, effect.member) == ((F1,), member("a"))
    assert {blob for _, blob in effect.states} <= live_blobs(simulation.state)
    assert not simulation.facts(Evaluated)
    report(simulation, merged(effect))
    (found,) = simulation.facts(Evaluated)
    assert found.metrics[f"{F1}.micro"] == 0.75
    assert found.metrics[f"{F1}.micro.client_mean"] == pytest.approx(0.1)
    assert found.metrics[f"{F1}.micro.client_max"] == pytest.approx(0.2)
    assert found.metrics[f"{RANK}.client_mean"] == 1.0
    assert RANK not in found.metrics
    job = JobSpec.from_json(local())
    assert all(is_evaluated(job, name) for name in found.metrics)
    assert not {blob for _, blob in effect.states} & live_blobs(simulation.state)
    (fact,) = simulation.facts(MetricsMerged)
    assert sentence(fact) == f"segment 1: 3 clients merged: {F1}.micro 0.75"
    again = simulation.tell(Report(RUN, merged(effect)))
    assert isinstance(again, Refusal)
    assert "does not wait for these metrics" in again.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"summed": (), "states": Digest("")},  # an older worker, or one whose site keeps it
        {"sums": {}, "own": {}, "summed": (), "states": Digest(""), "reason": "it fails"},
        {"own": {}, "summed": (), "states": Digest("")},  # it has no rows
    ],
)
def test_a_value_over_some_rows_is_not_published_as_one_over_all(changes: Any) -> None:
    simulation = evaluating(local())
    report(simulation, says(0), says(1, **changes), says(2))
    keeps_it = bool(changes.get("own", True))
    assert [effect.metrics for effect in due(simulation)] == ([] if keeps_it else [(F1,)])
    if keeps_it:
        (found,) = simulation.facts(Evaluated)
        assert not {F1, f"{F1}.micro"} & found.metrics.keys()
    else:
        assert [client for client, _ in due(simulation)[0].states] == [0, 2]


def test_another_worker_computes_what_one_could_not_and_three_are_asked() -> None:
    simulation = evaluating(local())
    report(simulation, says(0), says(1), says(2))
    for name in "abc":
        (effect,) = due(simulation)
        assert effect.member == member(name)
        report(simulation, merged(effect, metrics={}, reason=f"{name}: ValueError"))
    assert not due(simulation)
    (found,) = simulation.facts(Evaluated)
    assert f"{F1}.micro" not in found.metrics
    assert f"{F1}.micro.client_mean" in found.metrics
    assert "3 clients could not be merged: a: ValueError" in sentence(
        simulation.facts(MetricsMerged)[0]
    )


def test_states_that_do_not_go_together_are_tried_by_nobody_else() -> None:
    simulation = evaluating(local())
    report(simulation, says(0), says(1), says(2))
    (effect,) = due(simulation)
    report(simulation, merged(effect, metrics={}, worker_id="", reason="client 2 has others"))
    assert not due(simulation)
    assert len(simulation.facts(Evaluated)) == 1


def test_a_lost_worker_leaves_it_to_another_and_one_that_ends_processes_is_not_asked() -> None:
    simulation = evaluating(local())
    report(simulation, says(0), says(1), says(2))
    simulation.tell(LoseWorker(member("a"), "gone"))
    (effect,) = due(simulation)
    assert effect.member == member("b")
    for number in range(3):
        assert due(simulation)[0].member.worker_id == "b"
        told = ending("b", number, status=1, run_id=RUN, party="measure")
        simulation.tell(register("b", number + 1, told, local_data=("ward",)))
    (effect,) = due(simulation)
    assert effect.member == member("c")
    report(simulation, merged(effect))
    assert simulation.facts(Evaluated)[0].metrics[f"{F1}.micro"] == 0.75


def test_the_last_worker_here_is_asked_once() -> None:
    simulation = evaluating(local())
    report(simulation, says(0), says(1), says(2))
    for name in "bc":
        simulation.tell(LoseWorker(member(name), "gone"))
    (effect,) = due(simulation)
    report(simulation, merged(effect, metrics={}, reason="a: ValueError"))
    assert not due(simulation)
    assert f"{F1}.micro" not in simulation.facts(Evaluated)[0].metrics


def test_nothing_is_merged_while_no_worker_is_here() -> None:
    simulation = evaluating(local())
    report(simulation, says(0), says(1), says(2))
    for name in "abc":
        simulation.tell(LoseWorker(member(name), "gone"))
    assert not due(simulation)
    assert not simulation.facts(Evaluated)
    simulation.tell(register("c", 1, local_data=("ward",)))
    (effect,) = due(simulation)
    report(simulation, merged(effect))
    assert len(simulation.facts(Evaluated)) == 1


def test_a_resumed_run_goes_on_with_what_was_said() -> None:
    simulation = evaluating(local())
    report(simulation, says(0), says(1), says(2))
    simulation.tell(CancelRun(RUN))
    simulation.run()
    assert {digest(f"states{client}") for client in range(3)} <= live_blobs(simulation.state)
    simulation.tell(ResumeRun(RUN))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert simulation.facts(Evaluated)[0].metrics[F1] == 0.25
