"""Lists of many workers, which come page by page."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.common.rpc.channel import open_channel
from stratagem.common.tensors.leaves import StateFolder
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.apply import CLUSTER, apply
from stratagem.coordinator.core.commands import LeaveWorker, LoseWorker, RegisterWorker
from stratagem.coordinator.core.facts import Capability, Member, WorkerMarked, WorkerQuarantined
from stratagem.coordinator.process.metrics import _workers
from stratagem.coordinator.service import queries
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.coordinator.service.serving import refused, served, worker

NAMES = [f"w{n:02}" for n in range(7)]


def member(name: str) -> Member:
    return Member(worker_id=WorkerId(name), incarnation=Incarnation("one"))


async def pages(stub: Any, page_size: int) -> list[list[str]]:
    found: list[list[str]] = []
    request = pb.ListWorkersRequest(page_size=page_size)
    while True:
        answer = await stub.ListWorkers(request)
        found.append([info.worker_id for info in answer.workers])
        if not answer.next_page_token:
            return found
        request.page_token = answer.next_page_token


async def test_all_pages_together_are_all_workers_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as (app, address), open_channel(address) as channel:
        stub = CoordinatorServiceStub(channel)
        assert [await pages(stub, size) for size in (0, 3)] == [[[]], [[]]]
        for name in reversed(NAMES):
            await app.loop.submit(RegisterWorker(member(name), "127.0.0.1:1", Capability()))
        for page_size in (0, 1, 2, 3, 7, 8, 1000):
            found = await pages(stub, page_size)
            assert [name for names in found for name in names] == NAMES
            assert all(len(names) <= (page_size or len(NAMES)) for names in found)
        monkeypatch.setattr(queries, "MAX_PAGE_BYTES", 1)
        assert await pages(stub, 5) == [[name] for name in NAMES], "no larger than a message"
        assert await pages(stub, 0) == [NAMES], "an older client, which knows no pages, gets all"


async def test_a_quarantine_is_listed_also_of_who_has_left_and_can_be_lifted(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as (app, address), open_channel(address) as channel:
        stub = CoordinatorServiceStub(channel)
        for name in NAMES[:3]:
            await app.loop.submit(RegisterWorker(member(name), "127.0.0.1:1", Capability()))
        for fact in (
            WorkerQuarantined(worker_id=WorkerId(NAMES[0]), reason="wrong"),
            WorkerMarked(worker_id=WorkerId(NAMES[1]), reason="refuted"),
        ):
            app.loop.state = apply(app.loop.state, CLUSTER, fact, 9.0)
        for name in NAMES[:2]:
            await app.loop.submit(LeaveWorker(member(name), "done"))
        assert set(app.loop.state.workers) == set(NAMES[:3])
        assert await pages(stub, 1) == [[NAMES[0]], [NAMES[2]], []]
        [listed, _] = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
        assert (listed.quarantine, listed.reason, listed.is_alive) == ("wrong", "done", False)
        told = [each.info for each in (await stub.Diagnose(pb.DiagnoseRequest())).workers]
        assert [each.worker_id for each in told] == [NAMES[0], NAMES[2]]
        counts = {labels: value for labels, value in _workers(app.loop.state).items() if value}
        assert counts == {("quarantined",): 1, ("alive",): 1}
        request = pb.ReleaseWorkerRequest(worker_id=NAMES[0])
        await stub.ReleaseWorker(request)
        assert await pages(stub, 0) == [[NAMES[2]]]
        assert (await refused(stub.ReleaseWorker(request)))[0] is grpc.StatusCode.NOT_FOUND
        usable = pb.ReleaseWorkerRequest(worker_id=NAMES[2])
        code, reason = await refused(stub.ReleaseWorker(usable))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert reason == f"worker {NAMES[2]!r} is not quarantined"


async def test_pages_go_on_where_their_last_worker_has_left(tmp_path: Path) -> None:
    async with served(tmp_path) as (app, address), open_channel(address) as channel:
        stub = CoordinatorServiceStub(channel)
        for name in NAMES:
            await app.loop.submit(RegisterWorker(member(name), "127.0.0.1:1", Capability()))
        first = await stub.ListWorkers(pb.ListWorkersRequest(page_size=3))
        await app.loop.submit(LeaveWorker(member(NAMES[2]), "done"))
        token = first.next_page_token
        second = await stub.ListWorkers(pb.ListWorkersRequest(page_size=100, page_token=token))
        assert [info.worker_id for info in second.workers] == NAMES[3:]
        assert not second.next_page_token
        wrong = stub.ListWorkers(pb.ListWorkersRequest(page_token="../x", page_size=1))
        assert (await refused(wrong))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("state_path", ["relayed", "direct"])
async def test_workers_are_told_the_name_of_the_folder_of_states(
    tmp_path: Path, state_path: str
) -> None:
    async with (
        worker("one") as at,
        served(tmp_path, state_path=state_path) as (_, address),
        open_channel(address) as channel,
    ):
        stub = CoordinatorServiceStub(channel)
        request = pb.RegisterWorkerRequest(worker_id="w", incarnation="one", address=at)
        told = (await stub.RegisterWorker(request)).store_id
        asked = await stub.Diagnose(pb.DiagnoseRequest(without_workers=True))
        found = StateFolder(tmp_path / "states").store_id()
    assert told == asked.store_id == found
    assert bool(found) == (state_path == "direct")


async def test_a_lost_worker_is_silent_for_longer_and_longer_also_after_a_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent_s(app: App, address: str, now_s: float) -> float:
        monkeypatch.setattr(app.loop.clock, "now", lambda: now_s)
        async with open_channel(address) as channel:
            stub = CoordinatorServiceStub(channel)
            [listed] = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
            [diagnosed] = (await stub.Diagnose(pb.DiagnoseRequest())).workers
        assert diagnosed.info.silent_s == listed.silent_s
        return listed.silent_s

    async with served(tmp_path) as (app, address):
        await app.loop.submit(RegisterWorker(member("w"), "127.0.0.1:1", Capability()))
        monkeypatch.setattr(app.loop.clock, "now", lambda: 1000.0)
        await app.loop.submit(LoseWorker(member("w"), "no heartbeat for 10 s", silent_s=10.5))
        assert await silent_s(app, address, 1000.0) == 10.5
        assert await silent_s(app, address, 1100.0) == 110.5
    async with served(tmp_path) as (app, address):
        assert app.loop.clock.now() >= 1000.0
        assert await silent_s(app, address, 1200.0) == 210.5
