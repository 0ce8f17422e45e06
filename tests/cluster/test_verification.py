"""Runs that are computed again, and machines that compute wrongly for a while."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from stratagem.client.course.claims import Claim, ClaimPlace
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.numerics.verification import Conclusion
from tests.client.cli.command_line import PROGRAM, invoke
from tests.cluster.jobs import Gates
from tests.crash.jobs import (
    ALL_REDUCE,
    GOSSIP,
    JOBS,
    LOCAL,
    PARAMETER_SERVER,
    YOGI,
    Job,
    crash_job,
    federated,
    gated,
    local_steps,
    paced,
    pipeline,
    population,
    silos,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("a run that is computed again has the digests that it recorded"),
]

SLIGHTLY = str(1 + 2.0**-20)
"""The factor of a loss that is wrong in its last bits."""


def disturbed(folder: Path, strategy: Job = LOCAL) -> Job:
    kwargs = {"folder": str(folder)}
    loss = {"entrypoint": "tests.userland.losses:disturbed", "kwargs": kwargs}
    return {**crash_job(strategy), "loss": loss, "retention": 8}


def wrong(folder: Path) -> Path:
    return folder / "wrong"


def test_a_run_that_was_wrong_is_told_from_a_verifier_that_is(
    client: Client, tmp_path: Path
) -> None:
    wrong(tmp_path).write_text(SLIGHTLY)
    run = client.submit(disturbed(tmp_path))
    run.result()
    wrong(tmp_path).unlink()
    found = client.verify(run.run_id)
    assert found.conclusion is Conclusion.RUN
    assert found.difference is not None
    assert (found.difference.claim.place.step, found.difference.step) == (2, 1)
    assert len(found.equal) == 1, "the state before the first step"
    # Only while the second execution computes, and not the third one.
    good = client.submit(disturbed(tmp_path))
    good.result()

    def mend(_run: Claim, again: Claim) -> None:
        if again.place.step:
            wrong(tmp_path).unlink()

    wrong(tmp_path).write_text(SLIGHTLY)
    assert client.verify(good.run_id, on_claim=mend).conclusion is Conclusion.VERIFIER
    wrong(tmp_path).write_text("random")
    assert client.verify(good.run_id).conclusion is Conclusion.JOB
    wrong(tmp_path).unlink()
    # From a state that is still stored, and of the end alone.
    assert len(client.verify(good.run_id, segments={6}).equal) == 1


def test_the_commands_verify_certify_and_compare(
    client: Client, exact_cluster: LocalCluster, tmp_path: Path
) -> None:
    run = client.submit(disturbed(tmp_path))
    run.result()
    at = ("--coordinator", exact_cluster.address)
    path = tmp_path / "certificate.json"
    done = invoke("verify", run.run_id, "--certificate", path, *at)
    assert done.exit_code == 0, done.output
    assert "state after 12 steps: " in done.output
    assert "verified 7 of 7 digests on worker-" in done.output
    assert f"{path}: the run has recorded these 7 digests" in invoke("verify", path, *at).output
    assert "verified  7 digests equal on worker-" in invoke("status", run.run_id, *at).output
    sampled = invoke("verify", run.run_id, "--segments", "1,5:6", "--format", "json", *at)
    assert json.loads(sampled.output)["equal"] == 3
    assert (
        "--segments: 'x' is not such as 3,7:9"
        in invoke("verify", run.run_id, "--segments", "x", *at).output
    )
    wrong(tmp_path).write_text(SLIGHTLY)
    other = client.submit({**disturbed(tmp_path), "name": "other"})
    other.result()
    told = invoke("verify", run.run_id, *at)
    assert told.exit_code == 4
    assert " differs first at step 1: " in told.output
    assert "the run was wrong" in told.output
    both = invoke("compare", run.run_id, other.run_id, "--bits", *at)
    assert both.exit_code == 4
    assert "name: 'crash' and 'other'" in both.output
    assert "equal up to state after 0 steps" in both.output
    assert " differs first at step 1: " in both.output
    same = invoke("compare", run.run_id, run.run_id, "--bits", *at)
    assert (same.exit_code, same.output) == (0, "7 digests, equal\nnothing differs\n")


STRATEGIES: dict[str, Job] = {
    "Local": crash_job(LOCAL),
    "AllReduce": crash_job(ALL_REDUCE),
    "ParameterServer": crash_job(PARAMETER_SERVER),
    "Decentralized": crash_job(GOSSIP),
    "local steps": crash_job(local_steps(), every=3),
    "Pipeline": crash_job(pipeline(last="worker-1")),
    "FedAvg": crash_job(federated()),
    "FedYogi": crash_job(federated(aggregation=YOGI)),
    "PopulationBased": population(),
    "Federated of AllReduce": crash_job(silos(ALL_REDUCE)),
    "PopulationBased of AllReduce": population(ALL_REDUCE),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_verified_and_a_wrong_bit_is_found(
    client: Client, tmp_path: Path, name: str
) -> None:
    kwargs = {"folder": str(tmp_path)}
    loss = {"entrypoint": "tests.userland.losses:disturbed", "kwargs": kwargs}
    run = client.submit({**STRATEGIES[name], "loss": loss})
    run.result()
    found = client.verify(run.run_id)
    assert (found.conclusion, found.unverified) == (Conclusion.EQUAL, {})
    assert len(found.equal) > 3
    wrong(tmp_path).write_text(SLIGHTLY)
    again = client.verify(run.run_id)
    assert again.difference is not None, "a wrong loss has left no trace"
    assert again.conclusion is Conclusion.RUN


@pytest.mark.sweep
@pytest.mark.parametrize("name", JOBS)
def test_no_run_of_a_healthy_machine_is_accused(client: Client, name: str) -> None:
    run = client.submit(JOBS[name])
    run.result()
    found = client.verify(run.run_id)
    assert found.conclusion is Conclusion.EQUAL
    assert set(found.unverified.values()) <= {"clients joined while the run trained"}
    # From a stored state, where there is one that has all.
    if found.equal[-1].place.is_root_state:
        last = client.verify(run.run_id, segments={found.equal[-1].segment})
        assert (last.conclusion, last.unverified) == (Conclusion.EQUAL, {})
    assert left_of(client, run.run_id) == []


def left_of(client: Client, run_id: str) -> list[str]:
    """The verifying runs of a run that are still there."""
    return [run.run_id for run in client.runs() if run.run_id.startswith(f"verify-{run_id}")]


@pytest.mark.sweep
def test_a_deadline_that_leaves_a_client_out_accuses_nobody(client: Client, gates: Gates) -> None:
    options = {"quorum": 0.5, "round_deadline_s": 8.0}
    job = gated(federated(rounds=1) | {"options": options}, gates.folder)
    good = client.submit(job)
    assert good.result().status.reproducible
    for run_id, words in ((good.run_id, "in the verifying run, timing decided about"), ("", "")):
        gates.close("client2-1")
        if not run_id:  # a run that its own deadline has decided
            slow = client.submit(job)
            slow.wait()
            run_id, words = slow.run_id, "timing decided about round or segment 1"
        found = client.verify(run_id)
        gates.open()
        assert found.difference is None
        assert ClaimPlace("", 1) in found.unverified
        assert all(each.startswith(words) for each in found.unverified.values())
        assert {claim.place.client for claim in found.equal} == {None, 0, 1}
        assert left_of(client, run_id) == []


@pytest.mark.sweep
def test_a_federation_that_was_cancelled_is_verified_as_far_as_it_came(
    client: Client, gates: Gates
) -> None:
    gates.close("client2-1")
    run = client.submit(gated(federated(rounds=2), gates.folder))
    list(run.watch(kinds=["UpdateReceived"], limit=2))
    run.cancel()
    gates.open()
    run.wait()
    found = client.verify(run.run_id)
    assert (found.conclusion, found.unverified) == (Conclusion.EQUAL, {})
    assert sorted(str(claim.place) for claim in found.equal) == [
        "state after 0 steps",
        "update of client 0 in round 1",
        "update of client 1 in round 1",
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_run_behind(
    client: Client, exact_cluster: LocalCluster, by: signal.Signals
) -> None:
    run = client.submit(paced(LOCAL, 0.2))
    run.result()
    arguments = ["verify", run.run_id, "--coordinator", exact_cluster.address]
    with subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "state after 0 steps" in process.stdout.readline()
        process.send_signal(by)
        assert process.wait(60) == 130
    assert left_of(client, run.run_id) == []
