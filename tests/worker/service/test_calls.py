"""What each call promises: attach and replay, fences, errors of the user, abort, blobs, logs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.tensors.local_files import contents, offer, opened_copy, place, readable_copy
from stratagem.common.tensors.manifest import Purpose, to_proto
from stratagem.common.tensors.stream import crc32c
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.v1 import tensor_pb2
from stratagem.v1 import worker_pb2 as pb
from tests.common.tensors.chunk_messages import iter_chunks
from tests.jobs import LOSSES, user_model
from tests.worker.service.gate import Gate
from tests.worker.service.rig import Worker
from tests.worker.service.saying import (
    Plan,
    attend,
    base_of,
    build_request,
    evaluated_job,
    fence,
    fetch,
    refusal,
    session,
)

pytestmark = pytest.mark.cluster

FEDERATED = {
    "type": "Federated",
    "num_clients": 2,
    "rounds": 2,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}


async def test_a_broken_stream_attaches_again_to_the_result(w0: Worker, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    run_id, spec = "attach", evaluated_job(user_model("acting_models:gated", **gate.kwargs))
    base = await base_of(w0, run_id, spec)
    request = Plan(run_id, spec, base, num_shards=1, to_step=3).request([w0], 0)
    (await wanting(w0, request)).cancel()
    attending = asyncio.create_task(attend(w0, request, base))  # is told the need again
    await gate.arrived()
    described = await w0.stub.Describe(pb.DescribeRequest())
    mine = next(each for each in described.sessions if each.session == session(run_id))
    assert (mine.activity, mine.segment, mine.membership) == ("training", 1, 1)
    attending.cancel()  # a disconnect never cancels the plan
    gate.open()
    await gate.leave()
    said = await attend(w0, request)
    assert (said.accepted.attached, said.needed) == (True, [])
    replayed = await attend(w0, request)
    assert replayed.result == said.result
    assert said.result.train.step == 3


async def test_older_fences_are_refused(w0: Worker) -> None:
    run_id, spec = "fences", evaluated_job()
    request = build_request(run_id, spec)
    request.fence.membership = 5
    await attend(w0, request)
    request.fence.membership = 4
    error = await refusal(w0.stub.Execute(request))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "membership 4" in str(error.details())
    stale = fence(5, term=0)
    for call in (
        w0.stub.Execute(pb.ExecuteRequest(fence=stale, session=session(run_id, "build"))),
        w0.stub.GetState(pb.GetStateRequest(fence=stale, session=session(run_id, "build"))),
        w0.stub.GetGradients(pb.GetGradientsRequest(fence=stale, session=session(run_id))),
        w0.stub.Abort(pb.AbortRequest(fence=stale, session=session(run_id))),
        w0.stub.CloseSession(pb.CloseSessionRequest(fence=stale, run_id=run_id)),
    ):
        assert (await refusal(call)).code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        ("hungry_loss", "MemoryError", "no room"),
        ("forking_loss", "ValueError", "forkserver"),  # as the server of gRPC is alive here
        ("quitting_loss", "KeyboardInterrupt", ""),
    ],
)
async def test_users_errors_are_results(w0: Worker, loss: str, kind: str, message: str) -> None:
    run_id = loss.replace("_", "-")
    spec = evaluated_job(loss=f"{LOSSES}:{loss}")
    base = await base_of(w0, run_id, spec)
    request = Plan(run_id, spec, base).request([w0], 0)
    error = (await attend(w0, request, base)).result.error
    said, _, given = error.message.partition("; the loss was called with (float32[")
    assert (error.type, said, error.worker_id) == (kind, message, "w0")
    assert bool(given) == (kind != "KeyboardInterrupt")
    assert loss in error.traceback
    assert "training" in error.activity
    # A newer view does not make it right.
    request.fence.membership = 2
    assert (await attend(w0, request)).result.error == error


async def test_what_is_not_allowed_is_an_error_of_the_user(w0: Worker) -> None:
    document = json.loads(evaluated_job().canonical_json())
    document["model"] = {"entrypoint": "os:getcwd"}
    spec = JobSpec.parse(document)
    error = (await attend(w0, build_request("forbidden", spec))).result.error
    assert (error.type, error.traceback) == ("InvalidInputError", "")
    assert error.message.startswith('model.entrypoint: "os:getcwd"')


@pytest.mark.parametrize("plan", ["build", "train"])
async def test_what_the_device_cannot_compute_is_refused_before_training(
    w0: Worker, plan: str
) -> None:
    run_id, spec = f"rare-{plan}", evaluated_job("known_rare", execution={"precision": "Mixed"})
    if plan == "build":
        said = await attend(w0, build_request(run_id, spec))
    else:  # the run comes from a worker whose device can
        base = await base_of(w0, run_id, evaluated_job("known_rare"))
        said = await attend(w0, Plan(run_id, spec, base, to_step=1).request([w0], 0), base)
        assert said.progress == []
    error = said.result.error
    assert (error.type, error.traceback) == ("InvalidInputError", "")
    assert error.message.startswith("execution.precision: this worker's ")
    assert "cannot compute Mixed in bfloat16: Rare (0): no primitive for Rare; " in error.message


async def test_abort_ends_a_plan_and_drops_its_work(w0: Worker, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    run_id, spec = "abort", evaluated_job(user_model("acting_models:gated", **gate.kwargs))
    base = await base_of(w0, run_id, spec)
    plan = Plan(run_id, spec, base, num_shards=1, to_step=5)
    attending = asyncio.create_task(attend(w0, plan.request([w0], 0), base))
    await gate.arrived()
    await w0.stub.Abort(pb.AbortRequest(fence=fence(), session=session(run_id)))
    await w0.stub.Abort(pb.AbortRequest(fence=fence(), session=session(run_id, "nobody")))
    gate.open()
    await gate.leave()
    said = await attending
    assert said.result.interrupted.reason == "aborted"
    assert (await attend(w0, plan.request([w0], 0))).result == said.result
    again = await attend(w0, plan.request([w0], 0, membership=2))
    assert again.result.train.step == 5
    assert again.result.train.num_rows == 3 * 16 + 2 + 16


async def test_abort_while_a_plan_waits_for_a_blob(w0: Worker) -> None:
    run_id, spec = "abort-wait", evaluated_job()
    base = await base_of(w0, run_id, spec)
    call = await wanting(w0, Plan(run_id, spec, base).request([w0], 0))
    await w0.stub.Abort(pb.AbortRequest(fence=fence(), session=session(run_id)))
    assert (await call.read()).result.interrupted.reason == "aborted"


async def test_what_user_code_prints_and_logs_arrives_as_lines(w0: Worker) -> None:
    said = await attend(w0, build_request("lines", evaluated_job("acting_models:talkative")))
    told = [(line.level, line.text) for line in said.lines]
    assert told == [
        ("PRINT", "building a model"),
        ("ERROR", "to stderr"),
        ("WARNING", "careful: 4 layers"),
    ]
    assert {line.worker_id for line in said.lines} == {"w0"}


async def test_set_state_resumes_and_checks(w0: Worker) -> None:
    run_id = "blobs"
    base = await base_of(w0, run_id, evaluated_job())
    header = pb.SetStateRequest(
        header=pb.SetStateHeader(
            fence=fence(0), run_id=run_id, digest=base.digest, manifest=to_proto(base.manifest)
        )
    )
    data = b"".join(bytes(buffer) for buffer in base.buffers)
    first = next(iter_chunks([memoryview(data)[:100]]))

    async def broken() -> AsyncIterator[pb.SetStateRequest]:
        yield header
        yield pb.SetStateRequest(chunk=first)

    assert (await refusal(w0.stub.SetState(broken()))).code() is grpc.StatusCode.DATA_LOSS
    call = w0.stub.SetState()
    await call.write(header)
    assert (await call.read()).resume_offset == 100
    busy = w0.stub.SetState()
    await busy.write(header)
    assert (await refusal(busy)).code() is grpc.StatusCode.ABORTED
    for chunk in iter_chunks([memoryview(data)], 100):
        await call.write(pb.SetStateRequest(chunk=chunk))
    assert (await call.read()).committed
    await call.done_writing()
    done = w0.stub.SetState()
    await done.write(header)
    assert (await done.read()).resume_offset == len(data)
    assert (await done.read()).committed


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_state_that_can_be_read_from_an_open_file_needs_no_chunks(
    w0: Worker, tmp_path: Path, is_damaged: bool
) -> None:
    run_id = "near-damaged" if is_damaged else "near"
    base = await base_of(w0, run_id, evaluated_job())
    data = b"".join(bytes(buffer) for buffer in base.buffers)
    sums = [crc32c(data[at : at + 2**16]) + is_damaged for at in range(0, len(data), 2**16)]
    path = tmp_path / f"{base.digest}.safetensors"
    path.write_bytes(b"header" + data)
    with path.open("rb") as file:
        header = pb.SetStateHeader(
            fence=fence(0),
            run_id=run_id,
            digest=base.digest,
            manifest=to_proto(base.manifest),
            file=offer(file.fileno(), 6, 2**16, sums),
        )
        call = w0.stub.SetState()
        await call.write(pb.SetStateRequest(header=header))
        assert (await call.read()).resume_offset == (0 if is_damaged else len(data))
    for chunk in iter_chunks([memoryview(data)]) if is_damaged else ():
        await call.write(pb.SetStateRequest(chunk=chunk))
    assert (await call.read()).committed
    await call.done_writing()


async def test_who_is_near_gets_a_snapshot_as_an_open_file(w0: Worker) -> None:
    run_id = "near-snapshot"
    base = await base_of(w0, run_id, evaluated_job())
    ask = pb.GetStateRequest(
        fence=fence(), session=session(run_id, "build"), snapshot=0, place=place()
    )
    call = w0.stub.GetState(ask)
    file = (await call.read()).file
    found = opened_copy(file)
    assert found is not None
    data = b"".join(map(bytes, contents(found, file, base.manifest.total_bytes)))
    call.cancel()
    assert data == b"".join(map(bytes, base.buffers))
    ask.offset = 1
    other = w0.stub.GetState(ask)
    kinds = [(await other.read()).WhichOneof("message") for _ in range(2)]
    assert kinds == ["manifest", "chunk"], "a stream that goes on is a stream"


async def test_close_frees_everything_and_ends_attached_calls(w0: Worker) -> None:
    run_id, spec = "close", evaluated_job()
    base = await base_of(w0, run_id, spec)
    call = await wanting(w0, Plan(run_id, spec, base).request([w0], 0))
    for _ in range(2):
        await w0.stub.CloseSession(pb.CloseSessionRequest(fence=fence(0), run_id=run_id))
    assert (await refusal(call)).code() is grpc.StatusCode.ABORTED
    described = await w0.stub.Describe(pb.DescribeRequest())
    assert run_id not in {each.session.run_id for each in described.sessions}
    state = pb.GetStateRequest(fence=fence(), session=session(run_id, "build"), snapshot=0)
    assert (await refusal(w0.stub.GetState(state))).code() is grpc.StatusCode.NOT_FOUND
    said = await attend(w0, build_request(run_id, spec))
    assert not said.accepted.attached


async def wanting(worker: Worker, request: pb.ExecuteRequest) -> Any:
    """A plan that asks for a blob which nobody brings."""
    call = worker.stub.Execute(request)
    kinds = [(await call.read()).WhichOneof("message") for _ in range(2)]
    assert kinds == ["accepted", "need_blob"]
    return call


async def test_wrong_requests_are_named(w0: Worker) -> None:
    spec = evaluated_job()
    nothing = pb.ExecuteRequest(
        fence=fence(), session=session("wrong"), job_json=spec.canonical_json()
    )
    assert (await refusal(w0.stub.Execute(nothing))).code() is grpc.StatusCode.INVALID_ARGUMENT
    federated = evaluated_job(strategy=FEDERATED, data={"worker_local": "hospital"})
    error = await refusal(w0.stub.Execute(build_request("wrong", federated)))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "hospital" in str(error.details())
    bad = build_request("wrong", spec)
    bad.job_json = json.dumps({"name": "x"})
    assert (await refusal(w0.stub.Execute(bad))).code() is grpc.StatusCode.INVALID_ARGUMENT
    beyond = build_request("wrong", spec)
    beyond.numerics = CURRENT + 1
    error = await refusal(w0.stub.Execute(beyond))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"numerics: {CURRENT + 1} is not known here" in str(error.details())
    escape = build_request("../wrong", spec)
    assert (await refusal(w0.stub.Execute(escape))).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_one_client_round(w0: Worker) -> None:
    run_id = "client"
    spec = evaluated_job(strategy=FEDERATED)
    base = await base_of(w0, run_id, spec)
    request = pb.ExecuteRequest(
        fence=fence(),
        session=session(run_id, "client1"),
        segment=1,
        job_json=spec.canonical_json(),
        numerics=CURRENT,
        client_round=pb.ClientRoundPlan(
            base=pb.StateRef(digest=base.digest), client=1, num_clients=2, local_epochs=1
        ),
    )
    said = await attend(w0, request, base)
    assert (said.result.client_round.num_samples, said.result.client_round.num_steps) == (25, 2)
    assert not said.result.client_round.HasField("file"), "nobody near has asked"
    tensors, manifest = await fetch(w0, run_id, 1, "client1")
    assert (manifest.purpose.name, manifest.weight) == ("UPDATE", 25.0)
    assert all(name.startswith("model/") for name in tensors)
    request.segment, request.client_round.place = 2, place()
    done = (await attend(w0, request, base)).result.client_round
    tensors, manifest = await fetch(w0, run_id, 2, "client1")
    assert tensor_pb2.Manifest.FromString(done.manifest) == to_proto(manifest)
    found = opened_copy(done.file)
    assert found is not None
    data = b"".join(map(bytes, contents(found, done.file, manifest.total_bytes)))
    assert data == b"".join(map(bytes, manifest_of(tensors, Purpose.UPDATE)[1]))
    await w0.stub.Abort(pb.AbortRequest(fence=fence(), session=session(run_id, "client1")))
    assert readable_copy(done.file, manifest.total_bytes) is None, "nobody waits for it"
