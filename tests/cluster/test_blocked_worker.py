"""A run whose worker is blocked by the user's code says where, and `cancel` frees the worker."""

from pathlib import Path

import pytest

from stratagem.client.course.views import Progress
from stratagem.client.local.cluster import LocalCluster
from tests.cluster.jobs import model_parallel, outcome_of, train
from tests.jobs import ALLOW, job, user_model
from tests.repository import ROOT
from tests.worker.service.gate import Gate

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("who blocks a run is named, and cancel frees the worker"),
]

PROMPT = {"STRATAGEM_WORKER_STALL_REPORT_S": "0.5", "STRATAGEM_WORKER_ABORT_GRACE_S": "0.5"}


def test_who_blocks_a_run_is_named_and_the_same_workers_take_the_next_one(tmp_path: Path) -> None:
    gate = Gate(tmp_path)  # in the stage of worker-1; nobody opens it
    gated = user_model("acting_models:gated", **gate.kwargs)
    plain = job("dropout_mlp", strategy=model_parallel({"0 1": "worker-0", "2 3": "worker-1"}))
    cut = model_parallel({"0 1": "worker-0", "2 3 4": "worker-1"})
    with (
        LocalCluster(
            workers=2, threads=1, import_path=[ROOT], allow=[ALLOW], environment=PROMPT
        ) as cluster,
        cluster.client() as client,
    ):
        blocked, waiting = client.submit(job(gated, strategy=cut)), client.submit(plain)
        reasons = (item.reason for item in blocked.watch() if isinstance(item, Progress))
        reason = next(reason for reason in reasons if "in forward" in reason)
        assert reason.startswith("worker-1 has been at training step 1 for over ")
        assert "acting_models.py, line " in reason
        listed = {run.run_id: run.reason for run in client.runs()}
        for told in (listed[blocked.run_id], blocked.status().reason):
            assert told.startswith("worker-1 has been at training step 1 for over ")
        blocked.cancel()
        assert outcome_of(waiting).digests == train(client, plain).digests
        starts = {name: each.num_starts for name, each in cluster.processes.items()}
        assert starts == {"coordinator": 1, "worker-0": 1, "worker-1": 2}
        facts = {event.kind for run in (blocked, waiting) for event in run.events()}
    assert "ProcessDied" not in facts
