"""A worker is brought the blobs that its plan names, and no others, whatever it asks for."""

from stratagem.coordinator.effects.attend import blobs_named
from stratagem.v1 import worker_pb2 as pb
from tests.cluster.jobs import job

BASE, INLINE, GIVEN = "1" * 64, "2" * 64, "3" * 64


def test_a_plan_names_its_base_and_what_its_job_names() -> None:
    plain = job().canonical_json()
    build = pb.ExecuteRequest(job_json=plain, build=pb.BuildPlan())
    assert blobs_named(build) == frozenset()
    train = pb.TrainPlan(base=pb.StateRef(digest=BASE))
    assert blobs_named(pb.ExecuteRequest(job_json=plain, train=train)) == {BASE}
    both = job(data={"inline": INLINE}, initial={"digest": GIVEN}).canonical_json()
    for plan in ("train", "client_round", "evaluate"):
        request = pb.ExecuteRequest(job_json=both)
        getattr(request, plan).base.digest = BASE
        assert blobs_named(request) == {BASE, INLINE, GIVEN}
