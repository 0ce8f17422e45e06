"""Populations in the pure core: generations, losses, failures, inner strategies."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import LoseWorker, Refusal, RefusalKind, Report
from stratagem.coordinator.core.effects import RunSegment
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    Copied,
    ErrorRecord,
    GenerationClosed,
    MemberEvolved,
    MembersFormed,
    PartyFailed,
    PopulationFormed,
    RunFailed,
    SegmentCommitted,
    SegmentFinished,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.state import RunPhase, retained
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from stratagem.coordinator.core.state_machine.run_view import view_of
from stratagem.coordinator.core.state_machine.strategy_boundary import objections_to
from stratagem.coordinator.runtime.plugins import BUILT_IN
from stratagem.coordinator.strategies.population.member_failures import Failures
from tests.coordinator.core.jobs import POPULATION_SECTIONS, check_at_submit, job_text, population
from tests.coordinator.core.simulation import RUN, Simulation, member, phase, reason, start

pytestmark = pytest.mark.core


def spec(**changes: Any) -> str:
    return job_text(population(**changes), **POPULATION_SECTIONS)


def closed(simulation: Simulation) -> list[GenerationClosed]:
    return simulation.facts(GenerationClosed)


def train_until_two_are_done(simulation: Simulation) -> None:
    while len(simulation.facts(SegmentCommitted)) < 2:
        simulation.tell(simulation.queue.popleft())


INNER = {
    "Local": None,
    "DataParallel": {
        "type": "DataParallel",
        "num_replicas": 2,
        "aggregation": {"method": "AllReduce"},
    },
    "Federated": {
        "type": "Federated",
        "num_clients": 3,
        "rounds": 5,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
    },
}


@pytest.mark.parametrize("inner", INNER)
def test_generations_go_by_and_each_is_a_commit(inner: str) -> None:
    metric = "loss" if inner == "Federated" else "accuracy"
    sections = {**POPULATION_SECTIONS, "evaluation": {"metrics": ["accuracy"], "best": metric}}
    simulation = start(job_text(population(inner=INNER[inner]), **sections), "a", "b", "c")
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED, run.reason
    assert [commit.segment for commit in run.commits] == [1, 2, 3]
    assert [len(fact.scores) for fact in closed(simulation)] == [4, 4, 4]
    assert [len(fact.copied) for fact in closed(simulation)] == [1, 1, 0]
    assert closed(simulation)[-1].step == 15
    assert run.is_reproducible


def test_members_outnumber_the_workers_and_share_them() -> None:
    simulation = start(spec(size=5), "a", "b")
    due = [e for e in pending(simulation.state)]
    assert len(due) == 5  # five builds on two workers
    by_worker = {name: sum(e.member == member(name) for e in due) for name in "ab"}  # type: ignore[union-attr]
    assert sorted(by_worker.values()) == [2, 3]


def test_what_is_copied_is_state_and_hyperparameters() -> None:
    simulation = start(spec(generations=2), "a")
    (formed,) = simulation.facts(PopulationFormed)
    simulation.run()
    (copied,) = closed(simulation)[0].copied
    assert isinstance(copied, Copied)
    donor_lr = formed.params[copied.donor]["optimizer.lr"]
    assert 0.8 * donor_lr <= copied.params["optimizer.lr"] <= 1.2 * donor_lr
    digests = [
        fact.digest
        for fact in simulation.facts(SegmentCommitted)
        if fact.party == f"member{copied.donor}" and fact.segment == 1
    ]
    assert [copied.digest] == digests


def test_a_copy_begins_from_its_donor_under_a_new_lineage() -> None:
    simulation = start(spec(generations=2), "a")
    while not closed(simulation):
        simulation.tell(simulation.queue.popleft())
    (copied,) = closed(simulation)[0].copied
    segments = {e.party: e for e in pending(simulation.state) if isinstance(e, RunSegment)}
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_crash_after_any_command_ends_the_same(asynchronous: bool) -> None:
    undisturbed = start(spec(asynchronous=asynchronous), "a", "b")
    undisturbed.run()
    commits = undisturbed.state.runs[RUN].commits
    assert undisturbed.state.runs[RUN].is_reproducible is not asynchronous
    for after in range(0, 60, 7):
        simulation = start(spec(asynchronous=asynchronous), "a", "b")
        for _ in range(after):
            if simulation.queue:
                simulation.tell(simulation.queue.popleft())
        simulation.crash()
        simulation.run()
        if asynchronous:
            assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
        else:
            assert simulation.state.runs[RUN].commits == commits


def test_a_lost_worker_hands_its_members_over() -> None:
    undisturbed = start(spec(), "a", "b")
    undisturbed.run()
    simulation = start(spec(), "a", "b")
    train_until_two_are_done(simulation)
    simulation.tell(LoseWorker(member("b"), "gone"))
    simulation.run()
    assert simulation.state.runs[RUN].commits == undisturbed.state.runs[RUN].commits


def test_a_member_that_fails_is_replaced_and_the_run_goes_on() -> None:
    simulation = start(spec(), "a", "b")
    train_until_two_are_done(simulation)
    error = ErrorRecord(type="E", message="m", traceback="t", worker_id="a", activity="step")
    failed = PartyFailed(party=Party("member3"), reason="E: m", error=error)
    simulation.tell(Report(RUN, failed))
    simulation.run()
    first = closed(simulation)[0]
    assert first.scores[3] is None
    assert [copied.member for copied in first.copied] == [3]
    assert closed(simulation)[1].scores[3] is not None
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_a_member_that_fails_before_it_has_any_state_goes_on_from_its_donor() -> None:
    simulation = start(spec(), "a", "b")
    simulation.tell(Report(RUN, PartyFailed(party=Party("member0"), reason="no model")))
    simulation.run()
    assert closed(simulation)[0].copied[0].member == 0
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_a_population_without_a_valid_member_fails_with_the_commonest_reason() -> None:
    simulation = start(spec(size=4), "a")
    error = ErrorRecord(type="E", message="m", traceback="t", worker_id="a", activity="step")
    for number, why in enumerate(("other", "width: 3", "width: 5", "width: 7")):
        party = Party(f"member{number}")
        fact = PartyFailed(party=party, reason=why, error=error if number else None)
        simulation.tell(Report(RUN, fact))
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == (
        "generation 1: no member is valid; 3 of 4 members failed alike: width: 3; the reason seems "
        "to be the job's"
    )
    assert run.error == error
    assert len(simulation.facts(RunFailed)) == 1


def test_members_that_fail_alike_are_told_of_in_the_result() -> None:
    """The run completes, since some are valid; but whoever looks at it sees what went wrong."""
    simulation = start(spec(generations=2), "a", "b")
    assert "failure" not in shown(simulation)
    for number in (1, 3):
        fact = PartyFailed(
            party=Party(f"member{number}"), reason=f"state.{number}.weight: is too wide"
        )
        simulation.tell(Report(RUN, fact))
    told = (
        "2 failures of members, most often 2 of 4 members failed alike: state.1.weight: is too "
        "wide; the reason seems to be the job's"
    )
    assert told in shown(simulation)
    simulation.crash()
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    assert run.reason.startswith("2 generations committed; member 0 is best, with ")
    assert run.reason.endswith(f"; {told}")


def test_one_member_that_fails_is_told_of_without_a_judgement() -> None:
    simulation = start(spec(generations=2), "a", "b")
    simulation.tell(Report(RUN, PartyFailed(party=Party("member2"), reason="E: m")))
    simulation.run()
    reason = simulation.state.runs[RUN].reason
    assert reason.endswith("; 1 failure of members, most often E: m")


# ---- what the result was trained with ----


def settings(simulation: Simulation) -> dict[int, tuple[int | None, list[tuple[int, Any]]]]:
    """Of the kept commits, by segment: the member, and what it was trained with from which step."""
    view = view_of(world_of(simulation.state), simulation.state.runs[RUN], 0.0)
    return {
        commit.segment: (
            commit.member,
            [(each.from_step, each.values["optimizer.lr"]) for each in commit.schedule],
        )
        for commit in view.commits
    }


def lineages(simulation: Simulation) -> dict[int, list[tuple[int, Any]]]:
    """What each member's state has been trained with, told from the facts alone."""
    (formed,) = simulation.facts(PopulationFormed)
    assert isinstance(formed, PopulationFormed)
    found = {m: [(0, each["optimizer.lr"])] for m, each in enumerate(formed.params)}
    for fact in closed(simulation):
        before = {member: list(each) for member, each in found.items()}
        for copied in fact.copied:
            now = (copied.step, copied.params["optimizer.lr"])
            found[copied.member] = [*before[copied.donor], now]
    return found


