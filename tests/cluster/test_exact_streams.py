"""Training rows that come as a stream, over real processes that are killed."""

import json
import signal

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    outcome_of,
    wait_for,
)
from tests.jobs import job
from tests.reference.loops import sharded_loop
from tests.stream_jobs import streamed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("who takes streams over reads them on from the last commit"),
]


def test_a_member_killed_in_the_middle_of_a_stream_changes_no_bit(
    exact_cluster: LocalCluster, client: Client, gates: Gates, lot: Gates
) -> None:
    """Who takes its streams over reads them on from the marks of the last commit."""
    data = streamed("shards", streams=6, shuffle_rows=4, stateful=True, folder=str(gates.folder))
    spec = job(
        "dropout_mlp",
        data=data,
        accumulation={"micro_batch_size": 3},
        evaluation={"split": "test", "every": "4 steps", "metrics": ["accuracy"]},
        strategy=data_parallel(3),
    )
    gates.close("streamed-60")  # 11 rows to check the source, 6 in each step: one but the last
    run = client.submit(spec)
    gates.wait_reached("streamed-60")
    (formed,) = wait_for(run, "MembersFormed")
    members = [member["worker_id"] for member in formed.payload["members"]]
    exact_cluster.kill(members[1], signal.SIGKILL)
    new = {members[1], *(f"worker-{number}" for number in range(4))} - {members[0], members[2]}
    gates.close(*(f"{name}-streamed-55" for name in new))  # on the way from the beginning
    gates.open("streamed-60")
    outcome = outcome_of(run)
    assert not any((gates.folder / f"{name}-streamed-55.reached").exists() for name in new)
    assert len(outcome.of("MembersFormed")) > 1
    assert outcome.status.reproducible
    assert outcome.status.metrics["test.accuracy"] > 0
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 3).state)
    committed = {each.payload["step"]: each.payload for each in outcome.of("SegmentCommitted")}
    marks = {int(s): json.loads(m) for s, m in json.loads(committed[10]["streams"]).items()}
    # Five rows in each of ten steps and more, of two streams each; blocks have up to 4 rows.
    assert sorted(marks) == list(range(6))
    assert all(25 - 4 <= mark["position"] <= 30 for mark in marks.values())
    assert any(mark["state"] for mark in marks.values())
