"""Answer grpc.health.v1 on a port that everybody may reach.

The number of watchers is limited, so that single questions are always answered; a watcher that does
not read holds up neither the others nor a change of the status. (The servicer of
grpcio-health-checking holds a lock while it writes to a watcher, for which a change of the status
waits, and forgets the other watchers when the first one leaves.)
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.common.base.errors import LimitError
from stratagem.common.rpc.admission import RETRY_AFTER_S

MAX_WATCHERS: Final = 64

Status: TypeAlias = "health_pb2.HealthCheckResponse.ServingStatus"
_Answer = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # has no types
    """The grpc.health.v1 service of a process; SERVING at first. For use on the event loop."""

    def __init__(self) -> None:
        self._status: dict[str, Status] = {"": _Answer.SERVING}
        self._changed = asyncio.Event()
        self._num_watchers = 0
        self._is_ending = False

    async def set(self, service: str, status: Status) -> None:
        """Set the status of a service; ignored once the process is shutting down."""
        if not self._is_ending:
            self._say({**self._status, service: status})

    async def enter_graceful_shutdown(self) -> None:
        """Set all services to NOT_SERVING permanently."""
        self._is_ending = True
        self._say(dict.fromkeys(self._status, _Answer.NOT_SERVING))

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Answer(status=status)

    async def List(self, request: Any, context: Any) -> Any:
        statuses = {name: _Answer(status=status) for name, status in self._status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: Any, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if self._num_watchers >= MAX_WATCHERS:
            text = f"{self._num_watchers} callers watch, the limit is {MAX_WATCHERS}; use Check"
            raise LimitError(text, retry_after_s=RETRY_AFTER_S)
        self._num_watchers += 1
        try:
            said: Status | None = None
            while True:
                changed = self._changed
                status = self._status.get(request.service, _Answer.SERVICE_UNKNOWN)
                if status != said:
                    said = status
                    yield _Answer(status=status)
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _say(self, status: dict[str, Status]) -> None:
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()
