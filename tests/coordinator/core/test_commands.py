"""What each command is answered where nothing can or need be done, and who owns what was sent."""

import pytest

from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.coordinator.core.commands import (
    CancelRun,
    ClaimData,
    Command,
    DeleteRun,
    HoldBlobs,
    Refusal,
    RefusalKind,
    Report,
    ReportTrouble,
    ResumeRun,
    SubmitRun,
)
from stratagem.coordinator.core.effects import RunSegment
from stratagem.coordinator.core.facts import (
    ROOT,
    BlobsHeld,
    DataUploaded,
    ErrorRecord,
    MembersFormed,
    PartyFailed,
    RunFailed,
    RunReleased,
    UpdateReceived,
)
from stratagem.coordinator.core.state import CoordinatorState, RunPhase
from stratagem.coordinator.core.state_machine.apply import CLUSTER, MAX_UPLOADS, apply
from stratagem.coordinator.core.state_machine.blob_owners import (
    has_brought,
    is_shared,
    resting_with,
    runs_with,
)
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from stratagem.coordinator.core.state_machine.strategy_boundary import parties_of
from stratagem.coordinator.runtime.plugins import BUILT_IN
from tests.coordinator.core.jobs import FEDERATED, LOCAL, job_text, silos
from tests.coordinator.core.simulation import RUN, Simulation, digest, register, start

pytestmark = pytest.mark.core

OTHER = RunId("other")
OF_NOBODY: list[Command] = [
    CancelRun(OTHER),
    ResumeRun(OTHER),
    DeleteRun(OTHER),
    Report(OTHER, RunReleased()),
    ReportTrouble(OTHER, ROOT, 1, "cut off"),
]
ERROR = ErrorRecord(
    type="ValueError", message="no", traceback="...", worker_id="a", activity="step"
)


@pytest.mark.parametrize("command", OF_NOBODY, ids=lambda each: type(each).__name__)
def test_a_run_that_nobody_knows_is_not_found(command: Command) -> None:
    simulation = start(job_text(LOCAL), "a")
    before = simulation.state
    answer = simulation.tell(command)
    assert answer == Refusal(RefusalKind.NOT_FOUND, "run 'other' is not known")
    assert simulation.state is before


def test_a_run_is_deleted_once_its_workers_have_let_go_of_it() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(CancelRun(RUN))
    early = simulation.tell(DeleteRun(RUN))
    assert isinstance(early, Refusal)
    assert early.kind is RefusalKind.NOT_YET
    simulation.run()
    assert not isinstance(simulation.tell(DeleteRun(RUN)), Refusal)
    assert simulation.state.find(RUN) is None


def test_a_worker_that_says_the_same_again_is_no_news() -> None:
    simulation = start(job_text(LOCAL), "a")
    assert simulation.tell(register("a")) == ()
    assert simulation.tell(register("a", tags=("gpu",))) != ()


@pytest.mark.parametrize(
    "fact",
    [
        RunFailed(reason="ValueError: no", error=ERROR),
        PartyFailed(party=ROOT, reason="ValueError: no", error=ERROR),
    ],
    ids=["of the run", "of its root party"],
)
def test_a_failure_that_is_reported_ends_the_run(fact: RunFailed | PartyFailed) -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(Report(RUN, fact))
    run = simulation.state.runs[RUN]
    assert (run.ended, run.reason, run.error) == (RunPhase.FAILED, "ValueError: no", ERROR)
    (failed,) = simulation.facts(RunFailed)
    assert failed.error == ERROR


def test_an_update_of_a_client_that_was_not_asked_is_refused() -> None:
    strategy = {**FEDERATED, "client_selection": {"method": "Random", "fraction": 0.5}}
    simulation = start(job_text(strategy), "a")
    simulation.tell(simulation.queue.popleft())
    asked = {report.fact.client for report in simulation.queue}  # type: ignore[union-attr]
    (stranger, *_) = set(range(4)) - asked
    answers = [each.fact for each in simulation.queue if isinstance(each.fact, UpdateReceived)]
    answer = simulation.tell(Report(RUN, answers[0].model_copy(update={"client": stranger})))
    assert isinstance(answer, Refusal)
    assert answer.reason == f"client {stranger} was not selected in round 1"