def test_a_commit_says_whose_it_is_and_what_it_was_trained_with() -> None:
    simulation = start(
        job_text(population(generations=4), **POPULATION_SECTIONS, retention=2), "a", "b"
    )
    while (run := simulation.state.runs[RUN]).ended is None:
        told = len(closed(simulation))
        expected = lineages(simulation)
        simulation.tell(simulation.queue.popleft())
        if len(closed(simulation)) > told:
            newest = closed(simulation)[-1]
            member, schedule = settings(simulation)[newest.generation]
            assert (member, schedule) == (newest.best, expected[newest.best])
            assert schedule[-1][1] == newest.params["optimizer.lr"]
    assert any(len(schedule) > 1 for schedule in lineages(simulation).values())
    assert settings(simulation).keys() == {commit.segment for commit in retained(run)}
    assert all(schedule for _, schedule in settings(simulation).values())
    values = f"optimizer.lr {closed(simulation)[-1].params['optimizer.lr']:.6g}"
    best = closed(simulation)[-1].best
    assert run.reason == f"4 generations committed; member {best} is best, with {values}"
    assert sentence(closed(simulation)[-1]).endswith(f"; member {best} is best with {values}")
    before = settings(simulation)
    simulation.crash()
    assert settings(simulation) == before


def test_a_copy_has_the_schedule_of_its_donor() -> None:
    """The best member fails, so its place is taken by a copy of another one, which becomes best."""
    simulation = start(spec(size=2, generations=3), "a", "b")
    simulation.tell(Report(RUN, PartyFailed(party=Party("member0"), reason="no model")))
    simulation.run()
    first, second, _ = closed(simulation)
    (copied,) = first.copied
    assert (copied.member, copied.donor) == (0, 1)
    (formed,) = simulation.facts(PopulationFormed)
    donor_lr = formed.params[1]["optimizer.lr"]
    expected = [(0, donor_lr), (5, copied.params["optimizer.lr"])]
    of_second = settings(simulation)[2]
    assert of_second == ((0, expected) if second.best == 0 else (1, expected[:1]))
    assert 0 in {member for member, _ in settings(simulation).values()}


