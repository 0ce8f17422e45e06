"""A worker whose torch thread is blocked by user code says so, and ends when others wait for it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stratagem.v1 import worker_pb2 as pb
from tests.jobs import user_model
from tests.patience import PATIENCE_S
from tests.worker.service.gate import Gate
from tests.worker.service.rig import Rig, Worker
from tests.worker.service.saying import (
    Blob,
    Plan,
    base_of,
    bring,
    evaluated_job,
    fence,
    session,
)

pytestmark = pytest.mark.cluster

PROMPT = ("--stall-report-s", "0.2", "--abort-grace-s", "0.2", "--compile-timeout-s", "0")


async def stalls_of(
    worker: Worker, request: pb.ExecuteRequest, base: Blob
) -> AsyncIterator[pb.Stall]:
    """What is said of the plan's thread while the plan is followed."""
    async for response in worker.stub.Execute(request, timeout=PATIENCE_S):
        if response.HasField("need_blob"):
            await bring(worker, request.session.run_id, base)
        if response.HasField("stall"):
            yield response.stall


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_blocked_plan_is_reported_and_once_it_is_ended_so_is_the_process_for_the_next_one(
    own_rig: Rig, tmp_path: Path, is_closed: bool
) -> None:
    worker, run_id = await own_rig.start("w", *PROMPT), "blocked"
    gate = Gate(tmp_path)  # at which nobody is
    spec = evaluated_job(user_model("acting_models:gated", **gate.kwargs))
    base = await base_of(worker, run_id, spec)
    request = Plan(run_id, spec, base, num_shards=1).request([worker], 0)
    stalls = stalls_of(worker, request, base)
    stall = await anext(each async for each in stalls if each.activity == "training step 1")
    assert (stall.seconds > 0, stall.awaits) == (True, "")
    assert stall.place.startswith("acting_models.py, line ")
    assert stall.place.endswith("in forward")
    if is_closed:
        await worker.stub.CloseSession(pb.CloseSessionRequest(fence=fence(), run_id=run_id))
    else:
        await worker.stub.Abort(pb.AbortRequest(fence=fence(), session=session(run_id)))
    other = Plan("other", spec, base, num_shards=1).request([worker], 0)
    waits = worker.stub.Execute(other, timeout=PATIENCE_S)
    assert await worker.wait() == 1, "a supervisor starts it again"
    waits.cancel()
    (said,) = own_rig.coordinator.left
    assert said.reason == "drained after the torch thread was lost"
    log = (own_rig.directory / "w.log").read_text()
    assert "acting_models.py" in log.split("the torch thread stays at one thing")[1]
    last = log.splitlines()[-1]
    assert "training step 1" in last
    assert "exit_status=1" in last


async def test_a_thread_that_moves_on_takes_it_all_back(own_rig: Rig, tmp_path: Path) -> None:
    worker, run_id = await own_rig.start("w", *PROMPT), "slow"
    gate = Gate(tmp_path)
    spec = evaluated_job(user_model("acting_models:gated", **gate.kwargs))
    base = await base_of(worker, run_id, spec)
    request = Plan(run_id, spec, base, num_shards=1).request([worker], 0)
    stalls = stalls_of(worker, request, base)
    await anext(each async for each in stalls if each.activity == "training step 1")
    await gate.arrived()
    await gate.leave()
    await anext(each async for each in stalls if not each.seconds)
    await anext(each async for each in stalls if each.activity == "training step 2")
