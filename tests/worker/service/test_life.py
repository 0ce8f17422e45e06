"""How a worker process makes itself known, and how it ends."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.common.process.process_exit import MISTAKEN, PREEMPTED
from stratagem.common.rpc.channel import open_channel
from stratagem.worker.process.main import REPEAT_S, Stop
from tests.jobs import user_model
from tests.repository import ROOT
from tests.userland.acting_models import NO_GATE
from tests.worker.service.gate import Gate
from tests.worker.service.rig import Rig, Worker
from tests.worker.service.saying import Plan, attend, base_of, build_request, evaluated_job, refusal

pytestmark = pytest.mark.cluster


@pytest.mark.sweep  # a fork of the template, which most workers of tests are, has one of its own
async def test_nobody_counts_what_is_left_at_the_end(own_rig: Rig) -> None:
    """What is kept from collections libraries would take for leaks."""
    worker = await own_rig.start("w", PYTHONPATH=str(ROOT / "tests/client/complaining"))
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.wait() == 0


async def test_the_worker_registers_beats_and_registers_again(rig: Rig, w0: Worker) -> None:
    coordinator = rig.coordinator
    told = coordinator.registered["w0"]
    assert (told.address, told.incarnation) == (w0.address, w0.incarnation)
    assert list(told.capability.tags) == ["a", "b"]
    assert told.capability.num_threads == 1
    assert told.capability.numerics_fingerprint
    count = coordinator.num_registered["w0"]
    coordinator.forgotten.add("w0")
    await coordinator.wait(lambda: coordinator.num_registered["w0"] > count)
    assert coordinator.registered["w0"].incarnation == w0.incarnation
    async with open_channel(w0.ready["health_address"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_sigterm_drains(own_rig: Rig, tmp_path: Path) -> None:
    worker = await own_rig.start("d")
    gate = Gate(tmp_path)
    run_id, spec = "drain", evaluated_job(user_model("acting_models:gated", **gate.kwargs))
    base = await base_of(worker, run_id, spec)
    plan = Plan(run_id, spec, base, num_shards=1)
    attending = asyncio.create_task(attend(worker, plan.request([worker], 0), base))
    await gate.arrived()
    worker.process.send_signal(signal.SIGTERM)
    beats = own_rig.coordinator.heartbeats
    await own_rig.coordinator.wait(lambda: beats and beats[-1].draining)
    refused = await refusal(worker.stub.Execute(build_request("new", spec)))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    gate.open()
    await gate.leave()
    assert (await attending).result.interrupted.reason == "drained"
    assert await worker.wait() == 0
    (said,) = own_rig.coordinator.left
    assert (said.worker_id, said.incarnation) == ("d", worker.incarnation)
    assert said.reason == "drained after SIGTERM"
    assert beats[-1].draining, "nobody who has left beats again"


async def test_a_drained_member_lets_the_others_go_on(own_rig: Rig, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    run_id, spec = "drain-pair", evaluated_job(user_model("acting_models:gated", **gate.kwargs))
    a, b = await asyncio.gather(own_rig.start("a", **{NO_GATE: "yes"}), own_rig.start("b"))
    own_rig.coordinator.sizes[run_id, 1] = 2
    base = await base_of(a, run_id, spec)
    plan = Plan(run_id, spec, base)
    staying = asyncio.create_task(attend(a, plan.request([a, b], 0), base))
    leaving = asyncio.create_task(attend(b, plan.request([a, b], 1), base))
    await gate.arrived()
    b.process.send_signal(signal.SIGTERM)
    beats = own_rig.coordinator.heartbeats
    await own_rig.coordinator.wait(lambda: beats and beats[-1].draining)
    gate.open()
    await gate.leave()
    assert (await leaving).result.interrupted.reason == "drained"
    assert await b.wait() == 0
    said = await attend(a, plan.request([a], 0, membership=2))
    assert (said.result.train.step, said.result.train.num_redone_steps) == (10, 0)
    assert (await staying).result.train.step == 10


@pytest.mark.core
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1])
def test_a_repeated_signal_is_no_second_one_but_ctrl_c_ends_at_once(
    second: signal.Signals,
) -> None:
    """Slurm sends SIGTERM twice within a tenth of a second."""
    stop, interrupted = Stop(), Stop()
    assert not stop.note(signal.SIGTERM, 100.0)
    assert not stop.note(second, 100.0 + REPEAT_S)
    assert stop.note(second, 100.1 + REPEAT_S)
    assert not interrupted.note(signal.SIGINT, 100.0)
    assert interrupted.note(signal.SIGINT, 100.1)


def preempted_and_released(stop: Stop) -> None:
    stop.note(signal.SIGTERM, 100.0)
    stop.release("the end of run r")


@pytest.mark.core
@pytest.mark.parametrize(
    ("end", "reason", "launched", "alone", "is_preemption"),
    [
        # Who is preempted is started again by a launcher, and by nobody who was released.
        (lambda stop: stop.note(signal.SIGTERM, 1.0), "SIGTERM", PREEMPTED, 0, True),
        (lambda stop: stop.note(signal.SIGUSR1, 1.0), "SIGUSR1", PREEMPTED, 0, True),
        (lambda stop: stop.note(signal.SIGINT, 1.0), "SIGINT", 0, 0, False),
        (lambda stop: stop.release("the end of run r"), "the end of run r", 0, 0, False),
        (preempted_and_released, "", PREEMPTED, 0, True),
        # Who was started for a run that is not there has not done its work.
        (lambda stop: stop.refuse("no run"), "no run", MISTAKEN, MISTAKEN, False),
        (lambda stop: stop.replace("no device"), "no device", PREEMPTED, 1, False),
    ],
)
def test_how_it_ends_says_its_status(
    end: Callable[[Stop], object], reason: str, launched: int, alone: int, is_preemption: bool
) -> None:
    stop = Stop()
    assert (stop.status(is_launched=True), stop.status(is_launched=False)) == (0, 0)
    assert (stop.told.is_set(), stop.is_preemption) == (False, False)
    end(stop)
    assert stop.told.is_set()
    assert stop.reason == reason or not reason
    if not reason.startswith("SIG"):
        assert not stop.note(signal.SIGTERM, 100.0), "it ends already"
    assert (stop.status(is_launched=True), stop.status(is_launched=False)) == (launched, alone)
    assert stop.is_preemption is is_preemption
    assert stop.note(signal.SIGTERM, 200.0)


async def test_a_plan_that_nobody_attends_lets_others_go_first(w0: Worker) -> None:
    """Its coordinator is gone, and the next one may want something else of this worker first."""
    spec = evaluated_job("mlp")
    base = await base_of(w0, "deserted-base", spec)
    plan = Plan("deserted", spec, base, num_shards=1)
    call = w0.stub.Execute(plan.request([w0], 0))
    async for message in call:
        if message.WhichOneof("message") == "need_blob":
            break
    call.cancel()
    other = await attend(w0, build_request("deserted-other", spec))
    assert other.result.build.num_parameters > 0
    said = await attend(w0, plan.request([w0], 0), base)
    assert said.accepted.attached
    assert said.result.train.step == 10
