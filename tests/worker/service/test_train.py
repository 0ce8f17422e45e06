"""Whole segments on real worker processes, against the reference loop, to the bit."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.numerics_rules import CURRENT, REFUSES_INFINITE
from stratagem.common.tensors.manifest import Purpose, build_manifest, to_proto
from stratagem.v1 import tensor_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.common.tensors.chunk_messages import iter_chunks
from tests.jobs import ALLOW, user_model
from tests.reference.loops import sharded_loop
from tests.worker.service.gate import Gate
from tests.worker.service.rig import Rig, Worker
from tests.worker.service.saying import (
    Plan,
    attend,
    base_of,
    blob_of,
    bring,
    build_request,
    evaluated_job,
    fence,
    fetch,
    session,
)

pytestmark = pytest.mark.cluster


def reference(spec: JobSpec, num_shards: int, num_steps: int) -> Mapping[str, Tensor]:
    allowed = EntryPoints([ALLOW])
    return sharded_loop(spec, allowed, num_shards, num_steps).state


def model_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("model/"): tensor
        for name, tensor in tensors.items()
        if name.startswith("model/")
    }


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


async def test_build_says_what_was_built(w0: Worker) -> None:
    spec = evaluated_job()
    said = await attend(w0, build_request("build-1", spec))
    assert dict(said.result.build.num_rows) == {"train": 50, "test": 23}
    assert said.result.build.num_parameters == 12 * 16 + 16 + 16 * 5 + 5
    assert len(said.result.build.layout_digest) == 64
    tensors, manifest = await fetch(w0, "build-1", 0, "build")
    assert manifest.metadata["step"] == "0"
    assert_same_bits(model_of(tensors), reference(spec, 1, 0))


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="fork of the template"),
        pytest.param({"PYTHONNODEBUGRANGES": "1"}, id="started alone", marks=pytest.mark.sweep),
    ],
)
async def test_a_data_loader_of_the_users_has_processes_of_its_own(
    rig: Rig, variables: dict[str, str]
) -> None:
    """A fork of a process with a live server of gRPC would soon be killed, or stand still."""
    worker = await rig.start(f"loading-{len(variables)}", **variables)
    run_id, spec = worker.name, evaluated_job(loss="tests.userland.losses:loading_loss")
    base = await base_of(worker, run_id, spec)
    plan = Plan(run_id, spec, base, to_step=5)  # and each has two micro-batches
    training = asyncio.create_task(attend(worker, plan.request([worker], 0), base))
    while not training.done():  # the server is kept busy meanwhile
        await worker.stub.Describe(pb.DescribeRequest())
    result = (await training).result
    assert not result.HasField("error"), result.error.traceback
    assert result.train.step == 5


@pytest.mark.parametrize("num_shards", [1, 3])
async def test_one_worker_equals_the_sharded_loop(w0: Worker, num_shards: int) -> None:
    run_id, spec = f"solo-{num_shards}", evaluated_job()
    base = await base_of(w0, run_id, spec)
    plan = Plan(run_id, spec, base, num_shards=num_shards, to_step=7)
    said = await attend(w0, plan.request([w0], 0), base)
    assert said.needed == [base.digest]
    assert said.progress[-1].step == 7
    assert said.progress[-1].lr > 0
    result = said.result.train
    assert (result.step, result.engine, result.num_redone_steps) == (7, "solo", 0)
    assert [(part.split, part.batch) for part in result.parts] == [("test", b) for b in range(6)]
    assert set(result.parts[0].sums) == {"loss", "accuracy"}
    tensors, manifest = await fetch(w0, run_id, 1)
    assert manifest.metadata["step"] == "7"
    assert_same_bits(model_of(tensors), reference(spec, num_shards, 7))


@pytest.mark.parametrize(
    ("which", "lr", "numerics", "error"),
    [
        ("refilled", 0.1, CURRENT, ""),
        ("int64", 1e40, CURRENT, "FloatingPointError"),
        ("int64", 1e40, REFUSES_INFINITE - 1, ""),
    ],
)
async def test_a_segment_fails_where_parameters_are_not_finite_by_the_rules_that_say_so(
    w0: Worker, which: str, lr: float, numerics: int, error: str
) -> None:
    run_id = f"infinite-{which}-{numerics}"
    model = user_model("odd_models:Buffered", which=which)
    spec = evaluated_job(model, optimizer={"name": "sgd", "lr": lr})
    base = await base_of(w0, run_id, spec)
    plan = Plan(run_id, spec, base, to_step=1, numerics=numerics)
    result = (await attend(w0, plan.request([w0], 0), base)).result
    assert result.error.type == error
    assert result.HasField("train") == (not error)


async def test_the_next_segment_goes_on_without_a_blob(w0: Worker) -> None:
    run_id, spec = "segments", evaluated_job()
    base = await base_of(w0, run_id, spec)
    await attend(w0, Plan(run_id, spec, base, to_step=4).request([w0], 0), base)
    tensors, manifest = await fetch(w0, run_id, 1)
    first = blob_of(tensors, manifest.metadata, Purpose.STATE)
    plan = Plan(run_id, spec, first, segment=2, base_step=4, to_step=10)
    said = await attend(w0, plan.request([w0], 0))
    assert said.needed == []
    assert_same_bits(model_of((await fetch(w0, run_id, 2))[0]), reference(spec, 2, 10))


@pytest.mark.parametrize("method", ["all-reduce", "resumed"])
async def test_two_workers_equal_the_sharded_loop(
    rig: Rig, w0: Worker, w1: Worker, method: str
) -> None:
    run_id, spec = f"pair-{method}", evaluated_job()
    rig.coordinator.sizes[run_id, 1] = 2
    base, base_step = await base_of(w0, run_id, spec), 0
    if method == "resumed":  # one of them holds a state already, the other copies it
        await attend(w1, Plan(run_id, spec, base, to_step=3).request([w1], 0, membership=0), base)
    plan = Plan(run_id, spec, base, segment=2, base_step=base_step)
    both = await asyncio.gather(
        attend(w0, plan.request([w0, w1], 0), base), attend(w1, plan.request([w0, w1], 1), base)
    )
    results = [said.result.train for said in both]
    assert [result.engine for result in results] == ["shm", "shm"]
    assert results[0].state_fingerprint == results[1].state_fingerprint
    if method == "resumed":
        assert both[0].needed == []
    batches = sorted(part.batch for result in results for part in result.parts)
    assert batches == list(range(6))
    for worker in (w0, w1):
        tensors, _ = await fetch(worker, run_id, 2)
        assert_same_bits(model_of(tensors), reference(spec, 2, 10))


@pytest.mark.sweep
@pytest.mark.parametrize(("mode", "is_suspected"), [("Eager", True), ("Lazy", False)])
async def test_a_member_that_compiles_is_waited_for(
    own_rig: Rig, mode: str, is_suspected: bool
) -> None:
    """One member stands in the first pass over its model for longer than the others wait for an
    exchange; where code is compiled that pass is part of it."""
    gate, coordinator = Gate(own_rig.directory), own_rig.coordinator
    run_id, spec = (
        "compiling",
        evaluated_job(user_model("acting_models:gated", **gate.kwargs), execution={"mode": mode}),
    )
    patience = {"STRATAGEM_WORKER_EXCHANGE_TIMEOUT_S": "5", "TORCHDYNAMO_DISABLE": "1"}
    a, b = await asyncio.gather(
        own_rig.start("a", **patience, STRATAGEM_TEST_NO_GATE="1"), own_rig.start("b", **patience)
    )
    coordinator.sizes |= {(run_id, 1): 2, (run_id, 2): 2}
    base = await base_of(a, run_id, spec)
    plan = Plan(run_id, spec, base, to_step=2)
    both = [
        asyncio.create_task(attend(worker, plan.request([a, b], rank), base))
        for rank, worker in enumerate((a, b))
    ]
    await gate.arrived()
    suspicion = asyncio.create_task(coordinator.wait(lambda: coordinator.suspects))
    done, _ = await asyncio.wait([suspicion], timeout=None if is_suspected else 7.0)
    assert bool(done) is is_suspected
    gate.open()
    await gate.leave()
    suspicion.cancel()
    if is_suspected:
        for task in both:
            task.cancel()
        return
    results = [(await task).result.train for task in both]
    assert [(result.step, result.num_redone_steps) for result in results] == [(2, 0)] * 2
    assert results[0].state_fingerprint == results[1].state_fingerprint


@pytest.mark.parametrize(
    ("alone", "failpoint"),
    [
        (True, "worker.step.before_apply"),
        pytest.param(False, "worker.step.before_backward", marks=pytest.mark.sweep),
        pytest.param(False, "worker.step.before_apply", marks=pytest.mark.sweep),
        pytest.param(True, "worker.step.before_backward", marks=pytest.mark.sweep),
    ],
)
async def test_a_lost_member_is_replaced_and_its_step_done_again(
    own_rig: Rig, failpoint: str, alone: bool
) -> None:
    run_id, spec, coordinator = "lost", evaluated_job(), own_rig.coordinator
    (own_rig.directory / failpoint).write_text("3")  # dies in its fourth step
    a, b = await asyncio.gather(
        own_rig.start("a"), own_rig.start("b", STRATAGEM_FAILPOINTS=str(own_rig.directory))
    )
    coordinator.sizes |= {(run_id, 1): 2, (run_id, 3): 2}
    base = await base_of(a, run_id, spec)
    plan = Plan(run_id, spec, base)
    first = asyncio.create_task(attend(a, plan.request([a, b], 0), base))
    with pytest.raises(grpc.aio.AioRpcError):
        await attend(b, plan.request([a, b], 1), base)
    assert await b.wait() == 137
    await coordinator.wait(lambda: coordinator.suspects)
    assert coordinator.suspects[0].fence.membership == 1
    if alone:
        said = await attend(a, plan.request([a], 0, membership=2))
        assert (said.accepted.attached, said.result.train.engine) == (True, "solo")
        assert len(said.result.train.parts) == 6
    c = await own_rig.start("c")
    both = await asyncio.gather(
        attend(a, plan.request([a, c], 0, membership=3), base),
        attend(c, plan.request([a, c], 1, membership=3), base),
    )
    assert both[0].accepted.attached
    results = [said.result.train for said in both]
    assert results[0].state_fingerprint == results[1].state_fingerprint
    assert (results[0].loss, results[0].num_rows) == (results[1].loss, results[1].num_rows)
    assert sorted(part.batch for result in results for part in result.parts) == list(range(6))
    if failpoint == "worker.step.before_backward":
        assert results[0].num_redone_steps == 1
    tensors, _ = await fetch(c, run_id, 1, membership=3)
    assert_same_bits(model_of(tensors), reference(spec, 2, 10))
    # The call of the old view was answered too.
    assert (await first).result.HasField("train")


async def test_a_parameter_server_step(rig: Rig, w0: Worker, w1: Worker) -> None:
    run_id, spec = "server", evaluated_job()
    rig.coordinator.sizes[run_id, 1] = 2
    base = await base_of(w0, run_id, spec)
    plan = Plan(run_id, spec, base, to_step=3, exchange=pb.EXCHANGE_METHOD_PARAMETER_SERVER)
    workers = [w0, w1]
    attending = [
        asyncio.create_task(attend(worker, plan.request(workers, rank), base))
        for rank, worker in enumerate(workers)
    ]
    for step in range(1, 4):
        assert await serve_step(workers, run_id) == step
    results = [(await task).result.train for task in attending]
    assert [result.engine for result in results] == ["server", "server"]
    for worker in workers:
        tensors, _ = await fetch(worker, run_id, 1)
        assert_same_bits(model_of(tensors), reference(spec, 2, 3))
    header = pb.ApplyGradientsHeader(fence=fence(0), session=session(run_id), step=1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await w0.stub.ApplyGradients(iter([pb.ApplyGradientsRequest(header=header)]))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def serve_step(workers: list[Worker], run_id: str) -> int:
    """Sum one step of two members that hold one shard each."""
    pulled = [await pull_gradients(worker, run_id) for worker in workers]
    (header, _), _ = pulled
    specs = header.manifest.tensors
    assert all(spec.name.endswith("/0:1") for spec in specs)  # the shard of the first member
    sums = []
    for index, spec in enumerate(specs):
        left, right = (
            np.frombuffer(data, spec_dtype(spec), count=spec.shape[0], offset=spec.offset)
            for each, data in pulled
            for spec in [each.manifest.tensors[index]]
        )
        sums.append((spec.name.split("/")[0], spec_dtype(spec), left + right))
    manifest = build_manifest(((n, d, v.shape) for n, d, v in sums), Purpose.GRADIENTS)
    requests = [
        pb.ApplyGradientsRequest(
            header=pb.ApplyGradientsHeader(
                fence=fence(),
                session=session(run_id),
                step=header.step,
                manifest=to_proto(manifest),
            )
        ),
        *(
            pb.ApplyGradientsRequest(chunk=chunk)
            for chunk in iter_chunks([memoryview(v.tobytes()) for _, _, v in sums])
        ),
        pb.ApplyGradientsRequest(commit=True),
    ]
    answers = await asyncio.gather(*(w.stub.ApplyGradients(iter(requests)) for w in workers))
    assert {answer.step for answer in answers} == {header.step}
    again = await workers[0].stub.ApplyGradients(iter(requests))
    assert again.step == header.step
    return int(header.step)


def spec_dtype(spec: Any) -> str:
    return {tensor_pb2.D_TYPE_FLOAT32: "float32", tensor_pb2.D_TYPE_FLOAT64: "float64"}[spec.dtype]


async def pull_gradients(worker: Worker, run_id: str) -> tuple[pb.GradientHeader, bytes]:
    """What a member sends in its step; asked again until the session is there."""
    while True:
        header, data = pb.GradientHeader(), b""
        request = pb.GetGradientsRequest(fence=fence(), session=session(run_id))
        try:
            async for response in worker.stub.GetGradients(request):
                if response.HasField("header"):
                    header = response.header
                else:
                    assert response.chunk.offset == len(data)
                    data += response.chunk.data
            return header, data
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise


async def test_a_finished_plan_serves_a_new_view(rig: Rig, w0: Worker, w1: Worker) -> None:
    """The survivor had finished; who replaces the lost member copies from it."""
    run_id, spec = "late", evaluated_job()
    rig.coordinator.sizes[run_id, 2] = 2
    base = await base_of(w0, run_id, spec)
    plan = Plan(run_id, spec, base)
    alone = await attend(w0, plan.request([w0], 0), base)
    assert len(alone.result.train.parts) == 6
    both = await asyncio.gather(
        attend(w0, plan.request([w0, w1], 0, membership=2)),
        attend(w1, plan.request([w0, w1], 1, membership=2)),
    )
    assert both[0].accepted.attached
    assert [len(said.result.train.parts) for said in both] == [3, 3]
    assert both[0].result.train.loss == both[1].result.train.loss
    assert both[0].result.train.num_rows == both[1].result.train.num_rows
    assert_same_bits(
        model_of((await fetch(w1, run_id, 1, membership=2))[0]), reference(spec, 2, 10)
    )


async def test_a_member_that_waits_for_others_follows_what_it_is_told(
    rig: Rig, w0: Worker, w1: Worker
) -> None:
    run_id, spec = "waits", evaluated_job()
    rig.coordinator.sizes |= {(run_id, 1): 2, (run_id, 3): 2}
    base = await base_of(w0, run_id, spec)
    plan = Plan(run_id, spec, base)
    await bring(w0, run_id, base)
    first = asyncio.create_task(attend(w0, plan.request([w0, w1], 0)))
    await rig.coordinator.wait(lambda: rig.coordinator.barriers[run_id, 1].arrivals)
    said = await attend(w0, plan.request([w0], 0, membership=2), base)
    assert (said.result.train.step, said.result.train.engine) == (10, "solo")
    assert (await first).result.train.step == 10
    other = Plan(run_id, spec, base, segment=2, to_step=12)
    waiting = asyncio.create_task(attend(w0, other.request([w0, w1], 0, membership=3), base))
    await rig.coordinator.wait(lambda: rig.coordinator.barriers[run_id, 3].arrivals)
    await w0.stub.Abort(pb.AbortRequest(fence=fence(3), session=session(run_id)))
    assert (await waiting).result.interrupted.reason == "aborted"


async def test_evaluate_a_committed_state(w0: Worker) -> None:
    run_id, spec = "evaluate", evaluated_job()
    base = await base_of(w0, run_id, spec)
    plan = Plan(run_id, spec, base, to_step=4)
    trained = await attend(w0, plan.request([w0], 0), base)
    tensors, manifest = await fetch(w0, run_id, 1)
    state = blob_of(tensors, manifest.metadata, Purpose.STATE)
    request = plan.request([w0], 0)
    request.session.party = "evaluate"
    request.evaluate.CopyFrom(
        pb.EvaluatePlan(
            base=pb.StateRef(segment=1, step=4, digest=state.digest), splits=["test"], size=1
        )
    )
    said = await attend(w0, request, state)
    assert list(said.result.evaluate.parts) == list(trained.result.train.parts)
