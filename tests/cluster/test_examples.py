"""Every job file in examples/ runs on real processes, at a size that a test can afford."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.client.local_cluster import LocalCluster
from stratagem.client.sync import Client
from stratagem.client.views import Phase
from stratagem.common.job import JobSpec, load_job
from stratagem.common.strategy import Federated, PopulationBased
from tests.cluster.conftest import ROOT

pytestmark = pytest.mark.cluster

JOBS = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def examples_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    cluster = LocalCluster(
        workers=2,
        threads=1,
        data_dir=tmp_path_factory.mktemp("examples"),
        import_path=[ROOT],
        allow=["examples.*:*"],
        worker_arguments={f"worker-{number}": ["--tags", "stage"] for number in range(2)},
    )
    with cluster, cluster.client() as client:
        yield client


def small(path: Path) -> JobSpec:
    """The same job, over in a second or two."""
    job = load_job(path)
    strategy, overrides = job.strategy, ["epochs=1"]
    if job.only_evaluates:
        overrides = []
    elif isinstance(strategy, Federated):
        overrides = ["strategy.rounds=2"]
    elif isinstance(strategy, PopulationBased):
        overrides = ["strategy.generations=2", "steps_per_generation=2"]
    if path.name.startswith("charlm"):
        overrides += ["data.kwargs.num_chars=8000", "model.kwargs.width=16"]
    return load_job(path, overrides)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_an_example_runs(examples_client: Client, path: Path) -> None:
    status = examples_client.submit(small(path)).result().status
    assert status.phase is Phase.COMPLETED
    assert status.metrics
    assert len(path.read_text().splitlines()) < 80
