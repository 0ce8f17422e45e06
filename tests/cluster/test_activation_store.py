"""ModelParallel through object stores that workers have, have not, or cannot use."""

from collections.abc import Iterator

import pytest
from obstore.store import from_url

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import UserCodeError
from tests.cluster.jobs import ALLOWED, assert_same_bits, model_parallel, train
from tests.crash.rig import until
from tests.jobs import job
from tests.reference.loops import sharded_loop
from tests.repository import ROOT
from tests.worker.pipeline.s3_server import s3_server, s3_settings

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("stages meet in S3, and a store that does not work is named"),
]


@pytest.fixture(name="endpoint", scope="module")
def _endpoint() -> Iterator[str]:
    with s3_server("activations") as endpoint:
        yield endpoint


@pytest.fixture(name="s3_client", scope="module")
def _s3_client(endpoint: str) -> Iterator[Client]:
    """worker-2 has no store, and that of worker-3 names a bucket that is not there."""
    with (
        LocalCluster(
            workers=4,
            threads=1,
            import_path=[ROOT],
            environment={
                "STRATAGEM_WORKER_ACTIVATION_STORE": "s3://activations/of-this-test",
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "x",
            },
            worker_arguments={
                "worker-2": ["--activation-store", ""],
                "worker-3": ["--activation-store", "s3://elsewhere"],
            },
        ) as cluster,
        cluster.client() as client,
    ):
        yield client


def through_store(first: str, second: str) -> dict[str, object]:
    return model_parallel({"0 1": first, "2 3": second}, protocol="DataStore")


def test_stages_meet_in_s3(s3_client: Client, endpoint: str) -> None:
    spec = job("dropout_mlp", strategy=through_store("worker-0", "worker-1"))
    outcome = train(s3_client, spec)
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 1, micro_batch_size=2**62).state)
    assert {e.payload["engine"] for e in outcome.of("SegmentFinished")} == {"data store/s3"}
    bucket = from_url("s3://activations", **s3_settings(endpoint))
    until(lambda: not [each for page in bucket.list() for each in page], "the bucket is empty")


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("worker-2", "worker worker-2 has no object store, .* start it with --activation-store"),
        ("worker-3", "activation_store: s3://elsewhere: .*"),
    ],
)
def test_a_worker_without_a_store_that_works_says_so(
    s3_client: Client, worker: str, reason: str
) -> None:
    spec = job("dropout_mlp", strategy=through_store("worker-0", worker))
    with pytest.raises(UserCodeError, match=reason) as caught:
        s3_client.submit(spec).result()
    assert caught.value.worker_id == worker
