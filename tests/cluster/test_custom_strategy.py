"""A strategy from a package outside the tree, installed and run as a user would."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import ALLOWED, Outcome, assert_same_bits, train
from tests.jobs import ALLOW, job
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

pytestmark = pytest.mark.cluster

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


def test_it_trains_and_its_result_has_the_bits_of_the_loop(custom_client: Client) -> None:
    outcome = train(custom_client, halving())
    kept = rungs_of(outcome)
    assert [len(parties) for parties in kept] == [2, 1, 1]
    rate = [0.001, 0.1, 0.01, 0.3][int(kept[-1][0].removeprefix("lr"))]
    alone = job(steps=12, optimizer={"name": "sgd", "lr": rate, "momentum": 0.9})
    assert_same_bits(outcome.state, sharded_loop(alone, ALLOWED, 1).state)
    assert outcome.status.commits[-1].segment == 3


def test_its_own_check_refuses_a_config(custom_client: Client) -> None:
    with pytest.raises(InvalidInputError) as caught:
        custom_client.submit(halving(rungs=0))
    assert "strategy.config.rungs: must be a count >= 1" in str(caught.value)


def test_an_unknown_name_is_refused_with_the_registered_ones(client: Client) -> None:
    """The cluster of the other tests has not installed it."""
    with pytest.raises(InvalidInputError) as caught:
        client.submit(halving())
    assert str(caught.value).startswith(
        "strategy.coordinator: 'SuccessiveHalving' has no implementation here; registered are none"
    )


def test_a_slip_of_the_pen_is_told_what_is_installed(custom_client: Client) -> None:
    document = halving().document()
    document["strategy"] = {**document["strategy"], "coordinator": "SuccesiveHalving"}  # type: ignore[dict-item]
    with pytest.raises(InvalidInputError, match="are SuccessiveHalving; did you mean Succ"):
        custom_client.submit(JobSpec.parse(document))
