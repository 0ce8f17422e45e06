"""The life of runs in the pure core: placement, segments, loss, crash, stop, resume."""

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party, WorkerId
from stratagem.coordinator.core.commands import (
    CancelRun,
    DeleteRun,
    DrainWorker,
    LoseWorker,
    Refusal,
    RefusalKind,
    ReportTrouble,
    ResumeRun,
    SubmitRun,
)
from stratagem.coordinator.core.effects import CommitSegment, RunSegment
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ROOT,
    SKIPPED_STEPS,
    MembersFormed,
    ModelBuilt,
    RoundClosed,
    RunCompleted,
    SegmentCommitted,
    SegmentFinished,
    WorkerLeft,
)
from stratagem.coordinator.core.facts.fact_serialization import decode
from stratagem.coordinator.core.state import RunPhase, best_commit, retained
from stratagem.coordinator.core.state_machine.apply import MIN_COMMITS, apply
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    EVALUATION,
    FEDERATED,
    GOSSIP,
    LOCAL,
    job_text,
)
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    digest,
    member,
    phase,
    reason,
    register,
    start,
)

pytestmark = pytest.mark.core

STRATEGIES = [LOCAL, DATA_PARALLEL, GOSSIP, FEDERATED]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s["type"])
def test_run_completes_and_commits_every_segment_once(strategy: dict[str, object]) -> None:
    simulation = start(job_text(strategy), "a", "b")
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    segments = [fact.segment for fact in simulation.facts(SegmentCommitted)]
    assert segments == list(range(1, len(segments) + 1))
    assert simulation.state.runs[RUN].is_released


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP], ids=str)
def test_skipped_steps_are_counted_once_however_often_they_are_trained(
    strategy: dict[str, object],
) -> None:
    """Here each segment leaves one step out; all workers are lost after any number of commands."""
    for lost_after in range(1, 8):
        simulation = start(job_text(strategy, checkpoint={"every": "5 steps"}), "a")
        for _ in range(lost_after):
            simulation.tell(simulation.queue.popleft())
        simulation.queue.clear()
        simulation.tell(LoseWorker(member("a"), "gone"))
        simulation.crash()
        simulation.tell(register("a", 1))
        simulation.run()
        counts = [fact.metrics[SKIPPED_STEPS] for fact in simulation.facts(SegmentCommitted)]
        assert counts == [1, 2, 3, 4]
        assert simulation.state.runs[RUN].metrics[SKIPPED_STEPS] == 4


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s["type"])
def test_crash_after_any_command_ends_with_the_same_commits(strategy: dict[str, object]) -> None:
    undisturbed = start(job_text(strategy, evaluation=EVALUATION_OF(strategy)), "a", "b")
    undisturbed.run()
    expected = undisturbed.facts(SegmentCommitted)
    assert expected
    for crash_after in range(1, 40):
        simulation = start(job_text(strategy, evaluation=EVALUATION_OF(strategy)), "a", "b")
        for _ in range(crash_after):
            if simulation.queue:
                simulation.tell(simulation.queue.popleft())
        simulation.crash()
        simulation.run()
        assert simulation.facts(SegmentCommitted) == expected
        assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def EVALUATION_OF(strategy: dict[str, object]) -> dict[str, object]:
    every = "1 round" if strategy["type"] == "Federated" else "1 epoch"
    return {**EVALUATION, "every": every}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s["type"])
