"""A gate that admits calls only while this coordinator leads, and refuses all others.

A server starts with its gate shut: each call is refused with the reason, and with the leader's
address if the lease names it. Health reports the same: "" is SERVING while the gate is open; LIVE
is SERVING from the start, for probes of the process alone.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import grpc
import structlog
from grpc_health.v1 import health_pb2

from stratagem.common.base.errors import StandbyError
from stratagem.common.rpc.health_service import HealthService
from stratagem.coordinator.store.lead import Holder, Lease
from stratagem.v1 import coordinator_pb2, coordinator_pb2_grpc

LIVE: Final = "live"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

log = structlog.get_logger()


class LeaderGate(grpc.GenericRpcHandler):
    """The gRPC entry of a coordinator: serves calls while it leads, and refuses all others."""

    def __init__(self, address: str, health: HealthService) -> None:
        """Make a gate that is shut. address: host:port at which others reach this coordinator."""
        self.address = address
        self._health = health
        self._refusing = _handlers_of(_Refusing(self))
        self._serving: grpc.GenericRpcHandler | None = None
        self._is_open = False
        self._reason = "waits for the lead"
        self._leader: Holder | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        serving = self._serving if self._is_open else None
        return (serving or self._refusing).service(handler_call_details)

    @property
    def is_open(self) -> bool:
        """Return True if the gate is open: this coordinator leads, as far as it knows."""
        return self._is_open

    async def open(
        self, servicer: coordinator_pb2_grpc.CoordinatorServiceServicer | None = None
    ) -> None:
        """Admit calls, and pass them to this servicer or, by default, to the previous one."""
        if servicer is not None:
            self._serving = _handlers_of(servicer)
        self._leader, self._is_open = None, True
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def shut(self, reason: str) -> None:
        """Refuse all calls with this reason until the gate is opened again."""
        log.info("serving no one", reason=reason)
        self._reason, self._is_open = reason, False
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def say(self, reason: str) -> None:
        """Set the reason that refusals give, such as the coordinator's current start-up step."""
        self._reason, self._leader = reason, None

    def note_leader(self, seen: Lease) -> None:
        """Record that another coordinator leads, for later refusals. Thread-safe."""
        if seen.holder != self._leader and seen.holder is not None:
            log.info("standing by", leader=seen.holder.name, address=seen.holder.address)
        self._leader = seen.holder

    def refusal(self) -> StandbyError:
        """Return the error with which a call is refused now."""
        leader = self._leader
        if leader is None:
            return StandbyError(f"the coordinator at {self.address} {self._reason}")
        where = f" at {leader.address}" if leader.address else ""
        return StandbyError(
            f"the coordinator at {self.address} stands by: {leader.name}{where} leads",
            leader.address,
        )

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        await self._health.set("", status)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)


class _Refusing:
    """A stand-in for the service: every method raises the gate's refusal."""

    def __init__(self, entrance: LeaderGate) -> None:
        async def refuse(_request: object, _context: object) -> object:
            raise entrance.refusal()

        async def refuse_stream(_request: object, _context: object) -> Any:
            raise entrance.refusal()
            yield

        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        for method in service.methods:
            setattr(self, method.name, refuse_stream if method.server_streaming else refuse)


class _Collector:
    """A stand-in for a gRPC server that only collects the handlers of generated code."""

    handler: grpc.GenericRpcHandler

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        (self.handler,) = handlers

    def add_registered_method_handlers(self, _service: str, _handlers: object) -> None:
        """Ignore these handlers: the generic handler has them, too."""


def _handlers_of(servicer: Any) -> grpc.GenericRpcHandler:
    collector: Any = _Collector()
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, collector)
    handler: grpc.GenericRpcHandler = collector.handler
    return handler
