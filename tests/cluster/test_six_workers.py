"""The step history on six workers, also with one of them killed on the way: the reference's."""

from pathlib import Path
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from tests.cluster.jobs import ALLOWED, data_parallel, outcome_of, wait_for
from tests.jobs import ALLOW, job, user_model
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

pytestmark = pytest.mark.sweep

LONG: dict[str, Any] = {"steps": 120, "checkpoint": {"every": "5 steps"}}


def test_six_workers_record_what_one_process_does_whoever_dies(tmp_path: Path) -> None:
    spec = job(user_model("dropout_mlp"), strategy=data_parallel(6), **LONG)
    losses = sharded_loop(spec, ALLOWED, 6).losses
    with (
        LocalCluster(
            workers=6, threads=1, data_dir=tmp_path, import_path=[ROOT], allow=[ALLOW]
        ) as cluster,
        cluster.client() as client,
    ):
        bytes_of = []
        for is_disturbed in (False, True):
            run = client.submit(spec)
            if is_disturbed:
                wait_for(run, "SegmentCommitted", 2)
                cluster.kill(run.status().worker_ids[0])
            formed = outcome_of(run).of("MembersFormed")
            assert len(formed) > is_disturbed
            history = run.history(parties="*")
            assert history["train.loss"].last.tolist() == losses
            exact = {n: each.columns.to_bytes() for n, each in history.items() if not each.observed}
            bytes_of.append(exact)
        assert bytes_of[0] == bytes_of[1]
        assert {"train.loss", "train.grad_norm", "train.lr"} <= bytes_of[0].keys()
        busy = [name for name in history if name.endswith(".busy_s")]
        assert len(busy) == 6