def test_loss_of_a_worker_at_any_point_ends_with_the_same_commits(
    strategy: dict[str, object],
) -> None:
    undisturbed = start(job_text(strategy), "a", "b")
    undisturbed.run()
    expected = undisturbed.facts(SegmentCommitted)
    for lose_after in range(12):
        simulation = start(job_text(strategy), "a", "b")
        for _ in range(lose_after):
            if simulation.queue:
                simulation.tell(simulation.queue.popleft())
        simulation.tell(LoseWorker(member("a"), "killed"))
        simulation.run()
        simulation.tell(register("a", start=1))
        simulation.run()
        assert simulation.facts(SegmentCommitted) == expected
        assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_rows_that_were_there_when_the_model_was_built_are_kept_by_party() -> None:
    simulation = start(job_text(LOCAL))
    built = ModelBuilt(
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
    unsaid = built.model_copy(update={"rows": "", "party": ROOT})
    assert apply(state, RUN, unsaid, 0.0).runs[RUN].rows == {"member-1": "some"}


def test_survivors_keep_the_open_segment_and_a_joiner_enters_it() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b", "c")
    simulation.queue.popleft()
    simulation.seen.clear()
    simulation.crash()
    simulation.tell(simulation.queue.popleft())
    (before,) = [e for e in pending(simulation.state) if isinstance(e, RunSegment)]
    simulation.tell(LoseWorker(member("b"), "killed"))
    (after,) = [e for e in pending(simulation.state) if isinstance(e, RunSegment)]
    assert after.segment == before.segment
    assert after.membership == before.membership + 1
    assert after.members == (member("a"), member("c"))
    simulation.tell(register("b", start=1))
    (joined,) = [e for e in pending(simulation.state) if isinstance(e, RunSegment)]
    assert joined.members == (member("a"), member("c"), member("b", 1))
    assert phase(simulation) is RunPhase.RECOVERING


def test_training_goes_on_while_a_segment_is_committed_but_not_further() -> None:
    simulation = start(job_text(LOCAL), "a")
    build, *_ = simulation.queue
    simulation.tell(build)
    first = simulation.queue.pop()
    simulation.tell(first)
    due = pending(simulation.state)
    assert {type(effect) for effect in due} == {CommitSegment, RunSegment}
    (segment,) = [effect for effect in due if isinstance(effect, RunSegment)]
    assert segment.segment == 2


def test_run_waits_with_the_reason_and_starts_when_a_worker_comes() -> None:
    simulation = start(job_text(LOCAL))
    assert phase(simulation) is RunPhase.PLACING
    assert reason(simulation) == "waiting for 1 of 1 workers: no worker is registered"
    simulation.tell(register("a"))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED


def test_lost_only_worker_returns_the_run_to_its_last_commit() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(simulation.queue.popleft())
    simulation.tell(LoseWorker(member("a"), "killed"))
    assert phase(simulation) is RunPhase.RECOVERING
    assert "no worker is available: a (killed)" in reason(simulation)
    assert not [e for e in pending(simulation.state) if isinstance(e, RunSegment)]


def test_min_replicas_are_waited_for() -> None:
    strategy = {**DATA_PARALLEL, "options": {"min_replicas": 2}}
    simulation = start(job_text(strategy), "a")
    assert phase(simulation) is RunPhase.PLACING
    simulation.tell(register("b"))
    (formed,) = simulation.facts(MembersFormed)
    assert [m.worker_id for m in formed.members] == ["a", "b"]


@pytest.mark.parametrize("all_reduce", ["direct", "ring", "native"])
def test_sums_in_an_order_of_their_own_make_a_run_not_reproducible(all_reduce: str) -> None:
    strategy = {**DATA_PARALLEL, "options": {"all_reduce": all_reduce}}
    simulation = start(job_text(strategy, execution={"deterministic": False}), "a", "b", "c")
    assert simulation.state.runs[RUN].is_reproducible
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert simulation.state.runs[RUN].is_reproducible is (all_reduce == "direct")


def test_workers_of_other_numerics_are_not_mixed_in() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    odd = register("c")
    odd = type(odd)(
        odd.member, odd.address, odd.capability.model_copy(update={"numerics_fingerprint": "other"})
    )
    simulation.tell(odd)
    members = [fact.members for fact in simulation.facts(MembersFormed)][-1]
    assert member("c") not in members


def test_trouble_reforms_the_same_members_once() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.tell(simulation.queue.popleft())
    membership = simulation.state.runs[RUN].value.membership
    simulation.tell(ReportTrouble(RUN, ROOT, membership, "socket closed"))
    simulation.tell(ReportTrouble(RUN, ROOT, membership, "socket closed"))
    value = simulation.state.runs[RUN].value
    assert value.membership == membership + 1
    assert value.members == (member("a"), member("b"))


def test_stale_segment_report_is_refused_and_changes_nothing() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.tell(simulation.queue.popleft())
    stale = simulation.queue.popleft()
    simulation.tell(LoseWorker(member("b"), "killed"))
    before = simulation.state
    refusal = simulation.tell(stale)
    assert isinstance(refusal, Refusal)
    assert refusal.kind is RefusalKind.STALE
    assert simulation.state is before


def test_the_first_members_and_those_that_join_are_no_recovery() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a")
    simulation.tell(simulation.queue.popleft())  # the build
    for name in "bc":
        assert phase(simulation) is RunPhase.RUNNING
        simulation.tell(register(name))
    assert phase(simulation) is RunPhase.RUNNING
    assert reason(simulation) == "c joined, 3 of 3 workers"
    simulation.tell(LoseWorker(member("c"), "killed"))
    assert phase(simulation) is RunPhase.RECOVERING
    assert reason(simulation) == "c lost, 2 of 3 workers"
    simulation.tell(register("c", start=1))
    assert phase(simulation) is RunPhase.RECOVERING  # until what was lost is trained again
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED


def test_members_of_a_population_begin_without_recovering() -> None:
    population = {
        "type": "PopulationBased",
        "population_size": 3,
        "generations": 2,
        "exploit": {"method": "Truncation", "fraction": 0.5},
        "explore": {"method": "Perturbation", "factor": 0.2},
    }
    evaluation = {**EVALUATION, "every": "1 generations"}
    simulation = start(
        job_text(
            population,
            search_space={"optimizer.lr": {"low": 0.01, "high": 1.0}},
            steps_per_generation=4,
            evaluation=evaluation,
        ),
        "a",
        "b",
    )
    while simulation.queue:
        assert phase(simulation) is not RunPhase.RECOVERING
        simulation.tell(simulation.queue.popleft())
    assert phase(simulation) is RunPhase.COMPLETED


def test_a_run_that_is_resumed_waits_for_its_place() -> None:
    simulation = start(job_text(LOCAL), "a")
    for _ in range(2):
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN))
    simulation.tell(LoseWorker(member("a"), "killed"))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    assert phase(simulation) is RunPhase.PLACING
    simulation.tell(register("a", start=1))
    assert phase(simulation) is RunPhase.RUNNING


