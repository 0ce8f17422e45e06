"""A run goes on from an earlier one of its kept commits, or from a commit of another run with its
step: what followed happens anew."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.effects import EvaluateState, RunSegment, TrainClient
from stratagem.coordinator.core.fact_text import decode, encode, sentence
from stratagem.coordinator.core.pending import blobs_of, live_blobs, pending
from stratagem.coordinator.core.retention import is_shared
from stratagem.coordinator.core.state import retained
from stratagem.coordinator.effects.context import LiveRuns
from stratagem.coordinator.strategies.federated import due as round_effects
from stratagem.coordinator.strategies.federated.run import OwedEvaluation
from stratagem.coordinator.strategies.federated.silos import client_job
from stratagem.coordinator.strategies.synchronous.local import STRATEGY as local
from stratagem.coordinator.updates.spool import SpoolKey
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    EVALUATION,
    FEDERATED,
    GOSSIP,
    LOCAL,
    POPULATION_SECTIONS,
    evaluation_only,
    job_text,
    population,
    refusal,
    silos,
)
from tests.coordinator.core.raising_strategies import with_local
from tests.coordinator.core.simulation import RUN, Simulation, digest, start

pytestmark = pytest.mark.core


SILOS = {**FEDERATED, "num_clients": 2, "options": {"inner": {"type": "Local"}}}


def halt(simulation: Simulation) -> None:
    """Stop the run, whose effects end with nothing but that they let go of it."""
    simulation.tell(c.CancelRun(RUN))
    simulation.queue.clear()
    simulation.seen.clear()
    simulation.tell(c.CancelRun(RUN))
    simulation.run()
    assert simulation.record.is_released


def stopped(strategy: Mapping[str, object], num_commits: int = 3, **changes: Any) -> Simulation:
    """A run that was stopped, and that nobody holds, after so many commits."""
    changes = {"retention": 8} | changes
    if strategy["type"] not in ("Federated", "PopulationBased"):
        changes = {"evaluation": {**EVALUATION, "every": "4 steps"}, "epochs": 5} | changes
    simulation = start(job_text(strategy, **changes), "a", "b")
    while len(simulation.record.commits) < num_commits:
        simulation.step()
    halt(simulation)
    return simulation


def segments(simulation: Simulation) -> list[int]:
    return [commit.segment for commit in simulation.record.commits]


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP, FEDERATED, silos()])
def test_it_goes_on_from_there_and_ends_as_it_would_have(strategy: dict[str, object]) -> None:
    simulation = stopped(strategy)
    before = simulation.record
    assert segments(simulation)[:3] == [0, 1, 2]
    simulation.tell(c.ResumeRun(RUN, "alice", from_segment=1))
    run = simulation.record
    assert (run.ended, segments(simulation)) == (None, [0, 1])
    assert before.commits[2].digest not in live_blobs(simulation.state)
    simulation.complete()
    run = simulation.record
    assert segments(simulation) == list(range(len(segments(simulation))))
    committed = [it.segment for it in simulation.facts(f.SegmentCommitted) if not it.party]
    assert committed.count(2) == 2
    assert run.is_reproducible
    simulation.crash()
    assert simulation.record.commits == run.commits


def test_updates_of_a_round_that_happens_anew_are_others_and_lie_elsewhere_in_the_spool() -> None:
    """The old ones, of other states perhaps, are deleted later, or never if that crashes."""
    simulation = stopped(FEDERATED)
    party = simulation.record.value.party

    def place() -> SpoolKey:
        return LiveRuns.spool_key(cast(LiveRuns, simulation), RUN, party, 2, 0)

    before = place()
    simulation.tell(c.ResumeRun(RUN, from_segment=1))
    after = place()
    assert after != before
    simulation.crash()
    assert place() == after
    entries: list[c.JournalEntry] = []
    while simulation.queue and simulation.record.ended is None:
        answer = simulation.step()
        entries += [] if isinstance(answer, c.Refusal) else list(answer)
    keys = [entry.key for entry in entries if isinstance(entry.fact, f.UpdateReceived)]
    assert keys
    assert all(key is not None and key.endswith("/1") for key in keys)
    assert len(set(keys)) == len(keys)


def test_moments_of_a_server_optimizer_begin_anew_and_that_is_said() -> None:
    simulation = stopped(FEDERATED)
    run = simulation.record
    value = replace(run.value, server_state=(digest("moments"),))
    simulation.state = replace(simulation.state, runs={RUN: replace(run, value=value)})
    simulation.tell(c.ResumeRun(RUN, from_segment=1))
    run = simulation.record
    assert (run.value.server_state, run.is_reproducible) == ((), False)
    assert sentence(simulation.fact(f.RunResumed)) == (
        "resumed from commit 1 at step 1; what else its strategy keeps begins again"
    )


EVALUATED = {"split": "test", "metrics": []}
WARD = {"data": {"worker_local": "ward"}}


def test_a_commit_has_the_average_of_its_parameters() -> None:
    """A rollback counts on from it, and evaluates it again."""
    evaluation = {**EVALUATED, "of": "average"}
    simulation = stopped(FEDERATED, weight_average={"kind": "ema"}, evaluation=evaluation)
    run = simulation.record
    average = digest("average")
    commits = tuple(replace(commit, average=average) for commit in run.commits)
    simulation.state = replace(simulation.state, runs={RUN: replace(run, commits=commits)})
    simulation.tell(c.ResumeRun(RUN, from_segment=1))
    run = simulation.record
    assert (run.value.committed.average, run.is_reproducible) == (average, True)
    assert average in blobs_of(run)
    assert is_shared(simulation.state, average)
    owed = replace(run.value, evaluations={1: OwedEvaluation(run.value.committed)})
    due = round_effects.pending(RUN, run.job, owed, None)
    assert [each.base.digest for each in due if isinstance(each, EvaluateState)] == [average]


def with_late_evaluations(text: str, num_done: int) -> Simulation:
    """A run that was stopped after three rounds: of none the evaluation was done, but that some
    clients have evaluated the first."""
    simulation = start(text)
    simulation.sites("abcd")
    while len(simulation.record.commits) < 4:
        command = simulation.queue.popleft()
        if isinstance(command.fact, f.Evaluated | f.ClientEvaluated) and command.fact.segment:
            num_done -= 1
            if num_done < 0:
                continue
        simulation.tell(command)
    halt(simulation)
    assert not simulation.facts(f.Evaluated)
    return simulation


@pytest.mark.parametrize(
    ("strategy", "changes", "segment"), [(FEDERATED, {}, 1), (SILOS, {}, 2), (FEDERATED, WARD, 2)]
)
def test_an_evaluation_that_is_still_owed_to_a_kept_commit_is_made(
    strategy: dict[str, Any], changes: dict[str, Any], segment: int
) -> None:
    text = job_text({**strategy, "rounds": 4}, retention=8, evaluation=EVALUATED, **changes)
    undisturbed = start(text)
    undisturbed.sites("abcd")
    undisturbed.run()
    simulation = with_late_evaluations(text, len(changes))
    simulation.tell(c.ResumeRun(RUN, from_segment=segment))
    simulation.crash()
    simulation.complete()
    run = simulation.record
    assert run.commits == undisturbed.record.commits
    assert all(commit.metrics for commit in run.commits[1:])
    evaluated = sorted(fact.segment for fact in simulation.facts(f.Evaluated))
    assert evaluated == [1, 2, 3, 4], "each once"


def test_the_steps_that_were_skipped_up_to_the_commit_count_on() -> None:
    simulation = stopped(LOCAL)
    before = {each.segment: each.metrics for each in simulation.record.commits}
    simulation.tell(c.ResumeRun(RUN, from_segment=1))
    simulation.run()
    after = {each.segment: each.metrics for each in simulation.record.commits}
    assert after[2] == before[2]
    assert after[2][f.SKIPPED_STEPS] == 2.0


@pytest.mark.parametrize("segment", [1, 2])
def test_the_steps_that_clients_skipped_up_to_the_commit_count_on(segment: int) -> None:
    """Each client skips one step, in every round but the second."""
    simulation = start(job_text({**FEDERATED, "rounds": 4}, retention=8, evaluation=EVALUATED), "a")

    def go_on(num_commits: int) -> dict[int, float]:
        while simulation.queue and len(simulation.record.commits) < num_commits:
            command = simulation.queue.popleft()
            fact = command.fact
            if isinstance(fact, f.UpdateReceived) and fact.round_num != 2:
                fact = fact.model_copy(update={"metrics": {f.SKIPPED_STEPS: 1.0}})
            simulation.tell(replace(command, fact=fact))
        return {
            each.segment: each.metrics[f.SKIPPED_STEPS] for each in simulation.record.commits[1:]
        }

    assert go_on(4) == {1: 4.0, 2: 4.0, 3: 8.0}
    halt(simulation)
    simulation.tell(c.ResumeRun(RUN, from_segment=segment))
    simulation.crash()
    assert go_on(99) == {1: 4.0, 2: 4.0, 3: 8.0, 4: 12.0}
    assert simulation.record.metrics[f.SKIPPED_STEPS] == 12.0


@pytest.mark.parametrize("segment", [3, 99])
def test_a_commit_that_is_not_kept_is_refused_with_those_that_are(segment: int) -> None:
    refusal = stopped(LOCAL).refusal(c.ResumeRun(RUN, from_segment=segment))
    assert refusal.kind is c.RefusalKind.PRECONDITION
    assert refusal.reason == (
        f"segment {segment} is no kept commit of run 'run-1'; kept are 0, 1, 2"
    )


def test_only_what_is_retained_may_be_named_and_of_a_population_the_last_commit() -> None:
    simulation = stopped(LOCAL, retention=1, num_commits=3)
    kept = [commit.segment for commit in retained(simulation.record)]
    refusal = simulation.refusal(c.ResumeRun(RUN, from_segment=0))
    assert refusal.reason.endswith(f"kept are {', '.join(map(str, kept))}")
    simulation.tell(c.ResumeRun(RUN, from_segment=kept[-1]))
    simulation.complete()
    simulation = stopped(population(2), num_commits=2, **POPULATION_SECTIONS)
    kept = [commit.segment for commit in retained(simulation.record)]
    refusal = simulation.refusal(c.ResumeRun(RUN, from_segment=kept[0]))
    assert "goes on from its last commit (" in refusal.reason


def test_the_fact_reads_and_sounds_as_it_should() -> None:
    fact = f.RunResumed(by="alice", from_segment=2, step=8)
    assert sentence(fact) == "resumed from commit 2 at step 8 by alice"
    assert decode(*encode(fact)[:1], 1, encode(fact)[1]) == fact
    assert decode("RunResumed", 1, '{"by": "bob"}') == f.RunResumed(by="bob")
    assert sentence(f.RunResumed()) == "resumed from the last commit"


def test_a_strategy_that_knows_no_way_back_is_given_the_commit_as_any_other_state() -> None:
    """What it counts begins anew; the commit that it goes on from is the one that was asked for."""
    assert local.nesting is not None
    nesting = replace(local.nesting, returned=None)
    simulation = start(
        job_text(LOCAL, epochs=4), "a", strategies=with_local(replace(local, nesting=nesting))
    )
    while len(simulation.record.commits) < 3:
        simulation.step()
    simulation.tell(c.CancelRun(RUN))
    simulation.run()
    simulation.tell(c.ResumeRun(RUN, from_segment=1))
    assert segments(simulation) == [1], "the state before it was not retained, and is deleted"
    simulation.complete()
    assert segments(simulation) == [1, 2, 3, 4]


# ---- from a commit of another run ----


COUNTED = {"stop.best": 0.05, "stop.evaluations_without_improvement": 1.0, f.SKIPPED_STEPS: 3.0}


def initial(step: int, **metrics: float) -> dict[str, Any]:
    found = {"digest": digest("old"), "resume": True, "step": step}
    return {**found, "metrics": metrics} if metrics else found


def resumed(text: str, segment: int, step: int) -> Simulation:
    """Until the model is built, as the effect reports it for such a job."""
    simulation = start(text, *"abc")
    while not isinstance(simulation.queue[0].fact, f.ModelBuilt):
        simulation.step()
    named = {"digest": digest("old"), "segment": segment, "step": step}
    simulation.report(simulation.queue.popleft().fact.model_copy(update=named))
    return simulation


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP], ids=["Local", "DP", "Gossip"])
def test_segments_are_those_after_the_step(strategy: dict[str, Any]) -> None:
    text = job_text(strategy, initial=initial(13, **COUNTED), checkpoint={"every": "4 steps"})
    simulation = resumed(text, 0, 13)
    (effect,) = (each for each in pending(simulation.state) if isinstance(each, RunSegment))
    assert (effect.base.step, effect.base.digest, effect.to_step) == (13, digest("old"), 16)
    assert effect.num_skipped == 3
    simulation.crash()
    simulation.run()
    assert [fact.step for fact in simulation.facts(f.SegmentCommitted)] == [16, 20]
    run = simulation.record
    assert (run.commits[0].step, run.commits[0].metrics) == (13, COUNTED)
    assert run.reason == "20 steps committed"


def test_what_was_counted_goes_on() -> None:
    """One evaluation without an improvement is behind the commit, so that one more ends it."""
    stop = {"split": "test", "metrics": ["accuracy"], "best": "accuracy", "mode": "min"}
    evaluation = {**stop, "every": "5 steps", "stop": {"patience": 2}}
    text = job_text(LOCAL, initial=initial(55, **COUNTED), evaluation=evaluation, epochs=9)
    simulation = resumed(text, 0, 55)
    simulation.run()
    assert [fact.step for fact in simulation.facts(f.StoppedEarly)] == [60]


@pytest.mark.parametrize("strategy", [FEDERATED, silos(2)], ids=["Federated", "silos"])
def test_rounds_keep_their_numbers(strategy: dict[str, Any]) -> None:
    simulation = resumed(job_text({**strategy, "rounds": 7}, initial=initial(4, **COUNTED)), 4, 4)
    for each in simulation.due(TrainClient):
        assert (each.round_num, each.base.digest) == (5, digest("old"))
    simulation.complete()
    assert [it.segment for it in simulation.facts(f.SegmentCommitted) if not it.party] == [5, 6, 7]
    first = simulation.record.commits[0]
    assert (first.segment, first.metrics) == (4, COUNTED)


def test_a_silo_knows_nothing_of_it() -> None:
    plain = job_text(silos(2), initial={"digest": digest("old")})
    assert client_job(JobSpec.from_json(plain), 0, 1).initial is not None
    text = job_text(silos(2), initial=initial(2))
    assert client_job(JobSpec.from_json(text), 0, 1).initial is None


YOGI = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}


@pytest.mark.parametrize(
    ("strategy", "sections", "said"),
    [
        (LOCAL, {"digest": digest("o"), "resume": True}, "initial.step: missing"),
        (LOCAL, {"file": "a.safetensors", "resume": True}, "initial.resume: is"),
        (LOCAL, {"digest": digest("old"), "step": 3}, "initial.step: has a mean"),
        (LOCAL, {"run": "old", "metrics": {}}, "initial.metrics: has a meaning"),
        (LOCAL, {**initial(1), "metrics": {"stop.best": "x"}}, "initial.metrics: stop.best is 'x'"),
        (FEDERATED, initial(3), "strategy.rounds: 3 must be more than the 3"),
        ({**FEDERATED, "aggregation": YOGI}, initial(1), "not possible with Fed"),
        (population(), initial(1), "is not possible under PopulationBased"),
        (
            {"type": "Custom", "coordinator": "mine", "config": {}},
            initial(1),
            "is not possible under Custom",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    strategy: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    assert said in refusal(job_text(strategy, initial=sections))


def test_what_trains_nothing_is_not_resumed_and_steps_must_be_left() -> None:
    for text, said in (
        (evaluation_only(LOCAL, initial=initial(1)), "initial.resume: execution.gradient is None"),
        (job_text(LOCAL, initial=initial(9), epochs=None, steps=9), "steps: 9 must be more than"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            JobSpec.from_json(text)
