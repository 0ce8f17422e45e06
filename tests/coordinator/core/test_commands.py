"""What each command is answered where nothing can or need be done, who owns what was sent, and the
party that a report is of."""

from dataclasses import replace

import pytest

from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.apply import CLUSTER, MAX_UPLOADS, apply
from stratagem.coordinator.core.effects import RunSegment
from stratagem.coordinator.core.pending import live_blobs
from stratagem.coordinator.core.retention import has_brought, is_shared, resting_with, runs_with
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.strategy_calls import parties_of, value_of
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies.federated.run import Federation
from stratagem.coordinator.strategies.population.run import PopulationRun
from tests.coordinator.core.jobs import (
    FEDERATED,
    LOCAL,
    POPULATION_SECTIONS,
    job_text,
    population,
    silos,
)
from tests.coordinator.core.raising_strategies import _raise
from tests.coordinator.core.simulation import RUN, Simulation, digest, register, start

pytestmark = pytest.mark.core


OTHER = RunId("other")
OF_NOBODY: list[c.Command] = [
    c.CancelRun(OTHER),
    c.ResumeRun(OTHER),
    c.DeleteRun(OTHER),
    c.Report(OTHER, f.RunReleased()),
    c.ReportTrouble(OTHER, f.ROOT, 1, "cut off"),
]
ERROR = f.ErrorRecord(
    type="ValueError", message="no", traceback="...", worker_id="a", activity="step"
)


@pytest.mark.parametrize("command", OF_NOBODY, ids=lambda each: type(each).__name__)
def test_a_run_that_nobody_knows_is_not_found(command: c.Command) -> None:
    refusal = c.Refusal(c.RefusalKind.NOT_FOUND, "run 'other' is not known")
    assert start(job_text(LOCAL), "a").refusal(command) == refusal


def test_a_worker_that_says_the_same_is_no_news_and_a_fact_of_a_run_none_of_the_cluster() -> None:
    simulation = start(job_text(LOCAL), "a")
    assert simulation.tell(register("a")) == ()
    assert simulation.tell(register("a", tags=("gpu",))) != ()
    with pytest.raises(AssertionError, match="RunReleased is no fact of the cluster"):
        apply(CoordinatorState(BUILT_IN), CLUSTER, f.RunReleased(), 0.0)


@pytest.mark.parametrize(
    "fact",
    [
        f.RunFailed(reason="ValueError: no", error=ERROR),
        f.PartyFailed(party=f.ROOT, reason="ValueError: no", error=ERROR),
    ],
    ids=["of the run", "of its root party"],
)
def test_a_failure_that_is_reported_ends_the_run(fact: f.RunFailed | f.PartyFailed) -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.report(fact)
    run = simulation.record
    assert (run.ended, run.reason, run.error) == (RunPhase.FAILED, "ValueError: no", ERROR)
    failed = simulation.fact(f.RunFailed)
    assert failed.error == ERROR


def test_an_update_of_a_client_that_was_not_asked_is_refused() -> None:
    strategy = {**FEDERATED, "client_selection": {"method": "Random", "fraction": 0.5}}
    simulation = start(job_text(strategy), "a")
    simulation.step()
    asked = {report.fact.client for report in simulation.queue}  # type: ignore[union-attr]
    (stranger, *_) = set(range(4)) - asked
    answers = [each.fact for each in simulation.queue if isinstance(each.fact, f.UpdateReceived)]
    answer = simulation.refusal(answers[0].model_copy(update={"client": stranger}))
    assert answer.reason == f"client {stranger} was not selected in round 1"


def test_an_exchange_that_fails_in_a_party_below_forms_that_party_anew() -> None:
    simulation = start(job_text(silos()), *"abcd")
    simulation.until_due(RunSegment)
    run = simulation.record
    parties = parties_of(run)
    silo, neighbour = Party("client1"), Party("client0")
    assert {silo, neighbour} <= parties.keys()
    assert run.strategy.party_job(run.job, run.value, silo).epochs == 1
    assert run.strategy.party_job(run.job, run.value, f.ROOT) == run.job
    view = parties[silo]
    simulation.tell(c.ReportTrouble(RUN, silo, view.membership, "socket closed"))
    formed = simulation.facts(f.MembersFormed)[-1]
    assert (formed.party, formed.members, formed.reason) == (silo, view.members, "socket closed")
    after = parties_of(simulation.record)
    assert after[silo].membership > view.membership
    assert after[neighbour] == parties[neighbour]
    simulation.complete()