def test_asynchronous_members_say_what_the_committed_state_was_trained_with() -> None:
    simulation = start(spec(asynchronous=True), "a", "b")
    simulation.run()
    for fact in closed(simulation):
        if fact.generation in settings(simulation):
            _, schedule = settings(simulation)[fact.generation]
            assert schedule[-1][1] == fact.params["optimizer.lr"]
            assert all(step < fact.step for step, _ in schedule)


# ---- clients of members that are federations ----


def rejecting(simulation: Simulation, client: int) -> None:
    """Run to the end; whatever the client of any member sends is rejected."""
    while simulation.queue:
        command = simulation.queue.popleft()
        fact = command.fact if isinstance(command, Report) else None
        if isinstance(fact, UpdateReceived) and fact.client == client:
            said = UpdateRejected(
                party=fact.party,
                round_num=fact.round_num,
                client=client,
                reason="KeyError: 'label'",
            )
            command = Report(RUN, said)
        simulation.tell(command)


def test_rejected_clients_of_all_members_are_named_in_the_last_sentence() -> None:
    sections = {**POPULATION_SECTIONS, "evaluation": {"metrics": ["accuracy"], "best": "loss"}}
    simulation = start(job_text(population(inner=INNER["Federated"]), **sections), "a", "b")
    rejecting(simulation, client=1)
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    assert any(fact.copied for fact in closed(simulation))  # what a copy leaves behind counts, too
    # 4 members, 3 generations, 5 rounds each
    assert run.reason.endswith("; rejected: client 1 in 60 rounds (KeyError: 'label')")
    simulation.crash()
    assert simulation.state.runs[RUN].reason == run.reason


def shown(simulation: Simulation) -> str:
    run = simulation.state.runs[RUN]
    return run.strategy.status(run.job, run.value, world_of(simulation.state)).reason


def test_asynchronous_members_do_not_wait() -> None:
    """Member 0 is two generations ahead while the others have not begun."""
    simulation = start(spec(asynchronous=True), "a", "b")
    for _ in range(1000):
        first = [c for c in simulation.queue if c.fact.party.startswith("member0")]  # type: ignore[union-attr]
        if not first:
            break
        simulation.queue.remove(first[0])
        simulation.tell(first[0])
    evolved = simulation.facts(MemberEvolved)
    assert [(f.member, f.generation) for f in evolved] == [(0, 1), (0, 2), (0, 3)]
    assert not closed(simulation)
    simulation.run()
    assert [fact.generation for fact in closed(simulation)] == [1, 2, 3]
    assert not simulation.state.runs[RUN].is_reproducible


def test_members_train_with_phases_of_their_own() -> None:
    space = {
        "phases.trust": {"low": 0.5, "high": 2.0},
        "phases.predictor.decay": {"choices": [0.8, 0.9], "ordered": True},
    }
    sections = {**POPULATION_SECTIONS, "search_space": space}
    with pytest.raises(InvalidInputError, match="the job has no phases; add that section"):
        check_at_submit(job_text(population(), **sections))
    simulation = start(job_text(population(), **sections, phases={"full_steps": 3}), "a", "b")
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    seen = [member.child.job.phases for member in run.value.members]
    assert {each.full_steps for each in seen} == {3}
    assert len({each.trust for each in seen}) > 1
    assert {each.predictor.decay for each in seen} <= {0.8, 0.9}


