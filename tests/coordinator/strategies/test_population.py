"""Populations in the pure core: generations, losses, failures, inner strategies."""

from collections.abc import Sequence
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import Refusal, RefusalKind, Report
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.effects import Build, RunSegment
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import live_blobs
from stratagem.coordinator.core.run_view import view_of
from stratagem.coordinator.core.state import retained
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies.population.run import Failures
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    FEDERATED,
    POPULATION_SECTIONS,
    check_at_submit,
    job_text,
    population,
)
from tests.coordinator.core.simulation import RUN, Simulation, member, rejected, start

pytestmark = pytest.mark.core


def spec(**changes: Any) -> str:
    return job_text(population(**changes), **POPULATION_SECTIONS)


def closed(simulation: Simulation) -> list[f.GenerationClosed]:
    return simulation.facts(f.GenerationClosed)


INNER = {
    "Local": None,
    "DataParallel": {**DATA_PARALLEL, "num_replicas": 2},
    "Federated": {**FEDERATED, "num_clients": 3, "rounds": 2},
}
ERROR = f.ErrorRecord(type="E", message="m", traceback="t", worker_id="a", activity="step")
BY_LOSS = {
    **POPULATION_SECTIONS,
    "evaluation": {"metrics": ["accuracy"], "best": "loss"},
    "steps_per_generation": 2,
}


def failed(number: int, reason: str = "E: m", error: f.ErrorRecord | None = None) -> f.PartyFailed:
    return f.PartyFailed(party=Party(f"member{number}"), reason=reason, error=error)


@pytest.mark.parametrize("inner", INNER)
def test_generations_go_by_and_each_is_a_commit(inner: str) -> None:
    metric = "loss" if inner == "Federated" else "accuracy"
    sections = {**BY_LOSS, "evaluation": {"metrics": ["accuracy"], "best": metric}}
    simulation = start(job_text(population(inner=INNER[inner]), **sections), "a", "b", "c")
    simulation.complete()
    run = simulation.record
    assert [commit.segment for commit in run.commits] == [1, 2, 3]
    assert [len(fact.scores) for fact in closed(simulation)] == [4, 4, 4]
    assert [len(fact.copied) for fact in closed(simulation)] == [1, 1, 0]
    assert closed(simulation)[-1].step == 6
    assert run.is_reproducible


def test_members_share_the_workers_and_a_report_of_no_member_is_refused() -> None:
    due = start(spec(size=5), "a", "b").due(Build)
    assert len(due) == 5  # five builds on two workers
    assert sorted(sum(e.member == member(name) for e in due) for name in "ab") == [2, 3]
    answer = start(spec(), "a").refusal(failed(9))
    assert answer == Refusal(RefusalKind.STALE, "there is no party 'member9'")


def test_a_copy_has_state_and_hyperparameters_of_its_donor_under_a_new_lineage() -> None:
    simulation = start(spec(generations=2), "a")
    simulation.until(f.GenerationClosed)
    (copied,) = closed(simulation)[0].copied
    segments = {e.party: e for e in simulation.due(RunSegment)}
    assert len(segments) == 4
    for number in range(4):
        effect = segments[Party(f"member{number}")]
        is_copy = number == copied.member
        assert (effect.segment, effect.to_step) == (2, 10)
        assert effect.lineage == int(is_copy)
        # The rows of a member are those of its own seed, whoever it copies.
        assert effect.base.streams == f"of member{number} after 5"
        if is_copy:
            assert (effect.base.digest, effect.base.step) == (copied.digest, 5)
            assert copied.digest in live_blobs(simulation.state)
    donor_lr = simulation.fact(f.PopulationFormed).params[copied.donor]["optimizer.lr"]
    assert 0.8 * donor_lr <= copied.params["optimizer.lr"] <= 1.2 * donor_lr
    committed = [it for it in simulation.facts(f.SegmentCommitted) if it.segment == 1]
    donor = [fact.digest for fact in committed if fact.party == f"member{copied.donor}"]
    assert [copied.digest] == donor


# ---- members that fail ----


@pytest.mark.parametrize("has_state", [True, False])
def test_a_member_that_fails_is_replaced_and_the_run_goes_on(has_state: bool) -> None:
    simulation = start(spec(), "a", "b")
    if has_state:
        simulation.until(f.SegmentCommitted, 2)
    simulation.report(failed(3, error=ERROR))
    simulation.complete()
    first, second, _ = closed(simulation)
    assert first.scores[3] is None
    assert [copied.member for copied in first.copied] == [3]
    assert second.scores[3] is not None


def test_a_population_without_a_valid_member_fails_with_the_commonest_reason() -> None:
    simulation = start(spec(size=4), "a")
    for number, why in enumerate(("other", "width: 3", "width: 5", "width: 7")):
        simulation.report(failed(number, why, ERROR if number else None))
    run = simulation.record
    assert run.ended is RunPhase.FAILED
    assert run.reason == (
        "generation 1: no member is valid; 3 of 4 members failed alike: width: 3; the reason seems "
        "to be the job's"
    )
    assert run.error == ERROR
    assert len(simulation.facts(f.RunFailed)) == 1


