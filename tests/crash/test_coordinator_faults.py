"""Named faults of the coordinator: killed, away for long, frozen and replaced."""

import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stratagem.client.cli.shared import RunDisplay
from stratagem.client.course.views import Phase
from stratagem.client.report.run import RunCourse
from stratagem.client.sdk.blocking import Client
from stratagem.client.terminal.followed import FollowedRun
from stratagem.client.terminal.line import plain_line
from stratagem.common.base.errors import UserCodeError
from stratagem.common.base.ids import RunId
from stratagem.common.job.sections import MAX_METRICS
from tests.cluster.jobs import Gates
from tests.crash.failure_logs import LOGS
from tests.crash.hands import EXIT_FENCED, Hands, hands
from tests.crash.jobs import (
    ALL_REDUCE,
    FED_AVG,
    JOBS,
    LOCAL,
    PACED,
    SETTINGS,
    Job,
    crash_job,
    federated,
    gated,
    paced,
)
from tests.crash.rig import (
    Outcome,
    Rig,
    await_event,
    await_status,
    await_step,
    events_of,
    outcome_of,
)
from tests.jobs import user_model
from tests.patience import PATIENCE_S, growing

pytestmark = pytest.mark.promise("No run notices that its coordinator was away, or was another.")

FLAGS = ("--lease-ttl-s", "4", "--worker-ttl-s", "8", "--heartbeat-interval-s", "1")
"""A worker finds a coordinator that has returned within 2.4 s (the channels' reconnect backoff)."""

PATIENT_FLAGS = ("--lease-ttl-s", "4", "--worker-ttl-s", "30", "--heartbeat-interval-s", "1")
OUTAGE_S = 32.0
"""Longer than the leases of PATIENT_FLAGS."""


@pytest.fixture
def process_by_process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hands]:
    with hands(tmp_path, *getattr(request, "param", FLAGS)) as started:
        request.node.stash[LOGS] = started.logs
        yield started


@pytest.mark.cluster
def test_coordinator_killed_during_training_is_not_even_noticed_by_the_steps(rig: Rig) -> None:
    expected = rig.outcome(paced(ALL_REDUCE, 0.0))
    with rig.running(paced(ALL_REDUCE, 0.1)) as run:
        await_step(run, 3)
        rig.cluster.kill("coordinator")
        assert outcome_of(run).digests == expected.digests
        formed = [e for e in events_of(run) if e.kind == "MembersFormed"]
        assert len(formed) == 1


@pytest.mark.sweep
def test_a_schedule_of_hyperparameters_goes_back_and_on_after_kills_to_the_same_bits_and_line(
    rig: Rig, gates: Gates
) -> None:
    """It ends at its last step, which is none of the job's; the line says so however it ended."""
    document = gated(
        ALL_REDUCE,
        gates.folder,
        model=user_model(PACED, pace_s=0.05),
        hyperparameter_schedule={**SETTINGS, "last_step": 10},
    )
    expected = rig.outcome(document)
    gates.close("worker-1-batch-8")
    with rig.running(document) as run:
        before = await_status(run, lambda status: status.segment >= 3, "the second setting")
        run.cancel()
        await_status(run, lambda status: status.phase.is_final, "it is stopped")
        gates.open()
        assert (before.num_steps, run.status().commit("1") is None) == (10, False)
        run.resume(1)  # of the first setting
        await_step(run, 3)
        rig.cluster.kill("coordinator")
        await_step(run, 7)
        rig.cluster.kill("worker-0")
        assert outcome_of(run).digests == expected.digests
        shown = RunDisplay(FollowedRun.of(run.status()))
        for item in run.watch():
            shown.fold(item)
        shown.run.phase = Phase.RUNNING  # as its line was before the last item
        assert plain_line(shown.run).startswith(f"{run.run_id}  100%  step 10/10  test.acc")


@pytest.mark.sweep
def test_coordinator_killed_during_aggregation(rig: Rig) -> None:
    expected = rig.undisturbed("FedAvg-large")
    with rig.running(JOBS["FedAvg-large"]) as run:
        await_event(run, "RoundClosed")
        rig.cluster.kill("coordinator")
        assert outcome_of(run) == expected


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(LOCAL, marks=pytest.mark.soak),
        pytest.param(ALL_REDUCE, marks=pytest.mark.cluster),
        pytest.param(FED_AVG, marks=pytest.mark.sweep),
    ],
    ids=["Local", "AllReduce", "Fed"],
)
def test_coordinator_and_worker_killed_together(rig: Rig, strategy: Job) -> None:
    expected = rig.outcome(paced(strategy, 0.0))
    with rig.running(paced(strategy, 0.1)) as run:
        await_event(run, "ModelBuilt")
        rig.cluster.kill("coordinator")
        rig.cluster.kill("worker-0")
        assert outcome_of(run).digests == expected.digests


@pytest.mark.sweep
def test_no_deadline_runs_while_the_coordinator_is_frozen(rig: Rig) -> None:
    expected = rig.outcome(paced(deadline(6.0), 0.0))
    pid = rig.cluster.processes["coordinator"].pid
    assert pid is not None
    for deadline_s in growing(6.0):
        with rig.running(paced(deadline(deadline_s), 0.3)) as run:
            await_event(run, "ClientsAssigned")
            os.kill(pid, signal.SIGSTOP)
            threading.Event().wait(deadline_s + 0.5)  # longer than the deadline
            os.kill(pid, signal.SIGCONT)
            outcome = outcome_of(run)
            if run.status().reproducible:
                assert outcome.digests == expected.digests
                return
    pytest.fail("the round was closed by its deadline, however long that was")