def test_an_exchange_that_fails_in_a_party_below_forms_that_party_anew() -> None:
    simulation = start(job_text(silos()), *"abcd")
    while not any(isinstance(each, RunSegment) for each in pending(simulation.state)):
        simulation.tell(simulation.queue.popleft())
    run = simulation.state.runs[RUN]
    parties = parties_of(run)
    silo, neighbour = Party("client1"), Party("client0")
    assert {silo, neighbour} <= parties.keys()
    assert run.strategy.party_job(run.job, run.value, silo).epochs == 1
    assert run.strategy.party_job(run.job, run.value, ROOT) == run.job
    view = parties[silo]
    simulation.tell(ReportTrouble(RUN, silo, view.membership, "socket closed"))
    formed = simulation.facts(MembersFormed)[-1]
    assert (formed.party, formed.members, formed.reason) == (silo, view.members, "socket closed")
    after = parties_of(simulation.state.runs[RUN])
    assert after[silo].membership > view.membership
    assert after[neighbour] == parties[neighbour]
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


# ---- who owns which blobs ----


def test_a_blob_belongs_to_whom_it_was_received_from() -> None:
    simulation, blob = Simulation(), digest("rows")
    assert simulation.tell(ClaimData("token a", blob)) != ()
    assert simulation.tell(ClaimData("token a", blob)) == (), "known already"
    assert has_brought(simulation.state, "token a", blob)
    assert not has_brought(simulation.state, "token b", blob)
    assert not is_shared(simulation.state, blob)


def test_uploads_that_no_run_names_are_remembered_up_to_a_number() -> None:
    state = CoordinatorState(BUILT_IN)
    digests = [Digest(f"{number:064x}") for number in range(MAX_UPLOADS + 1)]
    for each in digests:
        state = apply(state, CLUSTER, DataUploaded(owner="token a", digest=each), 0.0)
    assert not has_brought(state, "token a", digests[0])
    assert all(has_brought(state, "token a", each) for each in digests[1:])
    assert not has_brought(state, "token b", digests[1])


def test_what_a_backup_holds_is_live_until_another_one_begins_after_its_time() -> None:
    simulation = start(job_text(LOCAL), "a")
    listed, newer, last = digest("listed"), digest("newer"), digest("last")
    (entry,) = simulation.tell(HoldBlobs(listed, 10.0, "token a"))  # type: ignore[misc]
    assert entry.fact == BlobsHeld(listed=listed, until_s=10.0, by="token a")
    assert listed in live_blobs(simulation.state)
    state = apply(simulation.state, CLUSTER, BlobsHeld(listed=newer, until_s=20.0), 9.0)
    assert dict(state.holds) == {listed: 10.0, newer: 20.0}
    state = apply(state, CLUSTER, BlobsHeld(listed=last, until_s=30.0), 10.0)
    assert dict(state.holds) == {newer: 20.0, last: 30.0}
    assert {newer, last} <= live_blobs(state)


def test_what_a_run_names_is_its_owners_and_what_it_commits_is_everybodys() -> None:
    rows, given, code, average = (digest(each) for each in ("rows", "given", "code", "average"))
    resumed = {"digest": given, "resume": True, "step": 3, "average": average}
    brought = {"data": {"inline": rows}, "initial": resumed, "code": {"digest": code}}
    text = job_text(LOCAL, **brought)
    simulation = Simulation()
    simulation.tell(register("a"))
    simulation.tell(SubmitRun(RUN, text, 0.0, by="token a", owner="token a"))
    simulation.run()
    assert {rows, given, code, average} <= live_blobs(simulation.state)
    for blob in (rows, given, code):
        assert has_brought(simulation.state, "token a", blob)
        assert not has_brought(simulation.state, "token b", blob)
        assert not is_shared(simulation.state, blob)
    newest = simulation.state.runs[RUN].commits[-1].digest
    assert is_shared(simulation.state, newest)
    assert resting_with(simulation.state, newest) == [], "the run is not archived"
    last = simulation.state.runs[RUN].commits[-1].segment
    assert runs_with(simulation.state, newest, {}) == [f"{RUN}, segment {last}"]
    assert runs_with(simulation.state, rows, {}) == [RUN]
    assert runs_with(simulation.state, digest("another"), {}) == []


def test_a_fact_of_a_run_is_none_of_the_cluster() -> None:
    """A journal that says so was not written by a coordinator."""
    with pytest.raises(AssertionError, match="RunReleased is no fact of the cluster"):
        apply(CoordinatorState(BUILT_IN), CLUSTER, RunReleased(), 0.0)
