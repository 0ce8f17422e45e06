"""Named faults of workers: killed, frozen, gone, deadly. What must hold beside the same bits."""

import json
import signal
from pathlib import Path

import pytest

from stratagem.client.course.views import Event, Phase
from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import Gates
from tests.crash.hands import hands
from tests.crash.jobs import (
    ALL_REDUCE,
    FED_AVG,
    JOBS,
    LOCAL,
    PARAMETER_SERVER,
    Job,
    crash_job,
    gated,
)
from tests.crash.rig import (
    Rig,
    await_event,
    await_status,
    events_of,
    outcome_of,
)

pytestmark = pytest.mark.promise("Others go on for a worker that is killed, frozen or gone.")

PACE_S = 0.05


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(ALL_REDUCE, marks=pytest.mark.cluster),
        pytest.param(PARAMETER_SERVER, marks=pytest.mark.soak),
    ],
    ids=["AllReduce", "Server"],
)
def test_survivors_redo_the_step_of_a_killed_worker(rig: Rig, strategy: Job, gates: Gates) -> None:
    document = gated(strategy, gates.folder)
    expected = rig.outcome(document)
    gates.close("worker-1-batch-5")
    num_said = len(rig.cluster.log_tail("coordinator"))
    survivors = ("worker-0", "worker-2")
    starts = rig.incarnations()
    num_starts = rig.cluster.processes["worker-1"].num_starts
    with rig.running(document) as run:
        gates.wait_reached("worker-1-batch-5")
        rig.cluster.kill("worker-1")
        gates.open()
        outcome = outcome_of(run)
        events = list(events_of(run))
    assert outcome.digests == expected.digests
    trained = [each.payload for each in events if each.kind == "SegmentFinished"]
    assert sum(each["num_redone_steps"] for each in trained) >= 1
    rig.cluster.wait_restarted("worker-1", num_starts)
    assert all(rig.incarnations()[name] == starts[name] for name in survivors)
    # A quiet machine takes half a second; who saw nothing would wait for the lease to end.
    said = rig.cluster.log_tail("coordinator")[num_said:]
    assert "worker worker-1 is lost: " in said
    assert "worker worker-1 is lost: no heartbeat" not in said


@pytest.mark.sweep
def test_client_of_a_worker_killed_in_mid_round_is_trained_elsewhere(
    rig: Rig, gates: Gates
) -> None:
    document = gated(FED_AVG, gates.folder)
    expected = rig.outcome(document)
    begun = [f"client{number}-2" for number in range(3)]
    gates.close(*begun)
    with rig.running(document) as run:
        first = await_event(run, "ClientsAssigned")
        (client,) = _clients_of(first, "worker-1")
        gates.wait_reached(*begun)
        rig.cluster.kill("worker-1")
        moved = await_event(
            run, "ClientsAssigned", lambda e: e.index > first.index and _takes(e, client)
        )
        gates.open()
        assert moved.payload["round_num"] == 1
        assert client not in _clients_of(moved, "worker-1")
        assert outcome_of(run).digests == expected.digests


def _clients_of(event: Event, worker: str) -> list[int]:
    given = event.payload["assignments"]
    return [a["client"] for a in given if a["member"] and a["member"]["worker_id"] == worker]


def _takes(event: Event, client: int) -> bool:
    return any(a["client"] == client and a["member"] for a in event.payload["assignments"])


@pytest.mark.sweep
def test_worker_that_comes_back_under_its_old_name_joins_the_run_again(
    rig: Rig, gates: Gates
) -> None:
    """Worker-0 has two batches in each step, and goes no further before the other is back."""
    document = gated(ALL_REDUCE, gates.folder, steps=30)
    expected = rig.outcome(document)
    gates.close("worker-2-batch-3", "worker-0-batch-13")
    with rig.running(document) as run:
        gates.wait_reached("worker-2-batch-3")
        rig.cluster.kill("worker-2")
        gates.open("worker-2-batch-3")
        lost = await_event(run, "MembersFormed", lambda e: len(e.payload["members"]) == 2)
        gates.wait_reached("worker-0-batch-13")
        rig.settle()
        gates.open()
        back = await_event(
            run,
            "MembersFormed",
            lambda e: e.index > lost.index and len(e.payload["members"]) == 3,
        )
        assert rig.incarnations()["worker-2"] in json.dumps(back.payload)
        assert outcome_of(run).digests == expected.digests


