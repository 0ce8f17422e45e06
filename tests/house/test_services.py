"""Every call of a service has an implementation: the generated base class answers UNIMPLEMENTED."""

import pytest

from stratagem.coordinator.service.coordinator_service import CoordinatorServicer
from stratagem.v1 import coordinator_pb2_grpc, peer_pb2_grpc, worker_pb2_grpc
from stratagem.worker.mesh.peer_service import PeerServicer
from stratagem.worker.service.worker_service import WorkerServicer

SERVED = {
    CoordinatorServicer: coordinator_pb2_grpc.CoordinatorServiceServicer,
    WorkerServicer: worker_pb2_grpc.WorkerServiceServicer,
    PeerServicer: peer_pb2_grpc.PeerServiceServicer,
}


@pytest.mark.parametrize(("servicer", "generated"), SERVED.items(), ids=lambda kind: kind.__name__)
def test_every_call_is_implemented(servicer: type, generated: type) -> None:
    calls = [name for name in vars(generated) if not name.startswith("_")]
    assert calls
    missing = [name for name in calls if getattr(servicer, name) is getattr(generated, name)]
    assert not missing, f"{servicer.__name__} does not implement {missing}"
