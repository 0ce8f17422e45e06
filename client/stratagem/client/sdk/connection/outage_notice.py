"""Says once that calls wait for a coordinator: why, and for what."""

import logging
import time
from dataclasses import dataclass, field
from typing import Final

import grpc

from stratagem.common.rpc.status_codes import name_of, shown

TOLD_AFTER_S: Final = 1.0
"""A coordinator that is back by then has only been restarted, or another one leads."""

log = logging.getLogger("stratagem.client")


@dataclass(slots=True)
class ToldOutage:
    """What all calls over a connection share, so that they do not each tell of one outage."""

    is_told: bool = False


@dataclass(slots=True)
class OutageNotice:
    """Of one call or stream, from its begin on."""

    address: str
    waits: str
    """Until when it waits, such as "for up to 60 s"."""
    outage: ToldOutage
    _since_s: float | None = field(default=None, init=False)
    _is_told: bool = field(default=False, init=False)

    def answered(self) -> None:
        """Note that a coordinator has answered this call."""
        self._since_s, self._is_told, self.outage.is_told = None, False, False

    def failed(self, error: grpc.RpcError) -> None:
        """Note an error after which the call is made again; one that has lasted is told once."""
        if self._since_s is None:
            self._since_s = time.monotonic()
        has_lasted = time.monotonic() - self._since_s >= TOLD_AFTER_S
        if not has_lasted or self._is_told or self.outage.is_told:
            return
        self._is_told = self.outage.is_told = True
        details = shown(error.details() or "") or error.code().name
        if name_of(error):
            text = f"the coordinator at {self.address} cannot do it now: {details}"
        else:
            why = "connection refused" if "Connection refused" in details else details
            text = f"no coordinator answers at {self.address}: {why}"
        log.warning("%s; trying again %s", text, self.waits)
