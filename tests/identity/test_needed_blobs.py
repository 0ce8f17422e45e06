"""A worker is brought the blobs that its plan names, and no others, whatever it asks for."""

import json

from stratagem.coordinator.effects.execution.execute_plan import blobs_named
from stratagem.v1 import worker_pb2 as pb
from tests.jobs import job

BASE, INLINE, GIVEN = "1" * 64, "2" * 64, "3" * 64


def test_a_client_may_have_what_it_has_kept() -> None:
    state = pb.ClientStateRef(round=2, digest=GIVEN)
    plan = pb.ClientRoundPlan(base=pb.StateRef(digest=BASE), state=state)
    assert blobs_named(pb.ExecuteRequest(client_round=plan), {}) == {BASE, GIVEN}


def test_a_plan_names_its_base_and_what_its_job_names() -> None:
    plain = json.loads(job().canonical_json())
    assert blobs_named(pb.ExecuteRequest(build=pb.BuildPlan()), plain) == frozenset()
    train = pb.TrainPlan(base=pb.StateRef(digest=BASE))
    assert blobs_named(pb.ExecuteRequest(train=train), plain) == {BASE}
    both = json.loads(job(data={"inline": INLINE}, initial={"digest": GIVEN}).canonical_json())
    for plan in ("train", "client_round", "evaluate"):
        request = pb.ExecuteRequest()
        getattr(request, plan).base.digest = BASE
        assert blobs_named(request, both) == {BASE, INLINE, GIVEN}