@pytest.mark.sweep
def test_local_run_waits_with_the_reason_and_ends_when_a_worker_comes(
    rig: Rig, gates: Gates, tmp_path: Path
) -> None:
    """Its only worker dies, and nobody starts it again; it goes on from the last commit."""
    document = gated(LOCAL, gates.folder)
    expected = rig.outcome(document)
    gates.close("batch-5")
    with hands(tmp_path) as started:
        address = started.coordinator("only").address
        first = started.worker("first", address)
        with Client(address) as client:
            run = client.submit(document)
            await_event(run, "SegmentCommitted")
            gates.wait_reached("batch-5")
            first.kill()
            gates.open()
            waiting = await_status(run, lambda s: s.strategy_phase == "WAITING", "the run waits")
            assert "waiting for 1 of 1 workers: no worker is available" in waiting.reason
            assert waiting.phase is Phase.RECOVERING
            started.worker("second", address)
            assert outcome_of(run).digests == expected.digests


@pytest.mark.sweep
def test_frozen_worker_is_dropped_and_harmless_when_it_thaws(rig: Rig, gates: Gates) -> None:
    document = gated(ALL_REDUCE, gates.folder, steps=40)
    expected = rig.outcome(document)
    gates.close("worker-1-batch-5")
    with rig.running(document) as run:
        gates.wait_reached("worker-1-batch-5")
        rig.cluster.kill("worker-1", signal.SIGSTOP)
        gates.open()
        try:
            lost = await_event(
                run, "MembersFormed", lambda e: e.payload["membership"] > 1 and "lost" in e.sentence
            )
            assert "worker-1 lost" in lost.sentence
            assert outcome_of(run).digests == expected.digests
        finally:
            rig.cluster.kill("worker-1", signal.SIGCONT)
    rig.settle()
    # Its torch thread must be free again: runs that need all three workers go through it.
    again = rig.outcome(crash_job({**ALL_REDUCE, "options": {"min_replicas": 3}}))
    assert len(again.digests) == 7
    assert rig.cluster.processes["worker-1"].last_exit in (None, -9, 11, 137)


FROZEN_AFTER = {
    "ParameterServer": "SegmentFinished",
    "Gossip": "SegmentFinished",
    "FedAvg": "UpdateReceived",
    "Population": "SegmentFinished",
    "Silos": "SegmentFinished",
}
"""Strategy -> the first fact after which a worker freezes, in the middle of what comes next."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "sweep" if name == "FedAvg" else "soak"))
        for name in FROZEN_AFTER
    ],
)
def test_others_take_over_from_a_frozen_worker(rig: Rig, name: str) -> None:
    """The run ends with the same bits while the worker stays frozen."""
    kwargs = {"pace_s": PACE_S}
    model = {"entrypoint": "tests.userland.acting_models:paced", "kwargs": kwargs}
    document = {**JOBS[name], "model": model}
    expected = rig.outcome({**document, **_unpaced(document)})
    with rig.running(document) as run:
        await_event(run, FROZEN_AFTER[name])
        rig.cluster.kill("worker-1", signal.SIGSTOP)
        try:
            assert outcome_of(run) == expected
        finally:
            rig.cluster.kill("worker-1", signal.SIGCONT)
    rig.settle()


def _unpaced(document: Job) -> Job:
    return {"model": {**document["model"], "kwargs": {"pace_s": 0.0}}}
