"""What a caller sees: errors of the user's code, logs, data of all kinds, runs side by side."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from stratagem.client.course.views import Phase
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import UserCodeError
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    federated,
    outcome_of,
    train,
    wait_for,
)
from tests.jobs import ALLOW, job, user_data, user_model
from tests.reference.loops import sharded_loop
from tests.userland.data import classes

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("a caller gets errors, logs and traces, and can stop and resume"),
]


def failure_of(client: Client, spec: Any) -> UserCodeError:
    run = client.submit(spec)
    with pytest.raises(UserCodeError) as caught:
        run.result()
    status = run.status()
    assert status.phase is Phase.FAILED
    assert caught.value.type in status.reason or caught.value.worker_id in status.reason
    return caught.value


@pytest.mark.sweep
def test_what_two_workers_record_is_one_trace_and_changes_no_bit(
    client: Client, tmp_path: Path
) -> None:
    execution = {"profiling": True, "parallelism": {"DataParallel": 2}}
    spec = job(execution=execution, checkpoint={"every": "5 steps"})
    run = client.submit(spec)
    assert_same_bits(outcome_of(run).state, sharded_loop(spec, ALLOWED, 2).state)
    assert run.note == "strategy: DataParallel over 2 workers, as asked for"
    assert any(line.text == run.note for line in run.logs())

    trace = json.loads(run.download_profile(tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(rows) == 2
    assert all(name.startswith("worker-") and "clock ±" in name for name in rows.values())
    spans = {
        (event["pid"], event["name"]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "step"
    }
    of_each = [{name for of_pid, name in spans if of_pid == pid} for pid in rows]
    assert set.union(*of_each) >= {"training step 2", "training step 5", "training step 7"}
    # A party that forms again during a segment may begin it at different steps on its members.
    in_both = set.intersection(*of_each)
    assert len(in_both) >= 4
    slack_us = 1e6 * sum(trace["clockErrorSeconds"].values())
    for name in in_both:
        (begin_1, end_1), (begin_2, end_2) = (spans[pid, name] for pid in rows)
        assert begin_1 < end_2 + slack_us, name
        assert begin_2 < end_1 + slack_us, name
    assert any(event["name"] == "aten::addmm" for event in events)


@pytest.mark.sweep
def test_an_exception_of_the_users_reaches_the_caller(client: Client) -> None:
    model = user_model("acting_models:Failing", at_call=3)
    error = failure_of(client, job(model, strategy=data_parallel(2, "ParameterServer")))
    called = "model Failing was called with float32[8, 12]"
    assert (error.type, error.message) == ("KeyError", f"'no such layer'; {called}")
    assert error.activity == "training step 3"
    assert error.worker_id.startswith("worker-")
    lines = error.traceback.strip().splitlines()
    assert "tests/userland/acting_models.py" in error.traceback
    assert 'raise KeyError("no such layer")' in error.traceback
    assert lines[-2:] == ["KeyError: 'no such layer'", called]
    assert "stratagem/worker" not in error.traceback
    error = failure_of(client, federated(user_model("acting_models:Failing", at_call=1)))
    assert error.type == "KeyError"
    assert error.activity.startswith("round 1, client ")


@pytest.mark.sweep
def test_entry_point_off_the_allow_list_is_refused(client: Client) -> None:
    error = failure_of(client, job({"entrypoint": "os:getcwd"}))
    assert error.type.endswith("InvalidInputError")
    assert '"os:getcwd" is not allowed on this worker' in error.message
    assert ALLOW in error.message


@pytest.mark.sweep
def test_print_arrives_in_the_log(client: Client) -> None:
    run = client.submit(job("acting_models:Talking", steps=2, strategy=data_parallel(2)))
    run.result()
    printed = [line for line in run.logs() if line.level == "PRINT"]
    assert {line.text for line in printed} == {"the user sees 8 rows"}
    assert len({line.worker_id for line in printed}) == 2
    one = printed[0].worker_id
    assert {line.worker_id for line in run.logs(worker=one)} == {one}


@pytest.mark.sweep
def test_two_runs_share_the_workers(client: Client) -> None:
    """Both want all four workers; the slots of a gang are granted at once, so neither waits."""
    specs = [job(model, strategy=data_parallel(4)) for model in ("mlp", "dropout_mlp")]
    specs.append(federated("mlp"))
    runs = [client.submit(spec) for spec in specs]
    outcomes = [outcome_of(run) for run in runs]
    for spec, outcome in zip(specs[:2], outcomes, strict=False):
        assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 4).state)
    assert outcomes[2].status.phase is Phase.COMPLETED


def test_cancelled_and_resumed_run_has_the_bits_of_an_undisturbed_one(
    client: Client, gates: Gates
) -> None:
    spec = job(
        "dropout_mlp",
        data=user_data("gated", folder=str(gates.folder)),
        strategy=data_parallel(2),
    )
    gates.close("batch-6")
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 2)  # both replicas stand at the gate before step 6
    run.cancel()
    status = run.status()
    assert status.phase is Phase.CANCELLED
    assert status.reason == "stopped by request; commit 2 is kept"
    gates.open()
    (gates.folder / "batch-6").unlink()
    run.resume()
    outcome = outcome_of(run)
    assert [event.kind for event in outcome.events].count("RunResumed") == 1
    assert len(outcome.digests) == 5
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)


@pytest.mark.sweep
def test_cancel_frees_a_worker_that_waits_for_another(client: Client, gates: Gates) -> None:
    """Not only in the segment that has formed the exchange: here it is the third."""
    workers = [f"worker-{number}" for number in range(4)]
    data = user_data("gated", folder=str(gates.folder))
    spec = job(data=data, strategy=data_parallel(2, "ParameterServer"))
    gates.close(*(f"{name}-batch-6" for name in workers))
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 2)
    waiting, held = run.status().worker_ids
    gates.wait_reached(*(f"{name}-batch-6" for name in (waiting, held)))
    gates.open(*(f"{name}-batch-6" for name in workers if name != held))
    run.cancel()
    other = client.submit(federated(rounds=1))
    wait_for(other, "UpdateReceived", 3)
    status = other.status()
    assert status.strategy_phase == "TRAINING"
    gates.open()
    outcome_of(other)
    run.resume()
    assert_same_bits(outcome_of(run).state, sharded_loop(spec, ALLOWED, 2).state)
    assert waiting != held


@pytest.mark.sweep
def test_data_from_the_caller_and_from_a_file(client: Client, tmp_path: Path) -> None:
    rows = classes()
    tensors = {f"{split}.{side}": t for split, xy in rows.items() for side, t in zip("xy", xy)}  # noqa: B905
    save_file(tensors, tmp_path / "rows.safetensors")
    spec = job(strategy=data_parallel(2))
    by_path = job(strategy=data_parallel(2), data={"path": str(tmp_path / "rows.safetensors")})
    arrays = {split: (x.numpy(), y.numpy()) for split, (x, y) in rows.items()}
    expected = sharded_loop(spec, ALLOWED, 2).state
    for outcome in (
        train(client, spec, data=rows),
        train(client, spec, data=arrays),
        train(client, by_path),
    ):
        assert_same_bits(outcome.state, expected)