def test_members_that_fail_are_told_of_in_the_result_and_judged_where_they_fail_alike() -> None:
    """The run completes, since some are valid; but whoever looks at it sees what went wrong."""
    simulation = start(spec(generations=2), "a", "b")
    assert "failure" not in simulation.reason
    one = simulation.fork()
    simulation.report(*(failed(n, f"state.{n}.weight: is too wide") for n in (1, 3)))
    told = (
        "2 failures of members, most often 2 of 4 members failed alike: state.1.weight: is too "
        "wide; the reason seems to be the job's"
    )
    assert told in simulation.reason
    simulation.crash()
    simulation.complete()
    run = simulation.record
    assert run.reason.startswith("2 generations committed; member 0 is best, with ")
    assert run.reason.endswith(f"; {told}")
    one.report(failed(2))
    one.run()
    assert one.record.reason.endswith("; 1 failure of members, most often E: m")


# ---- what the result was trained with ----


def settings(simulation: Simulation) -> dict[int, tuple[int | None, list[tuple[int, Any]]]]:
    """Of the kept commits, by segment: the member, and what it was trained with from which step."""
    view = view_of(world_of(simulation.state), simulation.record, 0.0)
    return {
        commit.segment: (
            commit.member,
            [(each.from_step, each.values["optimizer.lr"]) for each in commit.schedule],
        )
        for commit in view.commits
    }


def lineages(simulation: Simulation) -> dict[int, list[tuple[int, Any]]]:
    """What each member's state has been trained with, told from the facts alone."""
    formed = simulation.fact(f.PopulationFormed)
    assert isinstance(formed, f.PopulationFormed)
    found = {m: [(0, each["optimizer.lr"])] for m, each in enumerate(formed.params)}
    for fact in closed(simulation):
        before = {member: list(each) for member, each in found.items()}
        for copied in fact.copied:
            now = (copied.step, copied.params["optimizer.lr"])
            found[copied.member] = [*before[copied.donor], now]
    return found


def test_a_commit_says_whose_it_is_and_what_it_was_trained_with() -> None:
    text = job_text(population(generations=4), **POPULATION_SECTIONS, retention=2)
    simulation = start(text, "a", "b")
    while (run := simulation.record).ended is None:
        told = len(closed(simulation))
        expected = lineages(simulation)
        simulation.step()
        if len(closed(simulation)) > told:
            newest = closed(simulation)[-1]
            member, schedule = settings(simulation)[newest.generation]
            assert (member, schedule) == (newest.best, expected[newest.best])
            assert schedule[-1][1] == newest.params["optimizer.lr"]
    assert any(len(schedule) > 1 for schedule in lineages(simulation).values())
    assert settings(simulation).keys() == {commit.segment for commit in retained(run)}
    assert all(schedule for _, schedule in settings(simulation).values())
    last = closed(simulation)[-1]
    best = f"member {last.best} is best"
    values = f"optimizer.lr {last.params['optimizer.lr']:.6g}"
    assert run.reason == f"4 generations committed; {best}, with {values}"
    assert sentence(last).endswith(f"; {best} with {values}")
    before = settings(simulation)
    simulation.crash()
    assert settings(simulation) == before


def test_a_copy_has_the_schedule_of_its_donor() -> None:
    """The best member fails, so its place is taken by a copy of another one, which becomes best."""
    simulation = start(spec(size=2, generations=3), "a", "b")
    simulation.report(failed(0, "no model"))
    simulation.run()
    first, second, _ = closed(simulation)
    (copied,) = first.copied
    assert (copied.member, copied.donor) == (0, 1)
    donor_lr = simulation.fact(f.PopulationFormed).params[1]["optimizer.lr"]
    expected = [(0, donor_lr), (5, copied.params["optimizer.lr"])]
    of_second = settings(simulation)[2]
    assert of_second == ((0, expected) if second.best == 0 else (1, expected[:1]))
    assert 0 in {member for member, _ in settings(simulation).values()}


def test_asynchronous_members_do_not_wait_and_say_what_their_state_was_trained_with() -> None:
    """Member 0 is two generations ahead while the others have not begun."""
    simulation = start(spec(asynchronous=True), "a", "b")
    while first := [c for c in simulation.queue if c.fact.party.startswith("member0")]:  # type: ignore[union-attr]
        simulation.queue.remove(first[0])
        simulation.tell(first[0])
    evolved = simulation.facts(f.MemberEvolved)
    assert [(it.member, it.generation) for it in evolved] == [(0, 1), (0, 2), (0, 3)]
    assert not closed(simulation)
    simulation.run()
    assert [fact.generation for fact in closed(simulation)] == [1, 2, 3]
    assert not simulation.record.is_reproducible
    for fact in closed(simulation):
        if fact.generation in settings(simulation):
            _, schedule = settings(simulation)[fact.generation]
            assert schedule[-1][1] == fact.params["optimizer.lr"]
            assert all(step < fact.step for step, _ in schedule)


