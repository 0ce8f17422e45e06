"""The HTTP endpoint, and what a coordinator says there."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.identity.certificates import Authority, make_authority
from stratagem.common.identity.tls import Role
from stratagem.common.observe import metrics_server
from stratagem.common.observe.metrics import INTERVAL_S, LoopLag, Metric, Readings, one
from stratagem.common.observe.metrics_server import PLAIN, Guard, deployment_of, metrics_served
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import bind, make_server
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.facts import KINDS
from stratagem.coordinator.process.metrics import METRICS, CoordinatorMonitor
from stratagem.coordinator.service.service import CoordinatorServicer
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import coordinator_pb2_grpc
from tests.common.observe.scrape import families, labelled, raw, scrape
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.open_gate import entrance
from tests.settings import coordinator_settings

GAUGE = Metric("stratagem_test", "gauge", "a number")


def served(
    sample: Any = lambda: lambda: [(GAUGE, one(1.0))], host: str = "127.0.0.1", guard: Guard = PLAIN
) -> Any:
    return metrics_served(sample, LoopLag(), host, 0, guard=guard, allow_insecure_network=False)


async def test_only_requests_for_metrics_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
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
        with monkeypatch.context() as patched:
            patched.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.05)
            for request in (b"", b"GET /metrics", b"x" * 100_000):
                with suppress(ConnectionError):  # reset, where not all of it was read
                    assert await raw(address, request) == b""
        assert (await scrape(address))["stratagem_test"] == {(): 1.0}


async def test_a_defect_is_an_answer_too() -> None:
    def read() -> Readings:
        raise KeyError("gone")

    async with served(lambda: read) as address:
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


def own_files(authority: Authority) -> Guard:
    files = authority.files("coordinator")
    return Guard(Path(files.cert or ""), Path(files.key or ""))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = make_authority(tmp_path / "certs", "house")
    made.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"])
    made.issue(Role.CLIENT, "prometheus")
    return made


def trusting(authority: Authority, client: str | None = None) -> ssl.SSLContext:
    """A scraper that knows the authority, and may have a certificate itself."""
    context = ssl.create_default_context(cafile=str(authority.files("coordinator").ca))
    if client is not None:
        files = authority.files(client)
        context.load_cert_chain(files.cert or "", files.key)
    return context


GET = b"GET /metrics HTTP/1.1\r\n"


async def test_over_tls_others_may_ask_and_see_a_new_certificate(authority: Authority) -> None:
    """But never a broken one."""
    guard = own_files(authority)
    assert guard.cert is not None

    async def shown(address: str) -> bytes | None:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=trusting(authority))
        try:
            found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(True)
            return found
        finally:
            writer.close()

    async with served(host="0.0.0.0", guard=guard) as address:
        address = address.replace("0.0.0.0", "127.0.0.1")
        answer = await raw(address, GET + b"\r\n", trusting(authority))
        assert answer.startswith(b"HTTP/1.1 200")
        with pytest.raises(ssl.SSLCertVerificationError):
            await raw(address, GET + b"\r\n", ssl.create_default_context())
        with suppress(ConnectionError):
            assert await raw(address, GET + b"\r\n") == b""  # plaintext
        first = await shown(address)
        assert await shown(address) == first
        authority.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"], renew=True)
        second = await shown(address)
        assert second != first
        guard.cert.write_text("no certificate")
        assert await shown(address) == second


async def test_scrapers_may_have_to_prove_themselves(authority: Authority, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of many characters\n")
    guard = replace(
        own_files(authority), client_ca=Path(authority.files("coordinator").ca), token_file=token
    )
    known, stranger = trusting(authority, "client-prometheus"), trusting(authority)

    async def ask(address: str, said: bytes, context: ssl.SSLContext = known) -> bytes:
        return (await raw(address, GET + said + b"\r\n", context)).partition(b"\r\n\r\n")[0]

    async with served(guard=guard) as address:
        good = b"authorization:  bearer a secret of many characters\r\n"
        assert (await ask(address, good)).startswith(b"HTTP/1.1 200")
        for bad in (b"", b"Authorization: Bearer a secret\r\n", b"Authorization: Basic YTpi\r\n"):
            answer = await ask(address, bad)
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"WWW-Authenticate: Bearer" in answer
        with suppress(ssl.SSLError, ConnectionError):
            assert await ask(address, good, stranger) == b""
        token.write_text("another secret of as many")
        assert (await ask(address, good)).startswith(b"HTTP/1.1 401")
        token.unlink()
        assert (await ask(address, good)).startswith(b"HTTP/1.1 401")


NOTHING = [
    *("tls_cert", "tls_key", "tls_ca", "metrics_token_file", "metrics_client_ca"),
    *("metrics_tls_cert", "metrics_tls_key"),
]


def told(**given: object) -> Any:
    """Settings of either process, as far as the endpoint is concerned."""
    usual = {"metrics_tls": True, "metrics_deployment": "", **dict.fromkeys(NOTHING)}
    return SimpleNamespace(**{**usual, **given})


def test_the_process_s_own_certificate_serves_unless_another_is_given(authority: Authority) -> None:
    own, other = Path("own"), Path("other")
    owned = {"tls_cert": own, "tls_key": own}
    assert Guard.of(told()) == Guard()
    assert Guard.of(told(**owned)) == Guard(own, own)
    assert Guard.of(told(**owned, metrics_tls_cert=other, metrics_tls_key=other)).cert == other
    assert not Guard.of(told(**owned, metrics_tls=False)).has_tls
    files, guard = authority.files("coordinator"), own_files(authority)
    whole = {"tls_cert": guard.cert, "tls_key": guard.key, "tls_ca": Path(files.ca)}
    assert deployment_of(told(**whole)) == "house"
    assert deployment_of(told(**whole, metrics_deployment="mine")) == "mine"
    assert deployment_of(told()) == "stratagem"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"metrics_tls_cert": Path("c")}, "metrics_tls_key"),
        ({"metrics_tls_key": Path("c")}, "metrics_tls_cert"),
        (
            {"metrics_tls": False, "metrics_tls_cert": Path("c"), "metrics_tls_key": Path("k")},
            "metrics_tls_cert",
        ),
        ({"metrics_client_ca": Path("c")}, "metrics_client_ca"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        Guard.of(told(**given))


async def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    guard = own_files(authority)
    short = tmp_path / "short"
    short.write_text("secret")
    for wrong, field in (
        (replace(guard, cert=tmp_path / "none"), "metrics_tls_cert: .*/none"),
        (replace(guard, key=guard.cert), "metrics_tls_cert: .*coordinator.crt"),
        (replace(guard, client_ca=short), "metrics_client_ca: .*/short"),
        (Guard(token_file=short), "metrics_token_file: .*at least 16"),
        (Guard(token_file=tmp_path / "none"), "metrics_token_file: .*No such file"),
    ):
        with pytest.raises(InvalidInputError, match=field):
            async with served(guard=wrong):
                pass


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
    settings = coordinator_settings(data_dir=folder, metrics_port=0)
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
            await check_all_is_0(metrics)
            monitor.app = app
            yield monitor, metrics, coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        await server.stop(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await app.loop.close()


async def test_a_coordinator_says_everything_that_is_defined(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (monitor, metrics, stub):
        await stub.SubmitRun(pb.SubmitRunRequest(run_id="r-1", job_json=job_text(LOCAL)))
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
        rejected = found["stratagem_rpc_refused_total"]
        assert {key: n for key, n in rejected.items() if n} == {refused: 2.0}
        opened = found["stratagem_rpc_open"]
        assert opened[labelled(method="CoordinatorService/WatchRun")] == 1.0
        assert opened[labelled(method="CoordinatorService/GetRun")] == 0.0
        counts = found["stratagem_rpc_seconds_count"]
        assert counts[labelled(method="CoordinatorService/GetRun")] == 2.0
        assert "r-1" not in str(found)
        assert monitor.app is not None
        await monitor.app.entrance.shut("cannot reach its journal")
        assert (await scrape(metrics))["stratagem_coordinator_lease_held"] == {(): 0.0}


async def check_all_is_0(metrics: str) -> None:
    """For who waits for the lead; else its first event, once it leads, is no rise of anything."""
    found = await scrape(metrics)
    facts = found["stratagem_coordinator_facts_total"]
    assert found["stratagem_coordinator_lease_held"] == {(): 0.0}
    assert facts == {labelled(kind=each): 0.0 for each in KINDS}
    assert set(found["stratagem_coordinator_effect_failures_total"].values()) == {0.0}
    defect = labelled(method="CoordinatorService/GetRun", code="INTERNAL", error="internal")
    assert found["stratagem_rpc_refused_total"][defect] == 0.0
    assert found["stratagem_coordinator_disk_bytes"][labelled(kind="total")] > 0.0


async def test_a_run_that_is_not_running_is_told_for_how_long(tmp_path: Path) -> None:
    name = "stratagem_coordinator_run_not_running_max_seconds"
    async with coordinator(tmp_path) as (monitor, metrics, stub):
        now_s = 100.0
        monitor._now = lambda: now_s
        assert (await scrape(metrics))[name] == {(): 0.0}
        for run_id in ("first", "second"):
            await stub.SubmitRun(pb.SubmitRunRequest(run_id=run_id, job_json=job_text(LOCAL)))
            assert (await scrape(metrics))["stratagem_coordinator_runs"][
                labelled(phase="PLACING")
            ] > 0.0
            now_s += 1000.0
        found = await scrape(metrics)
        assert found[name] == {(): 2000.0}
        assert found["stratagem_coordinator_workers_wanted"] == {(): 2.0}
        await stub.CancelRun(pb.CancelRunRequest(run_id="first"))
        assert (await scrape(metrics))[name] == {(): 1000.0}
        await stub.CancelRun(pb.CancelRunRequest(run_id="second"))
        assert (await scrape(metrics))[name] == {(): 0.0}
