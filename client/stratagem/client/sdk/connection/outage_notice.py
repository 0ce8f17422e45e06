"""Says once that calls wait for a coordinator: why, and for what."""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import grpc

from stratagem.common.base.errors import StandbyError
from stratagem.common.rpc.status_codes import name_of, shown

TOLD_AFTER_S: Final = 1.0
"""A coordinator that is back by then has only been restarted, or another one leads."""

log = logging.getLogger("stratagem.client")

_NO_ANSWERS: Final = frozenset(
    (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
)
"""What gRPC itself says where nobody answers."""


@dataclass(slots=True)
class ToldOutage:
    """What all calls over a connection share, so that they do not each tell of one outage."""

    is_told: bool = False
    """That nobody answers; until a coordinator answers any of them."""
    refused: Counter[str] = field(default_factory=Counter)
    """Why calls are refused for now that have lasted, with how many are for that reason, of which
    the first one has told it. What a coordinator answers to others does not end that."""
    num_answers: int = 0
    """Of a coordinator to any of them."""

    def end(self) -> None:
        """Note that a coordinator has answered."""
        self.is_told = False
        self.num_answers += 1


@dataclass(slots=True)
class OutageNotice:
    """Of one call or stream: a context, from its begin to its end."""

    address: str
    outage: ToldOutage
    _since_s: float | None = field(default=None, init=False)
    _is_told: bool = field(default=False, init=False)
    """That nobody answers."""
    _reasons: set[str] = field(default_factory=set, init=False)
    """Why this call was refused so far."""
    _met_after: int | None = field(default=None, init=False)
    """How many answers there were when the error came that is looked at."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_refusal()

    def answered(self) -> None:
        """Note that a coordinator has answered this call."""
        self._since_s, self._is_told = None, False
        self.outage.end()
        self._end_refusal()

    def met(self) -> None:
        """Note that an error has come, before it is found out what it means: by then a coordinator
        may have answered others, and their outage is over."""
        self._met_after = self.outage.num_answers

    def ended(self, error: grpc.RpcError) -> None:
        """Note the error that ends this call, which may be an answer."""
        if name_of(error) or error.code() not in _NO_ANSWERS:
            self.answered()

    def failed(self, error: grpc.RpcError, waits: str) -> None:
        """Note an error after which the call is made again; one that has lasted is told once, and
        so is each reason of a refusal.

        waits: until when, such as "for up to 60 s".
        """
        name = name_of(error)
        if name and name != StandbyError.__name__:  # who stands by answers for nobody else
            self.outage.end()
        if self._since_s is None:
            self._since_s = time.monotonic()
        is_over = not name and self._met_after not in (None, self.outage.num_answers)
        has_lasted = time.monotonic() - self._since_s >= TOLD_AFTER_S and not is_over
        if has_lasted and self._is_first(self._told(error), is_refusal=bool(name)):
            log.warning("%s; trying again %s", self._told(error), waits)

    def _is_first(self, told: str, *, is_refusal: bool) -> bool:
        """Return whether nobody has told it yet, this call nor another one; from now on one has."""
        if not is_refusal:
            if self._is_told:  # of an outage that may be over for others
                return False
            was_told = self.outage.is_told
            self._is_told = self.outage.is_told = True
            return not was_told
        if told in self._reasons:
            return False
        self._reasons.add(told)
        self.outage.refused[told] += 1
        return self.outage.refused[told] == 1

    def _end_refusal(self) -> None:
        self.outage.refused -= Counter(self._reasons)  # and none is left of those that are 0
        self._reasons.clear()

    def _told(self, error: grpc.RpcError) -> str:
        details = shown(error.details() or "") or error.code().name
        if name_of(error):
            return f"the coordinator at {self.address} cannot do it now: {details}"
        why = "connection refused" if "Connection refused" in details else details
        return f"no coordinator answers at {self.address}: {why}"
