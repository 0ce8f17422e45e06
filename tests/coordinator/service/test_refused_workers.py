"""Workers that ask to be registered and are refused: who they are, and why, is known to all."""

from pathlib import Path
from typing import Any

import grpc

from stratagem.common.base.errors import UnavailableError
from stratagem.common.base.ids import PROTOCOL_KEY, PROTOCOL_VERSION
from stratagem.common.rpc.channel import open_channel
from stratagem.coordinator.observe.troubles import FORGET_S, MAX_REFUSED, Refusals
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.coordinator.service.serving import first_of, refused, served, submit, worker
from tests.free_ports import free_port


def asking(address: str, name: str = "w", **fields: Any) -> pb.RegisterWorkerRequest:
    return pb.RegisterWorkerRequest(
        **{"worker_id": name, "incarnation": "one", "address": address, **fields}
    )


REFUSED: list[tuple[pb.RegisterWorkerRequest, str, str]] = [
    (asking("no-such-host.invalid:5001"), "", "its host name cannot be resolved here"),
    (asking(f"127.0.0.1:{free_port()}"), "", "as worker 'w': connection refused"),
    (asking("OTHER"), "", "another worker process answers there"),
    (asking("OTHER", "taken"), "", "worker 'taken' lives at TAKEN; choose another name"),
    (asking("nowhere"), "", "address: 'nowhere' is not HOST:PORT"),
    (asking("h:1", "two words"), "", "worker_id: 'two words'"),
    (asking("h:1", incarnation=""), "", "incarnation: '' must have 1 to 64 characters"),
    (
        asking("h:1", capability=types_pb2.Capability(device="\x1b[2J")),
        "",
        r"capability.device: '\x1b[2J' has control characters",
    ),
    (asking("", capability=types_pb2.Capability(tunnelled=True)), "", "relay"),
    (asking("h:1"), "99", "protocol version: this side speaks '1', the caller says '99'"),
]


async def test_a_refused_worker_is_known_by_name_with_the_reason(tmp_path: Path) -> None:
    async with (
        served(tmp_path, relay="off") as (app, address),
        worker("two") as other,
        worker("first") as taken,
        grpc.aio.insecure_channel(address) as raw,
        open_channel(address) as channel,
    ):
        stub = CoordinatorServiceStub(channel)
        await stub.RegisterWorker(asking(taken, "taken", incarnation="first"))
        for request, version, reason in REFUSED:
            asked = pb.RegisterWorkerRequest.FromString(request.SerializeToString())
            asked.address = asked.address.replace("OTHER", other)
            said = ((PROTOCOL_KEY, version or PROTOCOL_VERSION),)
            for _ in range(2):
                await refused(CoordinatorServiceStub(raw).RegisterWorker(asked, metadata=said))
            [found] = (await stub.ListWorkers(pb.ListWorkersRequest(page_size=1))).refused
            [diagnosed] = (await stub.Diagnose(pb.DiagnoseRequest())).refused
            assert not (await stub.Diagnose(pb.DiagnoseRequest(without_workers=True))).refused
            assert (found.worker_id, found.address) == (asked.worker_id, asked.address)
            assert found.num_times == 2
            assert reason.replace("TAKEN", taken) in found.reason
            assert diagnosed.reason == found.reason
            app.refusals.forget(asked.worker_id)


async def test_a_run_that_waits_says_who_was_refused_until_it_is_registered(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (_, address),
        open_channel(address) as channel,
        worker("one") as well,
    ):
        stub = CoordinatorServiceStub(channel)
        await stub.SubmitRun(submit())
        watching = stub.WatchRun(pb.WatchRunRequest(run_id="r-1", from_index=1))
        nowhere = f"127.0.0.1:{free_port()}"
        await refused(stub.RegisterWorker(asking(nowhere)))
        told = (
            f"waiting for 1 of 1 workers: no worker is registered; w at {nowhere} asked and was "
            f"refused: nobody answers at {nowhere} as worker 'w': connection refused"
        )
        while (await first_of(watching)).progress.reason != told:
            pass
        asked = pb.GetRunRequest(run_id="r-1")
        assert (await stub.GetRun(asked)).run.reason == told
        await stub.RegisterWorker(asking(well))
        listed = await stub.ListWorkers(pb.ListWorkersRequest())
        assert ([each.worker_id for each in listed.workers], list(listed.refused)) == (["w"], [])
        assert "refused" not in (await stub.GetRun(asked)).run.reason
        await refused(stub.RegisterWorker(asking(nowhere)))
        assert (await stub.ListWorkers(pb.ListWorkersRequest())).refused
        await stub.RegisterWorker(asking(well))  # which is no fact: it is registered
        assert not (await stub.ListWorkers(pb.ListWorkersRequest())).refused


def test_only_so_many_for_so_long_and_no_more_text_than_people_read() -> None:
    now_s = [0.0]
    changes: list[str] = []
    refusals = Refusals(lambda: now_s[0])
    refusals.on_change = lambda: changes.append(refusals.sentence())
    for number in range(2 * MAX_REFUSED):
        refusals.note(asking("h:1" * 1000, f"w{number:03}"), UnavailableError("x" * 10_000))
    found = refusals.messages()
    assert [each.worker_id for each in found] == [
        f"w{number:03}" for number in range(MAX_REFUSED, 2 * MAX_REFUSED)
    ]
    assert sum(each.ByteSize() for each in found) < 64 * 1024
    assert refusals.sentence().endswith(
        f"{MAX_REFUSED - 3} more were refused, see `stratagem workers`"
    )
    num_changes = len(changes)
    now_s[0] = FORGET_S - 1
    refusals.note(asking("h:1" * 1000, "w100"), UnavailableError("x" * 10_000))
    assert len(changes) == num_changes  # nothing is new
    now_s[0] = FORGET_S
    refusals.forget_old()
    assert [each.worker_id for each in refusals.messages()] == ["w100"]
    refusals.forget("w100")
    assert changes[-1] == refusals.sentence() == ""
