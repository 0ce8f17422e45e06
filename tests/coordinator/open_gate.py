"""The entrance of a coordinator that a test leads by itself: nobody comes through it."""

from stratagem.common.rpc.health_service import HealthService
from stratagem.coordinator.runtime.leadership.leader_gate import LeaderGate


def entrance() -> LeaderGate:
    return LeaderGate("127.0.0.1:1", HealthService())
