"""A real coordinator behind TLS: who asked stands in its journal, and one's own is one's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.common.identity.authentication import Authorizer
from stratagem.common.identity.bearer_tokens import Scope, add_token, new_token
from stratagem.common.identity.certificates import Authority
from stratagem.common.identity.tls_files import Role, TlsFiles
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.rpc.server import bind_tls, make_server
from stratagem.coordinator.app.app import App
from stratagem.coordinator.app.listeners import CoordinatorSecurity
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.fact_serialization import decode
from stratagem.coordinator.core.facts import RunDeleted, RunResumed, RunSubmitted
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.service.coordinator_service import CoordinatorServicer
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import coordinator_pb2_grpc, types_pb2, worker_pb2_grpc
from tests.coordinator.core.simulation import job
from tests.coordinator.core.test_runs import DATA_PARALLEL
from tests.coordinator.open_gate import entrance
from tests.coordinator.service.test_coordinator_service import Acquaintance, refused, submit
from tests.settings import coordinator_settings

Code = grpc.StatusCode


def test_journals_from_before_do_not_say_who() -> None:
    old = decode("RunSubmitted", 1, '{"job_json": "{}", "wall_s": 0.0}')
    assert old == RunSubmitted(job_json="{}", wall_s=0.0)
    assert sentence(old) == "submitted"
    assert sentence(decode("RunResumed", 1, "{}")) == "resumed from the last commit"
    assert sentence(RunResumed(by="token ci")) == "resumed from the last commit by token ci"
    assert sentence(RunDeleted(by="client a")) == "deleted by client a"


@dataclass
class Deployment:
    authority: Authority
    folder: Path
    settings: Settings
    certificates: str
    tokens: str
    app: App
    open: AsyncExitStack

    def has_token(self, name: str) -> bool:
        """Not a certificate: these are called after a role."""
        return name.partition("-")[0] not in tuple(Role)

    def proof(self, name: str) -> Proof:
        """Of a certificate, or of a token made with the scope of this name, else with submit."""
        if not self.has_token(name):
            return Proof(self.authority.files(name))
        file, ca = self.folder / f"token-{name}", self.authority.folder / "ca.crt"
        if not file.exists():
            scope = Scope(name) if name in tuple(Scope) else Scope.SUBMIT
            token, known = new_token(name, [scope])
            add_token(self.folder / "tokens.json", known)
            file.write_text(token)
        return Proof(TlsFiles(ca), file)

    def address(self, name: str) -> str:
        """Where this caller calls."""
        return self.tokens if self.has_token(name) else self.certificates

    async def stub(self, name: str) -> Any:
        channel = await self.open.enter_async_context(
            open_channel(self.address(name), self.proof(name))
        )
        return coordinator_pb2_grpc.CoordinatorServiceStub(channel)


@asynccontextmanager
async def deployed(authority: Authority, folder: Path, **changes: Any) -> AsyncIterator[Deployment]:
    files = authority.files("coordinator")
    settings = coordinator_settings(
        data_dir=folder / "data",
        listen="127.0.0.1:0",
        tls_ca=files.ca,
        tls_cert=files.cert,
        tls_key=files.key,
        tokens_file=folder / "tokens.json",
        token_listen="127.0.0.1:0",
        **changes,
    )
    security = CoordinatorSecurity(settings)
    app = await App.lead(settings, entrance())
    server = make_server(gate=security.gate)
    servicer = CoordinatorServicer(app)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
    address = security.listen(server)
    lenient = bind_tls(server, "127.0.0.1", 0, files, asks_for_certificate=False)
    running = asyncio.create_task(app.run())
    await server.start()
    async with AsyncExitStack() as stack:
        at = f"127.0.0.1:{lenient}"
        yield Deployment(authority, folder, settings, address, at, app, stack)
    await server.stop(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await app.loop.close()


async def test_the_journal_says_who_asked(authority: Authority, tmp_path: Path) -> None:
    async with deployed(authority, tmp_path) as deployment:
        alice, ci = await deployment.stub("client-alice"), await deployment.stub("submit")
        await alice.SubmitRun(submit("hers"))
        await ci.SubmitRun(submit("its"))
        denied = await refused(ci.CancelRun(pb.CancelRunRequest(run_id="hers")))
        assert denied == (
            Code.PERMISSION_DENIED,
            "run hers belongs to client alice; token submit needs the scope admin",
        )
        for call in (
            ci.ResumeRun(pb.ResumeRunRequest(run_id="hers")),
            ci.DeleteRun(pb.DeleteRunRequest(run_id="hers")),
        ):
            assert (await refused(call))[0] is Code.PERMISSION_DENIED
        await ci.CancelRun(pb.CancelRunRequest(run_id="its"))
        ops = await deployment.stub("admin")
        await ops.CancelRun(pb.CancelRunRequest(run_id="hers"))
        await alice.ResumeRun(pb.ResumeRunRequest(run_id="its"))
        reader = await deployment.stub("read")
        await ops.CancelRun(pb.CancelRunRequest(run_id="its"))
        events = [m.event async for m in reader.WatchRun(pb.WatchRunRequest(run_id="its"))]
        assert [each.sentence for each in events] == [
            "submitted by token submit",
            "stopped by token submit; nothing was committed",
            "resumed from the last commit by client alice",
            "stopped by token admin; nothing was committed",
        ]
    async with deployed(authority, tmp_path) as deployment:
        reader = await deployment.stub("read")
        runs = (await reader.ListRuns(pb.ListRunsRequest())).runs
        assert {run.run_id: run.submitted_by for run in runs} == {
            "hers": "client alice",
            "its": "token submit",
        }
        assert (await refused(reader.SubmitRun(submit("no"))))[0] is Code.PERMISSION_DENIED
        ci = await deployment.stub("submit")
        await ci.DeleteRun(pb.DeleteRunRequest(run_id="its"))


@asynccontextmanager
async def worker(authority: Authority, name: str) -> AsyncIterator[str]:
    server = make_server(gate=Authorizer("stratagem"))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Acquaintance(name), server)
    port = bind_tls(server, "127.0.0.1", 0, authority.files(f"worker-{name}"))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_worker_speaks_for_itself_alone(authority: Authority, tmp_path: Path) -> None:
    def registering(name: str, address: str) -> pb.RegisterWorkerRequest:
        capability = types_pb2.Capability(device="cpu", num_threads=1)
        return pb.RegisterWorkerRequest(
            worker_id=name, incarnation=name, address=address, capability=capability
        )

    async with (
        worker(authority, "w0") as at_w0,
        worker(authority, "w1") as at_w1,
        deployed(authority, tmp_path) as deployment,
    ):
        alice = await deployment.stub("client-alice")
        w0, w1 = await deployment.stub("worker-w0"), await deployment.stub("worker-w1")
        code, reason = await refused(w0.RegisterWorker(registering("w1", at_w1)))
        assert code is Code.PERMISSION_DENIED
        assert "worker w0 speaks for worker 'w1'" in reason
        # Its own name at another one's address: whoever answers there is not w0.
        code, reason = await refused(w0.RegisterWorker(registering("w0", at_w1)))
        assert code is Code.UNAVAILABLE
        assert "w1.worker.stratagem, worker.stratagem, and not for w0.worker.stratagem" in reason
        code, _ = await refused(alice.RegisterWorker(registering("w0", at_w0)))
        assert code is Code.PERMISSION_DENIED
        await w0.RegisterWorker(registering("w0", at_w0))
        heartbeat = pb.HeartbeatRequest(worker_id="w0", incarnation="w0")
        await w0.Heartbeat(heartbeat)
        assert (await refused(w1.Heartbeat(heartbeat)))[0] is Code.PERMISSION_DENIED
        denied = await refused(w0.Diagnose(pb.DiagnoseRequest()))
        assert denied[0] is Code.PERMISSION_DENIED
        own = await w0.Diagnose(pb.DiagnoseRequest(without_workers=True))
        assert (len(own.workers), own.environment.certificate) == (0, "coordinator coordinator")
        strategy = {**DATA_PARALLEL, "num_replicas": 1}
        await alice.SubmitRun(pb.SubmitRunRequest(run_id="r", job_json=job(strategy)))
        events = alice.WatchRun(pb.WatchRunRequest(run_id="r"))
        async for message in events:
            if message.event.kind == "MembersFormed":
                break
        events.cancel()
        session, fence = types_pb2.SessionRef(run_id="r"), types_pb2.Fence(term=1, membership=1)
        arriving = pb.RendezvousRequest(fence=fence, session=session)
        suspecting = pb.SuspectRequest(fence=fence, session=session, reason="spite")
        denied = await refused(w1.Rendezvous(arriving))
        assert denied == (Code.PERMISSION_DENIED, "worker w1 is not member 0 of r")
        denied = await refused(w1.Suspect(suspecting))
        assert denied == (Code.PERMISSION_DENIED, "worker w1 is no member of r")
        assert len((await w0.Rendezvous(arriving)).members) == 1
        with pytest.raises(grpc.aio.AioRpcError, match="it is for the scope submit"):
            await w0.CancelRun(pb.CancelRunRequest(run_id="r"))