def test_nothing_says_lost_of_a_worker_that_was_told_to_end() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.tell(simulation.queue.popleft())
    simulation.tell(DrainWorker(member("b")))
    assert reason(simulation) == "b left, 1 of 3 workers"
    simulation.tell(LoseWorker(member("b"), "no heartbeat for 10 s"))  # it could not say so itself
    assert WorkerId("b") not in simulation.state.workers
    said = [sentence(decode(kind, 1, text)) for _, kind, text, _ in simulation.journal]
    assert not [text for text in said if "lost" in text]
    assert len(simulation.facts(WorkerLeft)) == 1


def test_draining_worker_gets_nothing_new() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.tell(DrainWorker(member("a")))
    assert simulation.facts(MembersFormed)[-1].members == (member("b"),)


def test_cancel_resume_delete() -> None:
    simulation = start(job_text(LOCAL), "a")
    for _ in range(3):
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN))
    assert phase(simulation) is RunPhase.CANCELLED
    busy = simulation.tell(ResumeRun(RUN))
    assert isinstance(busy, Refusal)
    assert simulation.tell(CancelRun(RUN)) == ()
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    assert phase(simulation) in (RunPhase.RUNNING, RunPhase.RECOVERING)
    assert isinstance(simulation.tell(DeleteRun(RUN)), Refusal)
    active = simulation.tell(ResumeRun(RUN))
    assert isinstance(active, Refusal)
    assert "goes on by itself" in active.reason
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert isinstance(simulation.tell(ResumeRun(RUN)), Refusal)
    simulation.tell(DeleteRun(RUN))
    assert RUN not in simulation.state.runs
    assert live_blobs(simulation.state) == frozenset()


def test_submitting_twice_is_harmless_and_another_job_is_refused() -> None:
    simulation = start(job_text(LOCAL), "a")
    assert simulation.tell(SubmitRun(RUN, job_text(LOCAL), 5.0)) == ()
    refusal = simulation.tell(SubmitRun(RUN, job_text(LOCAL, seed=1), 5.0))
    assert isinstance(refusal, Refusal)
    assert refusal.kind is RefusalKind.CONFLICT