def deadline(seconds: float) -> Job:
    return {**federated(rounds=1), "options": {"quorum": 1, "round_deadline_s": seconds}}


@pytest.mark.sweep
@pytest.mark.parametrize("process_by_process", [PATIENT_FLAGS], indirect=True)
def test_nothing_has_expired_when_a_coordinator_returns_after_long(
    process_by_process: Hands,
) -> None:
    """Leases of 30 s outlive an outage of 32 s, and so does a round that closes after 30 s.

    Both begin again when the coordinator returns, so a busy machine has that long to go on.
    """
    first = process_by_process.coordinator("first")
    address = first.address
    workers = [process_by_process.worker(f"w{n}", address) for n in range(3)]
    for worker in workers:
        assert worker.address
    with Client(address) as client:
        expected = outcome_of(client.submit(paced(deadline(30.0), 0.0)))
        expected_steps = outcome_of(client.submit(paced(ALL_REDUCE, 0.0, 40)))
        starts = {w.worker_id: w.incarnation for w in client.workers()}
        # The next coordinator gives the workers to the run that comes first by name, whatever
        # they have begun for the other one.
        rounds = client.submit(paced(deadline(30.0), 0.5), "b-rounds")
        steps = client.submit(paced(ALL_REDUCE, 0.2, 40), "a-steps")
        await_event(rounds, "ClientsAssigned")
        await_event(steps, "MembersFormed")
        first.kill()
        threading.Event().wait(OUTAGE_S)  # longer than everything that could expire
        process_by_process.coordinator("second", listen=address)
        assert outcome_of(rounds).digests == expected.digests
        assert outcome_of(steps).digests == expected_steps.digests
        assert rounds.status().reproducible, "the round was closed by its deadline"
        for run in (rounds, steps):
            formed = [e for e in events_of(run) if e.kind == "MembersFormed"]
            assert len(formed) == 1, [e.sentence for e in formed]
            outages = RunCourse.of(run.events(), run.status().job).outages.outages
            # A machine that stands still for some seconds makes short ones beside it.
            assert sum(each.seconds > OUTAGE_S for each in outages) == 1, outages
        assert {w.worker_id: w.incarnation for w in client.workers()} == starts


@pytest.mark.sweep
def test_frozen_coordinator_is_fenced_and_the_next_one_ends_its_run(
    process_by_process: Hands,
) -> None:
    old = process_by_process.coordinator("old")
    old_workers = [process_by_process.worker(f"old-{n}", old.address) for n in range(2)]
    for worker in old_workers:
        assert worker.address
    with Client(old.address) as client:
        expected: Outcome = outcome_of(client.submit(paced(ALL_REDUCE, 0.0, 60)))
        run_id = client.submit(paced(ALL_REDUCE, 0.2, 60)).run_id
        await_step(client.get(run_id), 3)
        old.send(signal.SIGSTOP)
        new = process_by_process.coordinator("new")
        address = new.address
        for n in range(2):
            process_by_process.worker(f"new-{n}", address)
    with Client(address) as client:
        run = client.get(run_id)
        # The workers of the old one do not beat here, so others take over.
        await_event(run, "MembersFormed", lambda e: "new-1" in e.sentence)
        old.send(signal.SIGCONT)
        assert old.popen.wait(PATIENCE_S) == EXIT_FENCED
        assert outcome_of(run).digests == expected.digests
    assert _terms(process_by_process.folder / "data" / "journal.sqlite") == [1, 2]


@pytest.mark.sweep
def test_a_job_of_an_old_journal_that_workers_refuse_fails_with_their_reason(
    process_by_process: Hands,
) -> None:
    """The coordinator reads what other limits have let in; a worker does not know of that."""
    first = process_by_process.coordinator("first")
    with Client(first.address) as client:
        client.submit(crash_job(LOCAL), "large")
    first.kill()
    metrics = ", ".join(f'\\"tests.userland.losses:m{n}\\"' for n in range(MAX_METRICS + 1))
    journal = process_by_process.folder / "data" / "journal.sqlite"
    with closing(sqlite3.connect(journal)) as connection, connection:
        enlarge = "UPDATE event SET payload = replace(payload, ?, ?) WHERE kind = 'RunSubmitted'"
        connection.execute(enlarge, ('\\"accuracy\\"', metrics))
    second = process_by_process.coordinator("second")
    process_by_process.worker("w0", second.address)
    refused = pytest.raises(UserCodeError, match=f"at most {MAX_METRICS} items are allowed")
    with Client(second.address) as client, refused:
        client.get(RunId("large")).result()


def _terms(journal: Path) -> list[int]:
    """The terms in the order in which they wrote: a fenced one must not write again."""
    with sqlite3.connect(journal) as connection:
        rows = connection.execute("SELECT term FROM event ORDER BY position").fetchall()
    changes: list[int] = []
    for (term,) in rows:
        if not changes or changes[-1] != term:
            changes.append(term)
    return changes