def test_a_federated_member_has_as_many_rounds_as_a_generation_has_steps() -> None:
    inner = {**INNER["Federated"], "rounds": 4}  # type: ignore[dict-item]
    (violation,) = objections_to(JobSpec.from_json(spec(inner=inner)), BUILT_IN)
    assert str(violation) == (
        "strategy.options.inner.rounds: 4 is not steps_per_generation, 5; a federated member "
        "counts its steps in rounds"
    )


def test_a_report_of_no_member_is_refused() -> None:
    simulation = start(spec(), "a")
    answer = simulation.tell(Report(RUN, PartyFailed(party=Party("member9"), reason="E: m")))
    assert answer == Refusal(RefusalKind.STALE, "there is no party 'member9'")


def report_scores(simulation: Simulation, generation: int, **scores: float) -> None:
    """Until the end of a generation, in which these members measure this accuracy."""
    while len(closed(simulation)) < generation:
        report = simulation.queue.popleft()
        fact = report.fact
        if isinstance(fact, SegmentFinished | SegmentCommitted) and fact.party in scores:
            metrics = {**fact.metrics, "test.accuracy": scores[fact.party]}
            report = Report(RUN, fact.model_copy(update={"metrics": metrics}))
        simulation.tell(report)


def test_a_score_that_is_no_number_is_no_score() -> None:
    """Its member copies another one; a metric that is not there at all is no score either."""
    simulation = start(spec(), "a", "b")
    report_scores(simulation, 1, member0=float("nan"))
    first = closed(simulation)[0]
    assert first.scores[0] is None
    assert [each.member for each in first.copied] == [0]
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_without_any_score_the_run_fails_and_says_which_members_had_failed() -> None:
    simulation = start(spec(size=2), "a", "b")
    simulation.tell(Report(RUN, PartyFailed(party=Party("member0"), reason="E: m")))
    while simulation.state.runs[RUN].ended is None:
        report = simulation.queue.popleft()
        fact = report.fact
        if isinstance(fact, SegmentFinished | SegmentCommitted):
            report = Report(RUN, fact.model_copy(update={"metrics": {}}))
        simulation.tell(report)
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == "generation 1: no member is valid; E: m"


def test_a_member_that_fails_and_finds_nobody_to_copy_tries_again_from_its_last_commit() -> None:
    """Each looks at one other member, which may have failed as well."""
    binary = {"method": "Binary", "threshold": 0.0}
    simulation = start(job_text(population(3, 3, exploit=binary), **POPULATION_SECTIONS), "a")
    while not closed(simulation):
        simulation.tell(simulation.queue.popleft())
    own = {
        each.party: each.base.digest
        for each in pending(simulation.state)
        if isinstance(each, RunSegment)
    }
    for number in (0, 1):
        simulation.tell(Report(RUN, PartyFailed(party=Party(f"member{number}"), reason="E: m")))
    while len(closed(simulation)) < 2:
        simulation.tell(simulation.queue.popleft())
    second = closed(simulation)[1]
    assert second.scores[:2] == (None, None)
    copying = {each.member for each in second.copied}
    alone = {0, 1} - copying
    assert alone, "the streams of these members draw each other"
    again = [each for each in pending(simulation.state) if isinstance(each, RunSegment)]
    for number in alone:
        (effect,) = [each for each in again if each.party == f"member{number}"]
        assert (effect.segment, effect.base.digest) == (3, own[effect.party])
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_members_without_workers_are_told_of_beside_those_that_are_done() -> None:
    simulation = start(spec(size=2), "a", "b")
    formed = simulation.facts(MembersFormed)
    (of_first,) = [fact.members for fact in formed if fact.party == "member0"]
    while not simulation.facts(SegmentCommitted):
        mine = [each for each in simulation.queue if getattr(each.fact, "party", "") == "member0"]
        simulation.queue.remove(mine[0])
        simulation.tell(mine[0])
    for name in "ab":
        simulation.tell(LoseWorker(member(name), "killed"))
    assert of_first
    assert phase(simulation) is RunPhase.RECOVERING
    assert reason(simulation) == (
        "generation 1: 1 of 2 members have a score; waiting for 1 of 1 workers: "
        "no worker is available: a (killed), b (killed)"
    )


def test_of_many_kinds_of_failure_the_first_are_kept_and_all_are_counted() -> None:
    failures = Failures()
    for number in range(100):
        text = f"reason {'x' * number}"
        fact = PartyFailed(party=Party(f"member{number}"), reason=text)
        failures = failures.with_one(number, fact)
        failures = failures.with_one(0, fact) if number == 3 else failures
    assert failures.num_failures == 101
    assert 4 < len(failures.kinds) < 100
    commonest = failures.commonest()
    assert commonest is not None
    assert commonest.reason == "reason xxx"
    assert commonest.members == {0, 3}
