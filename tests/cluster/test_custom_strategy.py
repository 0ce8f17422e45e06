"""A strategy from a package outside the tree, installed and run as a user would."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import ALLOWED, Outcome, assert_same_bits, train
from tests.jobs import ALLOW, job
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("a strategy of another package is installed, checked and exact"),
]

PACKAGE = ROOT / "examples" / "custom_strategy"
PROGRAM = "stratagem.coordinator"


@pytest.fixture(scope="module")
def custom_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a cluster whose coordinator has the package; its workers do not need it."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(site), "--no-build-isolation", str(PACKAGE)], check=True)
    cluster = LocalCluster(
        workers=2,
        threads=1,
        data_dir=tmp_path_factory.mktemp("custom"),
        import_path=[ROOT],
        allow=[ALLOW],
        programs={
            "coordinator": ["/usr/bin/env", f"PYTHONPATH={site}", sys.executable, "-m", PROGRAM],
            "worker": [sys.executable, "-m", "stratagem.worker"],
        },
    )
    with cluster, cluster.client() as client:
        yield client


def halving(**config: Any) -> JobSpec:
    settings = {"learning_rates": [0.001, 0.1, 0.01, 0.3], "rungs": 3, "steps_per_rung": 4}
    strategy = {
        "type": "Custom",
        "coordinator": "SuccessiveHalving",
        "config": {**settings, **config},
    }
    return job(
        strategy=strategy,
        steps=None,
        checkpoint=None,
        optimizer={"name": "sgd", "lr": 0.5, "momentum": 0.9},
        evaluation={"every": "4 steps", "best": "loss", "mode": "min"},
    )


def rungs_of(outcome: Outcome) -> list[list[str]]:
    return [event.payload["data"]["kept"] for event in outcome.of("Noted")]


def test_it_trains_with_the_bits_of_the_loop_and_checks_its_config(custom_client: Client) -> None:
    outcome = train(custom_client, halving())
    kept = rungs_of(outcome)
    assert [len(parties) for parties in kept] == [2, 1, 1]
    rate = [0.001, 0.1, 0.01, 0.3][int(kept[-1][0].removeprefix("lr"))]
    alone = job(steps=12, optimizer={"name": "sgd", "lr": rate, "momentum": 0.9})
    assert_same_bits(outcome.state, sharded_loop(alone, ALLOWED, 1).state)
    assert outcome.status.commits[-1].segment == 3
    with pytest.raises(InvalidInputError) as caught:
        custom_client.submit(halving(rungs=0))
    assert "strategy.config.rungs: must be a count >= 1" in str(caught.value)