# ---- members that are federations, scores that are none, and nobody to copy ----


def test_rejected_clients_of_all_members_are_named_in_the_last_sentence() -> None:
    half = {"method": "Truncation", "fraction": 0.5}
    strategy = population(2, 2, INNER["Federated"], half)
    simulation = start(job_text(strategy, **BY_LOSS), "a", "b")
    while simulation.queue:  # whatever the client of any member sends is rejected
        fact = simulation.queue.popleft().fact
        if isinstance(fact, f.UpdateReceived) and fact.client == 1:
            of = {"party": fact.party}
            fact = rejected(1, cause=Cause.UNKNOWN, round_num=fact.round_num).model_copy(update=of)
        simulation.tell(Report(RUN, fact))
    run = simulation.record
    assert run.ended is RunPhase.COMPLETED
    assert any(fact.copied for fact in closed(simulation))  # what a copy leaves behind counts, too
    # 2 members, 2 generations, 2 rounds each
    assert run.reason.endswith("; rejected: client 1 in 8 rounds (KeyError: 'label')")
    simulation.crash()


def test_members_train_with_phases_of_their_own() -> None:
    space = {
        "phases.trust": {"low": 0.5, "high": 2.0},
        "phases.predictor.decay": {"choices": [0.8, 0.9], "ordered": True},
    }
    sections = {**POPULATION_SECTIONS, "search_space": space}
    with pytest.raises(InvalidInputError, match="the job has no phases; add that section"):
        check_at_submit(job_text(population(), **sections))
    simulation = start(job_text(population(), **sections, phases={"full_steps": 3}), "a", "b")
    simulation.complete()
    run = simulation.record
    seen = [member.child.job.phases for member in run.value.members]
    assert {each.full_steps for each in seen} == {3}
    assert len({each.trust for each in seen}) > 1
    assert {each.predictor.decay for each in seen} <= {0.8, 0.9}


def test_a_score_that_is_no_number_is_no_score() -> None:
    """Its member copies another one; a metric that is not there at all is no score either."""
    simulation, none = start(spec(), "a", "b"), start(spec(size=2), "a", "b")
    none.report(failed(0))

    def measure(simulation: Simulation, metrics: dict[str, float], members: Sequence[str]) -> None:
        fact = simulation.queue.popleft().fact
        if isinstance(fact, f.SegmentFinished | f.SegmentCommitted) and fact.party in members:
            fact = fact.model_copy(update={"metrics": metrics})
        simulation.tell(Report(RUN, fact))

    while not closed(simulation):
        measure(simulation, {"test.accuracy": float("nan")}, ["member0"])
    first = closed(simulation)[0]
    assert first.scores[0] is None
    assert [each.member for each in first.copied] == [0]
    simulation.complete()
    while none.record.ended is None:
        measure(none, {}, ["member0", "member1"])
    assert none.record.ended is RunPhase.FAILED
    assert none.record.reason == "generation 1: no member is valid; E: m"


def test_a_member_that_fails_and_finds_nobody_to_copy_tries_again_from_its_last_commit() -> None:
    """Each looks at one other member, which may have failed as well."""
    binary = {"method": "Binary", "threshold": 0.0}
    simulation = start(job_text(population(3, 3, exploit=binary), **POPULATION_SECTIONS), "a")
    simulation.until(f.GenerationClosed)
    own = {each.party: each.base.digest for each in simulation.due(RunSegment)}
    simulation.report(failed(0), failed(1))
    simulation.until(f.GenerationClosed, 2)
    second = closed(simulation)[1]
    assert second.scores[:2] == (None, None)
    alone = {0, 1} - {each.member for each in second.copied}
    assert alone, "the streams of these members draw each other"
    again = {each.party: each for each in simulation.due(RunSegment)}
    for party in (Party(f"member{number}") for number in alone):
        assert (again[party].segment, again[party].base.digest) == (3, own[party])
    simulation.complete()


def test_members_without_workers_are_told_of_beside_those_that_are_done() -> None:
    simulation = start(spec(size=2), "a", "b")
    while not simulation.facts(f.SegmentCommitted):
        mine = [each for each in simulation.queue if getattr(each.fact, "party", "") == "member0"]
        simulation.queue.remove(mine[0])
        simulation.tell(mine[0])
    simulation.lose("ab")
    assert simulation.phase is RunPhase.RECOVERING
    assert simulation.reason == (
        "generation 1: 1 of 2 members have a score; waiting for 1 of 1 workers: "
        "no worker is available: a (killed), b (killed)"
    )


def test_of_many_kinds_of_failure_the_first_are_kept_and_all_are_counted() -> None:
    failures = Failures()
    for number in range(100):
        fact = failed(number, f"reason {'x' * number}")
        failures = failures.with_one(number, fact)
        failures = failures.with_one(0, fact) if number == 3 else failures
    assert failures.num_failures == 101
    assert 4 < len(failures.kinds) < 100
    commonest = failures.commonest()
    assert commonest is not None
    assert (commonest.reason, set(commonest.members)) == ("reason xxx", {0, 3})
