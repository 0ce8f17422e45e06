"""What processes that train tell those who watch over them."""

import asyncio
import json
from typing import Any

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.client.sdk.doctor import examine
from stratagem.common.observe.findings import Level
from stratagem.common.rpc.channel import PLAINTEXT
from tests.cluster.jobs import data_parallel, federated
from tests.common.observe.scrape import labelled
from tests.common.observe.scrape import scrape_process as scraped
from tests.jobs import job

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("processes that train tell metrics, log lines and the doctor"),
]

NUM_WORKERS = 4


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
    plans = ("train", "build", "client_round", "evaluate", "measure", "measure_sums", "show")
    assert set(dict(key)["outcome"] for key in outcomes) <= {
        *(*plans, "interrupted", "error", "defect")
    }
    assert coordinator["stratagem_coordinator_workers"][labelled(state="alive")] >= NUM_WORKERS
    for name in ("commits", "rounds"):
        key = f"stratagem_coordinator_{name}_total"
        assert total(coordinator[key]) > total(coordinator_before[key])
    updates = labelled(direction="received", kind="update")
    assert coordinator["stratagem_stream_bytes_total"][updates] > 0.0


def lines_of(cluster: LocalCluster, process: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cluster.log_tail(process).splitlines() if line[:1] == "{"]


def test_every_line_about_a_run_says_which_and_where(
    client: Client, exact_cluster: LocalCluster
) -> None:
    trained = client.submit(job(steps=4, strategy=data_parallel(2)))
    trained.result()
    rounds = client.submit(federated())
    rounds.result()
    runs = {trained.run_id, rounds.run_id}
    names = ["coordinator", *(f"worker-{number}" for number in range(NUM_WORKERS))]
    lines = {name: lines_of(exact_cluster, name) for name in names}
    for name, each in lines.items():
        for line in each:
            if not any(run_id in json.dumps(line) for run_id in runs):
                continue
            assert line.get("run_id") in runs, line
            assert line["term"] >= 1, line
            if name != "coordinator":
                assert line["worker_id"] == name, line
                is_released = line["event"] == "call refused"
                assert is_released or "party" in line, line
                assert is_released or {"segment", "round"} & set(line), line
    told = [line for line in lines["coordinator"] if line.get("run_id") == rounds.run_id]
    received = [line for line in told if line.get("kind") == "UpdateReceived"]
    assert received
    assert all({"party", "round"} <= set(line) for line in received)
    ended = [
        line
        for name in names[1:]
        for line in lines[name]
        if line["event"] == "plan ended" and line["run_id"] in runs
    ]
    assert {line["plan"] for line in ended} >= {"build", "train", "client_round"}
    assert {line["round"] for line in ended if line["plan"] == "client_round"} == {1, 2, 3}
    meshes = [line for name in names[1:] for line in lines[name] if line["event"] == "mesh"]
    assert {line["run_id"] for line in meshes} >= {trained.run_id}


def test_the_doctor_finds_all_of_a_cluster_well(exact_cluster: LocalCluster) -> None:
    findings = asyncio.run(examine(exact_cluster.address, PLAINTEXT))
    assert [each for each in findings if each.level is Level.FAIL] == []
    checks = {(each.check, each.about) for each in findings}
    for name in (f"worker-{number}" for number in range(NUM_WORKERS)):
        assert {(check, name) for check in ("worker", "clock", "torch", "peers", "fsync")} <= checks
    assert {("disk", "coordinator"), ("numerics", "workers"), ("versions", "torch")} <= checks
