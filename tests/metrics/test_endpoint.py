"""The HTTP endpoint, and what a coordinator says there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.common.errors import InvalidInputError, UnavailableError
from stratagem.common.metrics import endpoint
from stratagem.common.metrics.definition import Metric, Readings, one
from stratagem.common.metrics.endpoint import metrics_served
from stratagem.common.metrics.lag import INTERVAL_S, LoopLag
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import bind, make_server
from stratagem.coordinator.app import App
from stratagem.coordinator.service.servicer import CoordinatorServicer
from stratagem.coordinator.settings import Settings
from stratagem.coordinator.watching.monitoring import METRICS, CoordinatorMonitor
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import coordinator_pb2_grpc
from tests.coordinator.entrance import entrance
from tests.core.simulation import job
from tests.core.test_runs import LOCAL
from tests.metrics.scrape import families, labelled, raw, scrape

GAUGE = Metric("stratagem_test", "gauge", "a number")


def served(sample: Any = lambda: lambda: [(GAUGE, one(1.0))], host: str = "127.0.0.1") -> Any:
    return metrics_served(sample, LoopLag(), host, 0, allow_insecure_network=False)


async def test_only_get_metrics_is_answered() -> None:
    async with served() as address:
        assert (await scrape(address))["stratagem_test"] == {(): 1.0}
        head = await raw(address, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        for request, status in (
            (b"GET / HTTP/1.1\r\n\r\n", b"404"),
            (b"GET /metrics/../etc HTTP/1.1\r\n\r\n", b"404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        ):
            assert (await raw(address, request)).split()[1] == status


async def test_what_is_no_request_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_TIMEOUT_S", 0.05)
    async with served() as address:
        for request in (b"", b"GET /metrics", b"x" * 100_000):
            with suppress(ConnectionError):  # reset, where not all of it was read
                assert await raw(address, request) == b""
        assert (await scrape(address))["stratagem_test"] == {(): 1.0}


async def test_a_defect_is_an_answer_too() -> None:
    def sample() -> Any:
        def read() -> Readings:
            raise KeyError("gone")

        return read

    async with served(sample) as address:
        answer = await raw(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"gone" not in answer


async def test_other_machines_are_let_in_only_on_demand() -> None:
    with pytest.raises(InvalidInputError, match=r"metrics_port: .*allow the insecure network"):
        async with served(host="0.0.0.0"):
            pass
    async with served() as address:
        port = int(address.rpartition(":")[2])
        twice = metrics_served(
            lambda: list, LoopLag(), "127.0.0.1", port, allow_insecure_network=False
        )
        with pytest.raises(UnavailableError, match="cannot serve metrics on 127"):
            async with twice:
                pass
    off = metrics_served(lambda: list, LoopLag(), "::", None, allow_insecure_network=False)
    async with off as address:
        assert address == ""


async def test_lag_is_what_a_sleep_took_too_long() -> None:
    lag = LoopLag()
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)  # it sleeps
    loop = asyncio.get_running_loop()
    until_s = loop.time() + INTERVAL_S + 0.06
    while loop.time() < until_s:  # the loop is blocked
        pass
    for _ in range(4):  # its timer is due, then itself
        await asyncio.sleep(0)
    task.cancel()
    assert lag.seconds.sum_s > 0.05


@asynccontextmanager
async def coordinator(folder: Path) -> AsyncIterator[tuple[CoordinatorMonitor, str, Any]]:
    settings = Settings(data_dir=folder, metrics_port=0, _cli_parse_args=False)  # type: ignore[call-arg]
    monitor = CoordinatorMonitor(settings)
    async with monitor.served("127.0.0.1") as metrics:
        app = await App.lead(settings, entrance())
        await app.entrance.open(CoordinatorServicer(app))
        server = make_server(calls=monitor.process.calls)
        server.add_generic_rpc_handlers((app.entrance,))
        port = bind(server, "127.0.0.1", 0)
        running = asyncio.create_task(app.run())
        await server.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            waiting = await scrape(metrics)
            assert waiting["stratagem_coordinator_lease_held"] == {(): 0.0}
            monitor.app = app
            yield monitor, metrics, coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        await server.stop(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await app.loop.close()


async def test_a_coordinator_says_everything_that_is_defined(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (monitor, metrics, stub):
        await stub.SubmitRun(pb.SubmitRunRequest(run_id="r-1", job_json=job(LOCAL)))
        for wrong in (pb.GetRunRequest(run_id="no"), pb.GetRunRequest(run_id="nor-this")):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetRun(wrong)
        watching = aiter(stub.WatchRun(pb.WatchRunRequest(run_id="r-1")))
        await anext(watching)
        found = await scrape(metrics)
        assert families(found) >= {
            metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
            for metric in METRICS
        }
        assert found["stratagem_coordinator_runs"][labelled(phase="PLACING")] == 1.0
        assert found["stratagem_coordinator_lease_held"] == {(): 1.0}
        assert found["stratagem_coordinator_term"] == {(): 1.0}
        assert found["stratagem_coordinator_facts_total"][labelled(kind="RunSubmitted")] == 1.0
        assert found["stratagem_coordinator_journal_append_seconds_count"] == {(): 1.0}
        assert found["stratagem_coordinator_disk_bytes"][labelled(kind="free")] > 0.0
        refused = labelled(
            method="CoordinatorService/GetRun", code="NOT_FOUND", error="NotFoundError"
        )
        assert found["stratagem_rpc_refused_total"] == {refused: 2.0}
        opened = found["stratagem_rpc_open"]
        assert opened[labelled(method="CoordinatorService/WatchRun")] == 1.0
        assert opened[labelled(method="CoordinatorService/GetRun")] == 0.0
        counts = found["stratagem_rpc_seconds_count"]
        assert counts[labelled(method="CoordinatorService/GetRun")] == 2.0
        assert "r-1" not in str(found)
        assert monitor.app is not None
        await monitor.app.entrance.shut("cannot reach its journal")
        assert (await scrape(metrics))["stratagem_coordinator_lease_held"] == {(): 0.0}
