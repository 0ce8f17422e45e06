"""A real coordinator behind TLS: who asked stands in its journal, and one's own is one's own."""

from pathlib import Path

import grpc
import pytest

from stratagem.common.identity.certificates import Authority
from stratagem.common.numerics.rules import CURRENT
from stratagem.coordinator.core.fact_text import decode, sentence
from stratagem.coordinator.core.facts import RunDeleted, RunResumed, RunSubmitted
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from tests.coordinator.service.serving import refused, submit
from tests.identity.deployment import deployed, worker

Code = grpc.StatusCode


def test_journals_from_before_do_not_say_who() -> None:
    old = decode("RunSubmitted", 1, '{"job_json": "{}", "wall_s": 0.0}')
    assert old == RunSubmitted(job_json="{}", wall_s=0.0)
    assert sentence(old) == "submitted"
    assert sentence(decode("RunResumed", 1, "{}")) == "resumed from the last commit"
    assert sentence(RunResumed(by="token ci")) == "resumed from the last commit by token ci"
    assert sentence(RunDeleted(by="client a")) == "deleted by client a"


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


async def test_a_worker_speaks_for_itself_alone(authority: Authority, tmp_path: Path) -> None:
    def registering(name: str, address: str) -> pb.RegisterWorkerRequest:
        capability = types_pb2.Capability(device="cpu", num_threads=1, numerics_rules=CURRENT)
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
        for other in (alice, await deployment.stub("submit")):
            code, _ = await refused(other.RegisterWorker(registering("w9", at_w0)))
            assert code is Code.PERMISSION_DENIED
        # Known are those alone that may register themselves, by the names that are theirs.
        [known] = (await alice.ListWorkers(pb.ListWorkersRequest())).refused
        assert (known.worker_id, known.address, known.num_times) == ("w0", at_w1, 2)
        await w0.RegisterWorker(registering("w0", at_w0))
        heartbeat = pb.HeartbeatRequest(worker_id="w0", incarnation="w0")
        await w0.Heartbeat(heartbeat)
        assert (await refused(w1.Heartbeat(heartbeat)))[0] is Code.PERMISSION_DENIED
        denied = await refused(w0.Diagnose(pb.DiagnoseRequest()))
        assert denied[0] is Code.PERMISSION_DENIED
        own = await w0.Diagnose(pb.DiagnoseRequest(without_workers=True))
        assert (len(own.workers), own.environment.certificate) == (0, "coordinator coordinator")
        with pytest.raises(grpc.aio.AioRpcError, match="it is for the scope submit"):
            await w0.CancelRun(pb.CancelRunRequest(run_id="r"))