def test_what_cannot_run_here_is_refused_at_submit() -> None:
    simulation = Simulation()
    torus = {**GOSSIP, "aggregation": {"method": "Decentralized", "topology": "torus:2x2"}}
    refusal = r"aggregation\.topology: torus:2x2 has 4 nodes, not 3; known topologies: ring"
    with pytest.raises(InvalidInputError, match=refusal):
        simulation.tell(SubmitRun(RUN, job_text(torus), 0.0))
    custom = {"type": "Custom", "coordinator": "mine", "config": None}
    with pytest.raises(InvalidInputError, match=r"'mine' has no .*; registered are none"):
        simulation.tell(SubmitRun(RUN, job_text(custom), 0.0))
    wide = {**DATA_PARALLEL, "num_replicas": 11}
    with pytest.raises(InvalidInputError, match="must be <= batch_size"):
        simulation.tell(SubmitRun(RUN, job_text(wide), 0.0))
    adam = job_text(LOCAL, optimizer={"name": "Adam", "lr": 0.1, "momentum": 0.9})
    refusal = r"^optimizer\.momentum: 0\.9, but Adam takes no 'momentum'; it takes amsgrad, betas, "
    with pytest.raises(InvalidInputError, match=refusal):
        simulation.tell(SubmitRun(RUN, adam, 0.0))
    unknown = job_text(LOCAL, optimizer={"name": "adem", "lr": 0.1})
    with pytest.raises(
        InvalidInputError, match=r"optimizer\.name: 'adem' is not one of adadelta, "
    ):
        simulation.tell(SubmitRun(RUN, unknown, 0.0))


def test_retention_keeps_the_newest_the_best_and_what_is_in_use() -> None:
    simulation = start(job_text(LOCAL, evaluation=EVALUATION, epochs=5), "a")
    simulation.run()
    run = simulation.state.runs[RUN]
    assert [commit.segment for commit in run.commits] == [0, 1, 2, 3, 4, 5]
    assert [commit.segment for commit in retained(run)] == [4, 5]
    best = best_commit(run)
    assert best is None or best.segment in (4, 5)
    assert digest("segment5") in live_blobs(simulation.state)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_long_run_remembers_the_best_commit_and_the_newest_ones(mode: str) -> None:
    evaluation = {**EVALUATION, "every": "1 step", "mode": mode}
    simulation = start(job_text(LOCAL, evaluation=evaluation, epochs=20), "a")
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    assert len(simulation.facts(SegmentCommitted)) == 200
    assert MIN_COMMITS <= len(run.commits) <= 2 * MIN_COMMITS + 1
    best = {"min": 1, "max": 200}[mode]  # accuracy grows with the steps
    assert [c.segment for c in retained(run)] == sorted({best, 199, 200})


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s["type"])
def test_a_commit_has_the_loss_of_its_training(strategy: dict[str, object]) -> None:
    simulation = start(job_text(strategy, evaluation=EVALUATION_OF(strategy)), "a", "b")
    simulation.run()
    commits = simulation.state.runs[RUN].commits[1:]
    trained = {fact.segment: fact.loss for fact in simulation.facts(SegmentFinished)}
    trained |= {
        fact.round_num: fact.metrics["train.loss"] for fact in simulation.facts(RoundClosed)
    }
    assert {commit.segment: commit.metrics["train.loss"] for commit in commits} == trained


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP], ids=str)
def test_the_loss_of_training_is_not_taken_for_an_evaluated_one(
    strategy: dict[str, object],
) -> None:
    """The evaluation is of the training rows, after every other commit: its loss is the larger."""
    evaluation = {"split": "train", "every": "10 steps", "best": "loss", "mode": "min"}
    text = job_text(strategy, evaluation=evaluation, checkpoint={"every": "5 steps"}, retention=1)
    simulation = start(text, "a", "b", "c")
    simulation.run()
    run = simulation.state.runs[RUN]
    losses = {commit.segment: commit.metrics.get("train.loss") for commit in run.commits[1:]}
    assert losses == {1: None, 2: 4.5, 3: None, 4: 2.25}
    assert best_commit(run) == run.commits[4]


def test_the_loss_of_a_round_is_not_taken_for_an_evaluated_one() -> None:
    evaluation = {"split": "train", "every": "2 rounds", "best": "loss", "mode": "min"}
    simulation = start(job_text(FEDERATED, evaluation=evaluation), "a", "b")
    simulation.run()
    metrics = [commit.metrics for commit in simulation.state.runs[RUN].commits[1:]]
    assert all("train.loss" not in each and "train.loss_max" in each for each in metrics)


def test_completed_reason_is_a_sentence() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.run()
    (completed,) = simulation.facts(RunCompleted)
    assert completed.reason == "20 steps committed"


def test_workers_of_an_earlier_cluster_give_way_to_the_one_that_lives() -> None:
    simulation = start(job_text(LOCAL), "a", "b")
    placed = simulation.facts(MembersFormed)[-1].members
    assert placed == (member("a"),)
    simulation.tell(register("a", start=1))
    assert simulation.facts(MembersFormed)[-1].members == (member("a", 1),)
    simulation.tell(LoseWorker(member("b"), "connection refused"))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