def test_each_party_has_the_value_of_its_own_strategy() -> None:
    inner = {**FEDERATED, "rounds": 5}
    evaluation = {"metrics": ["accuracy"], "best": "loss"}
    text = job_text(
        population(size=12, inner=inner), **POPULATION_SECTIONS | {"evaluation": evaluation}
    )
    run = start(text, "a", "b").state.runs[RUN]
    assert isinstance(value_of(run, f.ROOT), PopulationRun)
    for name in ("member1", "member11"):
        value = value_of(run, Party(name))
        assert isinstance(value, Federation)
        assert value.party == name
        assert value_of(run, Party(f"{name}/client2")) is value
    broken = replace(run, strategy=replace(run.strategy, children=_raise))
    assert value_of(broken, Party("member1")) is None


# ---- who owns which blobs ----


def test_a_blob_belongs_to_whom_it_was_received_from() -> None:
    simulation, blob = Simulation(), digest("rows")
    assert simulation.tell(c.ClaimData("token a", blob)) != ()
    assert simulation.tell(c.ClaimData("token a", blob)) == (), "known already"
    assert has_brought(simulation.state, "token a", blob)
    assert not has_brought(simulation.state, "token b", blob)
    assert not is_shared(simulation.state, blob)


def test_uploads_that_no_run_names_are_remembered_up_to_a_number() -> None:
    state = CoordinatorState(BUILT_IN)
    digests = [Digest(f"{number:064x}") for number in range(MAX_UPLOADS + 1)]
    for each in digests:
        state = apply(state, CLUSTER, f.DataUploaded(owner="token a", digest=each), 0.0)
    assert not has_brought(state, "token a", digests[0])
    assert all(has_brought(state, "token a", each) for each in digests[1:])
    assert not has_brought(state, "token b", digests[1])


def test_what_a_backup_holds_is_live_until_another_one_begins_after_its_time() -> None:
    simulation = start(job_text(LOCAL), "a")
    listed, newer, last = digest("listed"), digest("newer"), digest("last")
    (entry,) = simulation.tell(c.HoldBlobs(listed, 10.0, "token a"))  # type: ignore[misc]
    assert entry.fact == f.BlobsHeld(listed=listed, until_s=10.0, by="token a")
    assert listed in live_blobs(simulation.state)
    state = apply(simulation.state, CLUSTER, f.BlobsHeld(listed=newer, until_s=20.0), 9.0)
    assert dict(state.holds) == {listed: 10.0, newer: 20.0}
    state = apply(state, CLUSTER, f.BlobsHeld(listed=last, until_s=30.0), 10.0)
    assert dict(state.holds) == {newer: 20.0, last: 30.0}
    assert {newer, last} <= live_blobs(state)


def test_what_a_run_names_is_its_owners_and_what_it_commits_is_everybodys() -> None:
    rows, given, code, average = (digest(each) for each in ("rows", "given", "code", "average"))
    resumed = {"digest": given, "resume": True, "step": 3, "average": average}
    brought = {"data": {"inline": rows}, "initial": resumed, "code": {"digest": code}}
    text = job_text(LOCAL, **brought)
    simulation = Simulation()
    simulation.come("a")
    simulation.tell(c.SubmitRun(RUN, text, 0.0, by="token a", owner="token a"))
    simulation.run()
    assert {rows, given, code, average} <= live_blobs(simulation.state)
    for blob in (rows, given, code):
        assert has_brought(simulation.state, "token a", blob)
        assert not has_brought(simulation.state, "token b", blob)
        assert not is_shared(simulation.state, blob)
    newest = simulation.record.commits[-1].digest
    assert is_shared(simulation.state, newest)
    assert resting_with(simulation.state, newest) == [], "the run is not archived"
    last = simulation.record.commits[-1].segment
    assert runs_with(simulation.state, newest, {}) == [f"{RUN}, segment {last}"]
    assert runs_with(simulation.state, rows, {}) == [RUN]
    assert runs_with(simulation.state, digest("another"), {}) == []
