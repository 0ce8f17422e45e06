"""The life of runs in the pure core: placement, segments, loss of workers, stop, resume, what is
kept, and how many processes a run survives."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party, WorkerId
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.apply import MIN_COMMITS, apply
from stratagem.coordinator.core.commands import (
    CancelRun,
    DeleteRun,
    DrainWorker,
    LoseWorker,
    RefusalKind,
    ReportTrouble,
    ResumeRun,
    SubmitRun,
)
from stratagem.coordinator.core.effects import CommitSegment, RunSegment
from stratagem.coordinator.core.fact_text import decode, sentence
from stratagem.coordinator.core.pending import live_blobs, pending
from stratagem.coordinator.core.state import best_commit, retained
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    EVALUATION,
    FEDERATED,
    GOSSIP,
    LOCAL,
    POPULATION_SECTIONS,
    job_text,
    population,
)
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


def test_rows_that_were_there_when_the_model_was_built_are_kept_by_party() -> None:
    simulation = start(job_text(LOCAL))
    built = f.ModelBuilt(
        party=Party("member-1"),
        digest=digest("built"),
        size_bytes=1,
        num_rows={},
        num_parameters=1,
        layout_digest="x",
        rows="some",
    )
    state = apply(simulation.state, RUN, built, 0.0)
    assert state.runs[RUN].rows == {"member-1": "some"}
    unsaid = built.model_copy(update={"rows": "", "party": f.ROOT})
    assert apply(state, RUN, unsaid, 0.0).runs[RUN].rows == {"member-1": "some"}


def test_survivors_keep_the_open_segment_and_a_joiner_enters_it() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b", "c")
    simulation.queue.popleft()
    simulation.seen.clear()
    simulation.crash()
    simulation.step()
    before = simulation.due_one(RunSegment)
    simulation.lose("b")
    after = simulation.due_one(RunSegment)
    assert (after.segment, after.membership) == (before.segment, before.membership + 1)
    assert after.members == (member("a"), member("c"))
    simulation.come("b", 1)
    joined = simulation.due_one(RunSegment)
    assert joined.members == (member("a"), member("c"), member("b", 1))
    assert simulation.phase is RunPhase.RECOVERING


def test_training_goes_on_while_a_segment_is_committed_but_not_further() -> None:
    simulation = start(job_text(LOCAL), "a")
    build, *_ = simulation.queue
    simulation.tell(build)
    simulation.tell(simulation.queue.pop())
    assert {type(effect) for effect in pending(simulation.state)} == {CommitSegment, RunSegment}
    assert simulation.due_one(RunSegment).segment == 2


def test_a_run_waits_for_its_only_worker_and_goes_on_from_its_last_commit() -> None:
    simulation = start(job_text(LOCAL))
    assert (simulation.phase, simulation.reason) == (
        RunPhase.PLACING,
        "waiting for 1 of 1 workers: no worker is registered",
    )
    simulation.come("a")
    simulation.step()
    simulation.lose("a")
    assert simulation.phase is RunPhase.RECOVERING
    assert "no worker is available: a (killed)" in simulation.reason
    assert not simulation.due(RunSegment)
    simulation.come("a", 1)
    simulation.complete()
    assert simulation.fact(f.RunCompleted).reason == "20 steps committed"


def test_min_replicas_are_waited_for_and_workers_of_other_numerics_are_not_mixed_in() -> None:
    simulation = start(job_text({**DATA_PARALLEL, "options": {"min_replicas": 2}}), "a")
    assert simulation.phase is RunPhase.PLACING
    simulation.come("b")
    assert [m.worker_id for m in simulation.fact(f.MembersFormed).members] == ["a", "b"]
    simulation.come("c", numerics_fingerprint="other")
    assert member("c") not in simulation.facts(f.MembersFormed)[-1].members


@pytest.mark.parametrize("all_reduce", ["direct", "ring", "native"])
def test_sums_in_an_order_of_their_own_make_a_run_not_reproducible(all_reduce: str) -> None:
    strategy = {**DATA_PARALLEL, "options": {"all_reduce": all_reduce}}
    simulation = start(job_text(strategy, execution={"deterministic": False}), "a", "b", "c")
    assert simulation.record.is_reproducible
    simulation.complete()
    assert simulation.record.is_reproducible is (all_reduce == "direct")


def test_trouble_reforms_the_same_members_once_and_a_report_of_before_is_stale() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.step()
    stale = simulation.queue.popleft()
    membership = simulation.record.value.membership
    for _ in range(2):
        simulation.tell(ReportTrouble(RUN, f.ROOT, membership, "socket closed"))
    value = simulation.record.value
    assert (value.membership, value.members) == (membership + 1, (member("a"), member("b")))
    assert simulation.refusal(stale).kind is RefusalKind.STALE


def test_the_first_members_and_those_that_join_are_no_recovery() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a")
    simulation.step()  # the build
    phases = [simulation.phase]
    for name in "bc":
        simulation.come(name)
        phases.append(simulation.phase)
    assert phases == [RunPhase.RUNNING] * 3
    assert simulation.reason == "c joined, 3 of 3 workers"
    simulation.lose("c")
    assert (simulation.phase, simulation.reason) == (RunPhase.RECOVERING, "c lost, 2 of 3 workers")
    simulation.come("c", 1)
    assert simulation.phase is RunPhase.RECOVERING  # until what was lost is trained again
    simulation.complete()
    members = start(job_text(population(3, 2), **POPULATION_SECTIONS), "a", "b")
    while members.queue:
        assert members.phase is not RunPhase.RECOVERING
        members.step()
    assert members.phase is RunPhase.COMPLETED


def test_a_run_that_is_resumed_waits_for_its_place() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.go_on(2)
    simulation.tell(CancelRun(RUN))
    simulation.lose("a")
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    phases = [simulation.phase]
    simulation.come("a", 1)
    assert [*phases, simulation.phase] == [RunPhase.PLACING, RunPhase.RUNNING]


def test_a_worker_that_was_told_to_end_gets_nothing_new_and_is_not_called_lost() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.step()
    simulation.tell(DrainWorker(member("b")))
    assert simulation.facts(f.MembersFormed)[-1].members == (member("a"),)
    assert simulation.reason == "b left, 1 of 3 workers"
    simulation.lose("b", reason="no heartbeat for 10 s")  # it could not say so itself
    assert WorkerId("b") not in simulation.state.workers
    said = [sentence(decode(kind, 1, text)) for _, kind, text, _ in simulation.journal]
    assert not [text for text in said if "lost" in text]
    assert len(simulation.facts(f.WorkerLeft)) == 1


def test_cancel_resume_delete() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.go_on(3)
    simulation.tell(CancelRun(RUN))
    assert simulation.phase is RunPhase.CANCELLED
    simulation.refusal(ResumeRun(RUN))
    assert simulation.tell(CancelRun(RUN)) == ()
    assert simulation.refusal(DeleteRun(RUN)).kind is RefusalKind.NOT_YET
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    assert simulation.phase in (RunPhase.RUNNING, RunPhase.RECOVERING)
    simulation.refusal(DeleteRun(RUN))
    assert "goes on by itself" in simulation.refusal(ResumeRun(RUN)).reason
    simulation.complete()
    simulation.refusal(ResumeRun(RUN))
    simulation.tell(DeleteRun(RUN))
    assert simulation.state.find(RUN) is None
    assert live_blobs(simulation.state) == frozenset()


def test_submitting_twice_is_harmless_and_another_job_is_refused() -> None:
    simulation = start(job_text(LOCAL), "a")
    assert simulation.tell(SubmitRun(RUN, job_text(LOCAL), 5.0)) == ()
    refusal = simulation.refusal(SubmitRun(RUN, job_text(LOCAL, seed=1), 5.0))
    assert refusal.kind is RefusalKind.CONFLICT


TORUS = {**GOSSIP, "aggregation": {"method": "Decentralized", "topology": "torus:2x2"}}


@pytest.mark.parametrize(
    ("strategy", "optimizer", "said"),
    [
        (TORUS, {}, r"aggregation\.topology: torus:2x2 has 4 nodes, not 3; known topologies: ring"),
        (
            {"type": "Custom", "coordinator": "mine", "config": None},
            {},
            r"'mine' has no .*; registered are none",
        ),
        ({**DATA_PARALLEL, "num_replicas": 11}, {}, "must be <= batch_size"),
        (
            LOCAL,
            {"name": "Adam", "momentum": 0.9},
            r"^optimizer\.momentum: 0\.9, but Adam takes no 'momentum'; it takes amsgrad, betas, ",
        ),
        (LOCAL, {"name": "adem"}, r"optimizer\.name: 'adem' is not one of adadelta, "),
    ],
)
def test_what_cannot_run_here_is_refused_at_submit(
    strategy: dict[str, Any], optimizer: dict[str, Any], said: str
) -> None:
    text = job_text(strategy, optimizer={"name": "sgd", "lr": 0.1} | optimizer)
    with pytest.raises(InvalidInputError, match=said):
        Simulation().tell(SubmitRun(RUN, text, 0.0))


def test_retention_keeps_the_newest_the_best_and_what_is_in_use() -> None:
    simulation = start(job_text(LOCAL, evaluation=EVALUATION, epochs=5), "a")
    simulation.run()
    run = simulation.record
    assert [commit.segment for commit in run.commits] == [0, 1, 2, 3, 4, 5]
    assert [commit.segment for commit in retained(run)] == [4, 5]
    best = best_commit(run)
    assert best is None or best.segment in (4, 5)
    assert digest("segment5") in live_blobs(simulation.state)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_long_run_remembers_the_best_commit_and_the_newest_ones(mode: str) -> None:
    evaluation = {**EVALUATION, "every": "1 step", "mode": mode}
    simulation, sizes = start(job_text(LOCAL, evaluation=evaluation, epochs=14), "a"), [0]
    while simulation.queue:
        simulation.step()
        sizes.append(len(simulation.record.commits))
    assert len(simulation.facts(f.SegmentCommitted)) == 140
    assert max(sizes) == 2 * MIN_COMMITS
    best = {"min": 1, "max": 140}[mode]  # accuracy grows with the steps
    num_after = 140 - 2 * MIN_COMMITS
    assert sizes[-1] == MIN_COMMITS + num_after + (mode == "min")
    assert [c.segment for c in retained(simulation.record)] == sorted({best, 139, 140})


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP], ids=str)
def test_the_loss_of_training_is_not_taken_for_an_evaluated_one(
    strategy: dict[str, object],
) -> None:
    """The evaluation is of the training rows, after every other commit: its loss is the larger."""
    evaluation = {"split": "train", "every": "10 steps", "best": "loss", "mode": "min"}
    text = job_text(strategy, evaluation=evaluation, checkpoint={"every": "5 steps"}, retention=1)
    simulation = start(text, "a", "b", "c")
    simulation.run()
    run = simulation.record
    losses = {commit.segment: commit.metrics.get("train.loss") for commit in run.commits[1:]}
    assert losses == {1: None, 2: 4.5, 3: None, 4: 2.25}
    assert best_commit(run) == run.commits[4]


def test_the_loss_of_a_round_is_not_taken_for_an_evaluated_one() -> None:
    evaluation = {"split": "train", "every": "2 rounds", "best": "loss", "mode": "min"}
    simulation = start(job_text(FEDERATED, evaluation=evaluation), "a", "b")
    simulation.run()
    metrics = [commit.metrics for commit in simulation.record.commits[1:]]
    assert all("train.loss" not in each and "train.loss_max" in each for each in metrics)


def test_workers_of_an_earlier_cluster_give_way_to_the_one_that_lives() -> None:
    simulation = start(job_text(LOCAL), "a", "b")
    assert simulation.facts(f.MembersFormed)[-1].members == (member("a"),)
    simulation.come("a", 1)
    assert simulation.facts(f.MembersFormed)[-1].members == (member("a", 1),)
    simulation.lose("b", reason="connection refused")
    simulation.complete()


# ---- processes that end during a run: which are its own doing, and how many it survives ----


def begun(strategy: dict[str, Any], *workers: str) -> Simulation:
    """Its first segment is trained."""
    simulation = start(job_text(strategy), *workers)
    simulation.step()
    return simulation


def dies(simulation: Simulation, number: int, name: str = "a", **told: Any) -> None:
    simulation.tell(register(name, number + 1, ending(name, number, **told) if told else None))


def test_a_job_that_ends_its_process_fails_after_three() -> None:
    simulation = begun(LOCAL, "a")
    for number in range(3):
        assert simulation.record.ended is None
        dies(simulation, number, run_id=RUN, step=4, status=3, lines=("loading", "bye"))
    assert simulation.record.ended is RunPhase.FAILED
    assert simulation.record.reason == (
        "segment 1 has ended 3 worker processes and came no further than step 4; the last one, a, "
        "ended with exit status 3 and had printed: loading | bye"
    )


def test_processes_that_somebody_kills_fail_no_run_unless_it_comes_no_further_for_long() -> None:
    simulation = begun(LOCAL, "a")
    for number in range(10):
        assert simulation.record.ended is None
        simulation.now_s += 5.0
        dies(simulation, number)
    reason = "segment 1 has ended 10 worker processes; the last one, a, ended unseen"
    assert (simulation.record.ended, simulation.record.reason) == (RunPhase.FAILED, reason)


def test_all_workers_killed_at_once_are_one_death() -> None:
    simulation = begun(DATA_PARALLEL, "a", "b")
    for number in range(9):
        simulation.lose("ab", number, reason="connection lost")
        for name in "ab":
            dies(simulation, number, name, run_id=RUN, step=0, status=-9)
    assert simulation.record.value.deaths.num == 9
    simulation.complete()


def test_what_is_no_death_of_the_run_is_not_counted() -> None:
    """Processes that were stopped or did something else, that had not begun, or were to restart."""
    simulation = begun(LOCAL, "a")
    tells: list[dict[str, Any]] = [
        {"status": -9, "is_stopped": True},
        {"status": -15},
        {"status": 3, "run_id": ""},
        {"status": 3, "run_id": "another-run"},
    ]
    for number, told in enumerate(tells):
        dies(simulation, number, **told)
    for number in range(4, 8):
        lost = LoseWorker(member("a", number), "connection refused", is_blameless=True)
        simulation.tell(lost if number % 2 else DrainWorker(member("a", number)))
        dies(simulation, number)
    assert not simulation.facts(f.ProcessDied)
    simulation.complete()


def test_what_the_next_process_tells_of_an_older_one_is_not_believed_of_this_one() -> None:
    simulation = begun(LOCAL, "a")
    simulation.tell(register("a", 1, ending("a", 7, status=3, is_stopped=True)))
    fact = simulation.fact(f.ProcessDied)
    assert (fact.status, fact.at, fact.lines) == (None, None, ())


def test_a_death_is_that_of_the_party_at_work_alone() -> None:
    simulation = start(job_text(population(2), **POPULATION_SECTIONS), "a")
    while len(simulation.due(RunSegment)) < 2:
        simulation.step()
    dies(simulation, 0, run_id=RUN, party="member1", status=3)
    assert [fact.party for fact in simulation.facts(f.ProcessDied)] == ["member1"]
