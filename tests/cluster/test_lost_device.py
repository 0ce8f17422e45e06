"""A worker that has lost its device ends and is started again; a job is told of its own fault only.

The errors are those of CUDA, raised by a model that computes on the CPU.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import train
from tests.jobs import ALLOW, job, user_model
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("a worker that has lost its device is started again"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=1, threads=1, import_path=[ROOT], allow=[ALLOW]) as cluster:
        yield cluster


def test_an_assertion_on_the_device_is_the_jobs_error_and_the_next_job_gets_a_new_process(
    cluster: LocalCluster,
) -> None:
    pid = cluster.processes["worker-0"].pid
    with cluster.client() as client:
        with pytest.raises(UserCodeError, match=r"device-side assert triggered\. An index was"):
            client.submit(losing("device-side assert triggered")).result()
        done = train(client, job())
    assert done.status.step == 10
    assert cluster.processes["worker-0"].pid != pid
    assert "drained after the device was lost" in cluster.log_tail("coordinator")


def test_what_a_failing_device_has_stopped_is_done_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    reason = "uncorrectable ECC error encountered"
    with cluster.client() as client:
        undisturbed = train(client, losing(reason, tmp_path))  # is there: nothing is lost
        num_starts = cluster.processes["worker-0"].num_starts
        disturbed = train(client, losing(reason, tmp_path / "lost"))
    assert disturbed.digests == undisturbed.digests
    assert cluster.processes["worker-0"].num_starts == num_starts + 1


def losing(reason: str, file: Path | None = None) -> JobSpec:
    """A job whose third batch loses the device unless this file is there, or each time."""
    options = {} if file is None else {"file": str(file)}
    return job(user_model("acting_models:losing_device", reason=reason, **options))
