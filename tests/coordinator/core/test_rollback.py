"""A run goes on from an earlier one of its kept commits: what followed happens anew."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

from stratagem.coordinator.core.commands import (
    CancelRun,
    Refusal,
    RefusalKind,
    Report,
    ResumeRun,
)
from stratagem.coordinator.core.effects import EvaluateState
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    ClientEvaluated,
    Evaluated,
    RunResumed,
    SegmentCommitted,
    UpdateReceived,
)
from stratagem.coordinator.core.facts.fact_serialization import decode, encode
from stratagem.coordinator.core.state import RunPhase, retained
from stratagem.coordinator.core.state_machine.blob_owners import is_shared
from stratagem.coordinator.core.state_machine.pending_effects import blobs_of, live_blobs
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.strategies.federated import round_effects
from stratagem.coordinator.strategies.synchronous.local import STRATEGY as local
from stratagem.coordinator.updates.spool_keys import SpoolKey
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    EVALUATION,
    FEDERATED,
    GOSSIP,
    LOCAL,
    job_text,
    silos,
)
from tests.coordinator.core.raising_strategies import with_local
from tests.coordinator.core.simulation import RUN, Simulation, digest, register, start

pytestmark = pytest.mark.core

YOGI = {
    **FEDERATED,
    "aggregation": {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.001},
}
SILOS = {**FEDERATED, "num_clients": 2, "options": {"inner": {"type": "Local"}}}
POPULATION = {
    "type": "PopulationBased",
    "population_size": 2,
    "generations": 3,
    "exploit": {"method": "Truncation", "fraction": 0.5},
    "explore": {"method": "Perturbation", "factor": 0.2},
}


def stopped(strategy: Mapping[str, object], num_commits: int = 3, **changes: object) -> Simulation:
    """A run that was stopped, and that nobody holds, after so many commits."""
    changes.setdefault("retention", 8)
    if strategy["type"] not in ("Federated", "PopulationBased"):
        changes.setdefault("evaluation", {**EVALUATION, "every": "4 steps"})
        changes.setdefault("epochs", 5)
    simulation = start(job_text(strategy, **changes), "a", "b")
    while len(simulation.state.runs[RUN].commits) < num_commits:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN))
    simulation.queue.clear()
    simulation.seen.clear()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    assert simulation.state.runs[RUN].is_released
    return simulation


def segments(simulation: Simulation) -> list[int]:
    return [commit.segment for commit in simulation.state.runs[RUN].commits]


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP, FEDERATED, silos()])
def test_it_goes_on_from_there_and_ends_as_it_would_have(strategy: dict[str, object]) -> None:
    simulation = stopped(strategy)
    before = simulation.state.runs[RUN]
    assert segments(simulation)[:3] == [0, 1, 2]
    simulation.tell(ResumeRun(RUN, "alice", from_segment=1))
    run = simulation.state.runs[RUN]
    assert (run.ended, segments(simulation)) == (None, [0, 1])
    assert before.commits[2].digest not in live_blobs(simulation.state)
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    assert segments(simulation) == list(range(len(segments(simulation))))
    committed = [f.segment for f in simulation.facts(SegmentCommitted) if not f.party]
    assert committed.count(2) == 2
    assert run.is_reproducible
    simulation.crash()
    assert simulation.state.runs[RUN].commits == run.commits


def test_updates_of_a_round_that_happens_anew_are_no_repetition() -> None:
    simulation = stopped(FEDERATED)
    simulation.tell(ResumeRun(RUN, from_segment=1))
    entries = []
    while simulation.queue and simulation.state.runs[RUN].ended is None:
        answer = simulation.tell(simulation.queue.popleft())
        entries += [] if isinstance(answer, Refusal) else list(answer)
    keys = [entry.key for entry in entries if isinstance(entry.fact, UpdateReceived)]
    assert keys
    assert all(key is not None and key.endswith("/1") for key in keys)
    assert len(set(keys)) == len(keys)


def test_updates_of_a_round_that_happens_anew_lie_elsewhere_in_the_spool() -> None:
    """The old ones, of other states perhaps, are deleted later, or never if that crashes."""
    simulation = stopped(FEDERATED)
    party = simulation.state.runs[RUN].value.party

    def key() -> SpoolKey:
        return EffectContext.spool_key(cast(EffectContext, simulation), RUN, party, 2, 0)

    before = key()
    simulation.tell(ResumeRun(RUN, from_segment=1))
    assert key() != before
    after = key()
    simulation.crash()
    assert key() == after


def test_moments_of_a_server_optimizer_begin_anew_and_that_is_said() -> None:
    simulation = stopped(FEDERATED)
    run = simulation.state.runs[RUN]
    value = replace(run.value, server_state=(digest("moments"),))
    simulation.state = replace(simulation.state, runs={RUN: replace(run, value=value)})
    simulation.tell(ResumeRun(RUN, from_segment=1))
    run = simulation.state.runs[RUN]
    assert (run.value.server_state, run.is_reproducible) == ((), False)
    (fact,) = simulation.facts(RunResumed)
    assert sentence(fact) == (
        "resumed from commit 1 at step 1; what else its strategy keeps begins again"
    )


def test_a_commit_has_the_average_of_its_parameters() -> None:
    """A rollback counts on from it, and evaluates it again."""
    evaluation = {**EVALUATED, "of": "average"}
    simulation = stopped(FEDERATED, weight_average={"kind": "ema"}, evaluation=evaluation)
    run = simulation.state.runs[RUN]
    average = digest("average")
    commits = tuple(replace(commit, average=average) for commit in run.commits)
    simulation.state = replace(simulation.state, runs={RUN: replace(run, commits=commits)})
    simulation.tell(ResumeRun(RUN, from_segment=1))
    run = simulation.state.runs[RUN]
    assert (run.value.committed.average, run.is_reproducible) == (average, True)
    assert average in blobs_of(run)
    assert is_shared(simulation.state, average)
    owed = replace(run.value, to_evaluate=(run.value.committed,))
    due = round_effects.pending(RUN, run.job, owed, None)
    assert [each.base.digest for each in due if isinstance(each, EvaluateState)] == [average]


EVALUATED = {"split": "test", "metrics": []}
WARD = {"data": {"worker_local": "ward"}, "evaluation": EVALUATED}


def with_late_evaluations(strategy: dict[str, object], **changes: object) -> Simulation:
    """A run that was stopped after three rounds: of none the evaluation was done, but that some
    clients have evaluated the first."""
    simulation = start(job_text(strategy, retention=8, **{"evaluation": EVALUATED, **changes}))
    for name in "abcd":
        simulation.tell(register(name, local_data=("ward",)))
    num_left = 1 if "data" in changes else 0
    while len(simulation.state.runs[RUN].commits) < 4:
        command = simulation.queue.popleft()
        fact = command.fact if isinstance(command, Report) else None
        if isinstance(fact, Evaluated | ClientEvaluated) and fact.segment:
            num_left -= 1
            if num_left < 0:
                continue
        simulation.tell(command)
    simulation.tell(CancelRun(RUN))
    simulation.queue.clear()
    simulation.seen.clear()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    assert not simulation.facts(Evaluated)
    return simulation


@pytest.mark.parametrize(("strategy", "changes"), [(FEDERATED, {}), (SILOS, {}), (FEDERATED, WARD)])
@pytest.mark.parametrize("segment", [1, 2])
def test_an_evaluation_that_is_still_owed_to_a_kept_commit_is_made(
    strategy: dict[str, object], changes: dict[str, object], segment: int
) -> None:
    strategy = {**strategy, "rounds": 4}
    undisturbed = start(job_text(strategy, retention=8, **{"evaluation": EVALUATED, **changes}))
    for name in "abcd":
        undisturbed.tell(register(name, local_data=("ward",)))
    undisturbed.run()
    simulation = with_late_evaluations(strategy, **changes)
    simulation.tell(ResumeRun(RUN, from_segment=segment))
    simulation.crash()
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    assert run.commits == undisturbed.state.runs[RUN].commits
    assert [commit.metrics for commit in run.commits[1:]] == [
        commit.metrics for commit in undisturbed.state.runs[RUN].commits[1:]
    ]
    assert all(commit.metrics for commit in run.commits[1:])
    evaluated = sorted(fact.segment for fact in simulation.facts(Evaluated))
    assert evaluated == [1, 2, 3, 4], "each once"


def test_the_steps_that_were_skipped_up_to_the_commit_count_on() -> None:
    simulation = stopped(LOCAL)
    before = {each.segment: each.metrics for each in simulation.state.runs[RUN].commits}
    simulation.tell(ResumeRun(RUN, from_segment=1))
    simulation.run()
    after = {each.segment: each.metrics for each in simulation.state.runs[RUN].commits}
    assert after[2] == before[2]
    assert after[2][SKIPPED_STEPS] == 2.0


@pytest.mark.parametrize("segment", [1, 2])
def test_the_steps_that_clients_skipped_up_to_the_commit_count_on(segment: int) -> None:
    """Each client skips one step, in every round but the second."""
    simulation = start(job_text({**FEDERATED, "rounds": 4}, retention=8, evaluation=EVALUATED), "a")

    def go_on(num_commits: int) -> dict[int, float]:
        while simulation.queue and len(simulation.state.runs[RUN].commits) < num_commits:
            command = simulation.queue.popleft()
            fact = command.fact
            if isinstance(fact, UpdateReceived) and fact.round_num != 2:
                fact = fact.model_copy(update={"metrics": {SKIPPED_STEPS: 1.0}})
            simulation.tell(replace(command, fact=fact))
        commits = simulation.state.runs[RUN].commits[1:]
        return {commit.segment: commit.metrics[SKIPPED_STEPS] for commit in commits}

    assert go_on(4) == {1: 4.0, 2: 4.0, 3: 8.0}
    simulation.tell(CancelRun(RUN))
    simulation.queue.clear()
    simulation.seen.clear()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN, from_segment=segment))
    simulation.crash()
    assert go_on(99) == {1: 4.0, 2: 4.0, 3: 8.0, 4: 12.0}
    assert simulation.state.runs[RUN].metrics[SKIPPED_STEPS] == 12.0


@pytest.mark.parametrize("segment", [3, 99])
def test_a_commit_that_is_not_kept_is_refused_with_those_that_are(segment: int) -> None:
    simulation = stopped(LOCAL)
    before = simulation.state
    refusal = simulation.tell(ResumeRun(RUN, from_segment=segment))
    assert isinstance(refusal, Refusal)
    assert refusal.kind is RefusalKind.PRECONDITION
    assert refusal.reason == (
        f"segment {segment} is no kept commit of run 'run-1'; kept are 0, 1, 2"
    )
    assert simulation.state is before


def test_the_last_commit_may_be_named_and_what_is_not_retained_may_not() -> None:
    simulation = stopped(LOCAL, retention=1, num_commits=3)
    kept = [commit.segment for commit in retained(simulation.state.runs[RUN])]
    refusal = simulation.tell(ResumeRun(RUN, from_segment=0))
    assert isinstance(refusal, Refusal)
    assert refusal.reason.endswith(f"kept are {', '.join(map(str, kept))}")
    simulation.tell(ResumeRun(RUN, from_segment=kept[-1]))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_a_population_keeps_only_its_best_member_of_a_generation() -> None:
    simulation = stopped(
        POPULATION,
        num_commits=2,
        search_space={"optimizer.lr": {"low": 0.01, "high": 1.0}},
        steps_per_generation=4,
        evaluation={**EVALUATION, "every": "1 generations"},
    )
    kept = [commit.segment for commit in retained(simulation.state.runs[RUN])]
    refusal = simulation.tell(ResumeRun(RUN, from_segment=kept[0]))
    assert isinstance(refusal, Refusal)
    assert "goes on from its last commit (" in refusal.reason


def test_the_fact_reads_and_sounds_as_it_should() -> None:
    fact = RunResumed(by="alice", from_segment=2, step=8)
    assert sentence(fact) == "resumed from commit 2 at step 8 by alice"
    assert decode(*encode(fact)[:1], 1, encode(fact)[1]) == fact
    assert decode("RunResumed", 1, '{"by": "bob"}') == RunResumed(by="bob")
    assert sentence(RunResumed()) == "resumed from the last commit"


def test_a_strategy_that_knows_no_way_back_is_given_the_commit_as_any_other_state() -> None:
    """What it counts begins anew; the commit that it goes on from is the one that was asked for."""
    assert local.nesting is not None
    nesting = replace(local.nesting, returned=None)
    simulation = start(
        job_text(LOCAL, epochs=4), "a", strategies=with_local(replace(local, nesting=nesting))
    )
    while len(simulation.state.runs[RUN].commits) < 3:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN, from_segment=1))
    assert segments(simulation) == [0, 1]
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert segments(simulation) == [0, 1, 2, 3, 4]
