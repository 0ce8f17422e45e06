"""A coordinator that loses everything but its journal when it is killed; the rest lies in S3."""

import sys
from collections.abc import Iterator

import pytest

from stratagem.client.local_cluster import LocalCluster
from tests.crash.conftest import LOGS
from tests.crash.jobs import JOBS
from tests.crash.rig import ROOT, Rig
from tests.crash.test_sweep import OVER_AN_OBJECT_STORE
from tests.pipeline.s3_server import s3_server

pytestmark = pytest.mark.sweep

CASES = [
    # The first state, between two updates of the first round, and in the second round.
    *(("FedAvg", "coordinator.objects.after_put", passed) for passed in (0, 2, 7)),
    ("FedAvg", "coordinator.round.pulled", 1),
    ("FedAvg", "coordinator.round.folded", 1),
    ("FedYogi", "coordinator.objects.after_put", 5),
    ("FedAvg-large", "coordinator.objects.after_part", 5),
    ("Pipeline", "coordinator.commit.pulled", 1),
]


@pytest.fixture(name="s3_rig", scope="module")
def _s3_rig() -> Iterator[Rig]:
    with s3_server("stratagem") as endpoint:
        cluster = LocalCluster(
            workers=3,
            threads=1,
            failpoints=True,
            import_path=(ROOT,),
            environment={
                "STRATAGEM_COORDINATOR_BLOB_STORE": "s3://stratagem/crash",
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "x",
                "PYTHONPATH": str(ROOT),
            },
            programs={
                "coordinator": [sys.executable, "-m", "tests.crash.forgetful"],
                "worker": [sys.executable, "-m", "stratagem.worker"],
            },
        )
        with cluster, cluster.client() as client:
            yield Rig(cluster, client)


@pytest.mark.parametrize(("job", "failpoint", "num_passed"), CASES)
def test_the_loss_of_a_coordinators_machine_changes_no_bits(
    s3_rig: Rig, request: pytest.FixtureRequest, job: str, failpoint: str, num_passed: int
) -> None:
    request.node.stash[LOGS] = s3_rig.logs
    s3_rig.settle()
    expected = s3_rig.undisturbed(job)
    s3_rig.settle()
    with s3_rig.armed("coordinator", failpoint, num_passed):
        assert s3_rig.outcome(JOBS[job]) == expected


def test_all_failpoints_of_object_stores_are_reached_here() -> None:
    assert {failpoint for _, failpoint, _ in CASES} >= OVER_AN_OBJECT_STORE
