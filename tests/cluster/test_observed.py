"""What processes that train tell those who watch over them."""

import json

import pytest

from stratagem.client.local_cluster import LocalCluster
from stratagem.client.sync import Client
from tests.cluster.jobs import data_parallel, federated, job
from tests.metrics.scrape import Scraped, labelled, scrape_from_outside

pytestmark = pytest.mark.cluster

NUM_WORKERS = 4


def scraped(cluster: LocalCluster, process: str) -> Scraped:
    ready = json.loads((cluster.folder / "ready" / process).read_text())
    return scrape_from_outside(ready["metrics_address"])


def total(series: dict[tuple[tuple[str, str], ...], float]) -> float:
    return sum(series.values())


def test_a_run_shows_in_the_metrics(client: Client, exact_cluster: LocalCluster) -> None:
    names = [f"worker-{number}" for number in range(NUM_WORKERS)]
    before = [scraped(exact_cluster, name) for name in names]
    coordinator_before = scraped(exact_cluster, "coordinator")
    client.submit(job(steps=7, strategy=data_parallel(2, "ParameterServer"))).result()
    client.submit(federated()).result()
    after = [scraped(exact_cluster, name) for name in names]
    coordinator = scraped(exact_cluster, "coordinator")

    def grown(name: str) -> list[float]:
        pairs = zip(before, after, strict=True)
        return [total(new[name]) - total(old[name]) for old, new in pairs]

    steps = grown("stratagem_worker_steps_total")
    assert sum(steps) > 2 * 7
    assert grown("stratagem_worker_step_seconds_count") == steps
    assert sum(grown("stratagem_worker_exchange_wait_seconds_total")) > 0.0
    assert all(each["stratagem_worker_registered"] == {(): 1.0} for each in after)
    assert sum(grown("stratagem_worker_rows_total")) > 0.0
    sent = labelled(direction="sent", kind="gradients")
    assert sum(each["stratagem_stream_bytes_total"][sent] for each in after) > 0.0
    outcomes = after[0]["stratagem_worker_executions_total"]
    assert set(dict(key)["outcome"] for key in outcomes) <= {
        *("train", "build", "client_round", "evaluate", "interrupted", "error", "defect")
    }
    assert coordinator["stratagem_coordinator_workers"][labelled(state="alive")] >= NUM_WORKERS
    for name in ("commits", "rounds"):
        key = f"stratagem_coordinator_{name}_total"
        assert total(coordinator[key]) > total(coordinator_before[key])
    updates = labelled(direction="received", kind="update")
    assert coordinator["stratagem_stream_bytes_total"][updates] > 0.0
