"""Each run keeps the rules that it began with: under the present number and under the first one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.client.local.cluster import LocalCluster
from stratagem.common.base.ids import RunId
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT, FIRST
from stratagem.coordinator.core.fact_text import SCHEMA_VERSION
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import Holder
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    assert_same_bits,
    data_parallel,
    federated,
    outcome_of,
)
from tests.jobs import ALLOW, job
from tests.reference.compressed_loop import compressed_loop
from tests.reference.loops import federated_loop, sharded_loop
from tests.repository import ROOT
from tests.userland.data import classes
from tests.userland.metrics import macro_f1
from tests.userland.models import mlp

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("a run goes on by the numerics that its journal began with"),
]

WIDE = {"entrypoint": "tests.userland.models:mlp", "kwargs": {"hidden": 6000}}
CLIPPED = {"name": "sgd", "lr": 0.1, "clip_norm": 0.01}
MACRO_F1 = "tests.userland.metrics:macro_f1"
ONE_CLIENT: dict[str, Any] = {"num_clients": 1, "rounds": 2, "execution": {"precision": "Full"}}


def old_runs() -> dict[str, JobSpec]:
    fp16 = {"compression": "fp16", "strategy": data_parallel(3)}
    return {
        "clipped": job(
            WIDE,
            optimizer=CLIPPED,
            strategy=data_parallel(2),
            steps=4,
            evaluation={"metrics": [MACRO_F1], "batch_size": 5, "every": "4 steps"},
        ),
        "coded": job("dropout_mlp", optimizer=ADAMW, **fp16),
        "federated": federated(**ONE_CLIENT),
    }


def journal_of_old(path: Path, jobs: dict[str, JobSpec]) -> None:
    """As a coordinator left it that knew no numbers."""
    journal = Journal.open(path)
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=1)
    for name, spec in jobs.items():
        payload = json.dumps({"job_json": spec.canonical_json(), "wall_s": 1.0})
        record = Record(
            RunId(name), 0, "RunSubmitted", SCHEMA_VERSION, payload, time_s=1.0, wall_s=1.0
        )
        journal.append(lead.term, [record])
    journal.release(lead.term)
    journal.close()


def mean_over_batches(state: dict[str, Tensor]) -> float:
    """What a metric of the user's was by the rules before 3."""
    model = mlp(hidden=6000).eval()
    model.load_state_dict(state)
    x, y = classes()["test"]
    pairs = list(zip(x.split(5), y.split(5), strict=True))
    with torch.no_grad():
        return sum(macro_f1(model(x), y) * len(y) for x, y in pairs) / len(y)


def test_runs_of_an_old_journal_end_with_the_old_bits(tmp_path: Path) -> None:
    jobs = old_runs()
    (tmp_path / "coordinator").mkdir()
    journal_of_old(tmp_path / "coordinator" / "journal.sqlite", jobs)
    with (
        LocalCluster(
            workers=3,
            threads=1,
            data_dir=tmp_path,
            import_path=[ROOT],
            allow=[ALLOW],
            programs={
                "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
                "worker": [sys.executable, "-m", "stratagem.worker"],
            },
        ) as cluster,
        cluster.client() as client,
    ):
        outcomes = {name: outcome_of(client.get(name)) for name in jobs}
    found = {name: outcome.state for name, outcome in outcomes.items()}
    averaged = outcomes["clipped"].status.metrics[f"test.{MACRO_F1}"]
    assert averaged == pytest.approx(mean_over_batches(found["clipped"]), rel=1e-12)
    expected: dict[int, dict[str, Any]] = {
        numerics: {
            "clipped": sharded_loop(jobs["clipped"], ALLOWED, 2, numerics=numerics).state,
            "coded": compressed_loop(jobs["coded"], ALLOWED, 3, numerics=numerics).state,
            "federated": federated_loop(jobs["federated"], ALLOWED, numerics=numerics).state,
        }
        for numerics in (FIRST, CURRENT)
    }
    for name, state in found.items():
        assert_same_bits(state, expected[FIRST][name])
        assert not all(torch.equal(state[key], expected[CURRENT][name][key]) for key in state)
