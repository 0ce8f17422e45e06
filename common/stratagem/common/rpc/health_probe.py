"""Query a grpc.health.v1 service for its status: one question, one answer, no retries.

Health checks run it every few seconds in each container, so it imports gRPC and nothing else that
costs time.
"""

from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S: Final = 3.0


def health_of(address: str, timeout_s: float = TIMEOUT_S, service: str = "") -> str:
    """Return SERVING or NOT_SERVING as the service at host:port reports, else why there is no
    answer. service: "live" asks a coordinator only whether it works, not whether it leads."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(
                health_pb2.HealthCheckRequest(service=service),
                timeout=timeout_s,
                wait_for_ready=False,
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {_why(error, address, timeout_s)}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _why(error: grpc.RpcError, address: str, timeout_s: float) -> str:
    """Return why there is no answer; gRPC's own text unless the service is away or too slow."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"nobody answers at {address}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"{address} has not answered within {timeout_s:g} s"
    return str(error.details())


def is_healthy(answer: str) -> bool:
    """Return whether a result of `health_of` means that the process is healthy."""
    return answer == "SERVING"
