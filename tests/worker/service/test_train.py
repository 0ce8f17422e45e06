"""Whole segments on real worker processes, against the reference loop, to the bit."""

import asyncio
from collections.abc import Mapping

import grpc
import pytest
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT, REFUSES_INFINITE
from stratagem.common.tensors.manifest import Purpose
from stratagem.v1 import worker_pb2 as pb
from tests.jobs import user_model
from tests.reference.loops import sharded_loop
from tests.worker.engine.support import ALLOWED, assert_same_bits
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
    return sharded_loop(spec, ALLOWED, num_shards, num_steps).state


def assert_trained(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The model in a state has these bits."""
    model = {
        name.removeprefix("model/"): tensor
        for name, tensor in tensors.items()
        if name.startswith("model/")
    }
    assert_same_bits(model, dict(expected))


async def test_build_says_what_was_built(w0: Worker) -> None:
    spec = evaluated_job()
    said = await attend(w0, build_request("build-1", spec))
    assert dict(said.result.build.num_rows) == {"train": 50, "test": 23}
    assert said.result.build.num_parameters == 12 * 16 + 16 + 16 * 5 + 5
    assert len(said.result.build.layout_digest) == 64
    tensors, manifest = await fetch(w0, "build-1", 0, "build")
    assert manifest.metadata["step"] == "0"
    assert_trained(tensors, reference(spec, 1, 0))


@pytest.mark.sweep  # test_calls.py says how they begin
@pytest.mark.parametrize(
    "variables",
    [{}, {"PYTHONNODEBUGRANGES": "1"}],
    ids=["fork of the template", "started alone"],
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


async def test_one_worker_equals_the_sharded_loop(w0: Worker) -> None:
    run_id, spec, num_shards = "solo", evaluated_job(), 3
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
    assert_trained(tensors, reference(spec, num_shards, 7))


async def test_a_segment_fails_by_the_rules_that_want_finite_parameters(
    w0: Worker,
) -> None:
    model = user_model("odd_models:Buffered", which="int64")
    spec = evaluated_job(model, optimizer={"name": "sgd", "lr": 1e40})
    base = await base_of(w0, "infinite", spec)
    for segment, numerics, error in (
        (1, CURRENT, "FloatingPointError"),
        (2, REFUSES_INFINITE - 1, ""),
    ):
        plan = Plan("infinite", spec, base, segment=segment, to_step=1, numerics=numerics)
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
    assert_trained((await fetch(w0, run_id, 2))[0], reference(spec, 2, 10))


async def test_two_workers_equal_the_sharded_loop(rig: Rig, w0: Worker, w1: Worker) -> None:
    """One of them holds a state already, and the other copies it."""
    run_id, spec = "pair", evaluated_job()
    rig.coordinator.sizes[run_id, 1] = 2
    base = await base_of(w0, run_id, spec)
    await attend(w1, Plan(run_id, spec, base, to_step=3).request([w1], 0, membership=0), base)
    plan = Plan(run_id, spec, base, segment=2)
    both = await asyncio.gather(
        attend(w0, plan.request([w0, w1], 0), base), attend(w1, plan.request([w0, w1], 1), base)
    )
    results = [said.result.train for said in both]
    assert [result.engine for result in results] == ["shm", "shm"]
    assert results[0].state_fingerprint == results[1].state_fingerprint
    assert both[0].needed == []
    batches = sorted(part.batch for result in results for part in result.parts)
    assert batches == list(range(6))
    for worker in (w0, w1):
        tensors, _ = await fetch(worker, run_id, 2)
        assert_trained(tensors, reference(spec, 2, 10))


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
    assert_trained(tensors, reference(spec, 2, 10))
    # The call of the old view was answered too.
    assert (await first).result.HasField("train")


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
    assert_trained((await fetch(w1, run_id, 1, membership=2))[0], reference(spec, 2, 10))


async def test_a_member_that_waits_for_others_is_told(rig: Rig, w0: Worker, w1: Worker) -> None:
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
