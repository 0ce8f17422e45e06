"""A cluster of real processes, a page of it, and a run of each strategy."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from tests.client.dashboard.page_rig import page_of
from tests.cluster.jobs import (
    Gates,
    data_parallel,
    federated,
    gates_in,
    gossip,
    model_parallel,
    population,
    replicated,
)
from tests.jobs import ALLOW, job
from tests.repository import ROOT

HELD = str(Path(__file__).with_name("held_process.py"))
CUSTOM = ROOT / "examples" / "custom_strategy"
STAGES = {"0 1": "worker-0", "2 3": "worker-1"}
EVALUATED = {"split": "test", "every": "4 steps", "metrics": ["accuracy"]}


@dataclass
class PageCluster:
    cluster: LocalCluster
    client: Client
    held: Gates
    """Close the gate of a process' name, and it stays away once it has ended."""
    gates: Gates
    """For batches; see userland.Gated."""
    url: str


def pipelined(protocol: str, **communication: Any) -> JobSpec:
    strategy = model_parallel(STAGES, protocol=protocol, **communication)
    return job("dropout_mlp", strategy=strategy, evaluation=EVALUATED)


def halving() -> JobSpec:
    """Of the package in examples/custom_strategy."""
    config = {"learning_rates": [0.001, 0.1], "rungs": 2, "steps_per_rung": 2}
    strategy = {"type": "Custom", "coordinator": "SuccessiveHalving", "config": config}
    evaluation = {"every": "2 steps", "best": "loss", "mode": "min"}
    return job(strategy=strategy, evaluation=evaluation, steps=None, checkpoint=None)


def jobs() -> dict[str, JobSpec]:
    """One of each strategy, by the name that its run gets."""
    anywhere = model_parallel([("0", "tag:any"), ("1 2", "tag:any")])
    return {
        "local": job(evaluation=EVALUATED),
        "allreduce": job(strategy=data_parallel(2), evaluation=EVALUATED),
        "parameterserver": job(strategy=data_parallel(2, "ParameterServer")),
        "decentralized": job(strategy=gossip(3), evaluation=EVALUATED),
        "direct": pipelined("Direct"),
        "store": pipelined("DataStore"),
        "pipeline": pipelined("Pipeline", micro_batch_size=4),
        "federated": federated(num_clients=4, rounds=3),
        "population": population(3, 2),
        "custom": halving(),
        "nested-replicas": job(strategy=replicated(2, anywhere)),
        "nested-silos": federated(num_clients=2, rounds=2, options={"inner": data_parallel(2)}),
    }


@contextmanager
def page_cluster(folder: Path) -> Iterator[PageCluster]:
    """Four workers, with a store for activations, and a page that operates."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    site = folder / "site"
    subprocess.run([*install, str(site), "--no-build-isolation", str(CUSTOM)], check=True)
    for name in ("held", "gates"):
        (folder / name).mkdir()
    cluster = LocalCluster(
        workers=4,
        threads=1,
        data_dir=folder / "cluster",
        import_path=[ROOT],
        allow=[ALLOW],
        programs={part: [sys.executable, HELD, part] for part in ("coordinator", "worker")},
        environment={
            "PYTHONPATH": str(site),
            "TEST_HELD": str(folder / "held"),
            "STRATAGEM_WORKER_ACTIVATION_STORE": f"file://{folder / 'activations'}",
        },
        worker_arguments={f"worker-{n}": ["--tags", "any"] for n in range(4)},
    )
    with (
        gates_in(folder / "held") as held,
        gates_in(folder / "gates") as gates,
        cluster,
        cluster.client() as client,
        page_of(cluster.address, operates=True) as (_, url),
    ):
        yield PageCluster(cluster, client, held, gates, url)
