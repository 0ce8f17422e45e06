"""Refuses orders of coordinators and groups that are no longer.

Owns the highest term, and the highest membership of each party, that this process has seen.
Nothing is kept over a restart: a new incarnation holds no session that an old order could hurt.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from stratagem.common.errors import StaleError
from stratagem.v1 import types_pb2

# Parties of closed runs are remembered too, so that late orders stay harmless; the oldest go.
MAX_PARTIES: Final = 16_384


class FenceGuard:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._term = 0
        self._memberships: OrderedDict[tuple[str, str], int] = OrderedDict()

    @property
    def term(self) -> int:
        return self._term

    def see_term(self, term: int) -> None:
        self._term = max(self._term, term)

    def check_term(self, term: int) -> None:
        """Remember the term, or raise StaleError when a higher one was seen."""
        if term < self._term:
            raise StaleError(f"term {term} is older than {self._term}: another coordinator leads")
        self._term = term

    def check(self, fence: types_pb2.Fence, run_id: str, party: str) -> None:
        """Remember the fence, or raise StaleError when a higher one was seen."""
        self.check_term(fence.term)
        key = (run_id, party)
        seen = self._memberships.get(key, 0)
        if fence.membership < seen:
            where = f"{run_id}/{party}".rstrip("/")
            raise StaleError(f"membership {fence.membership} of {where} is older than {seen}")
        self._memberships[key] = fence.membership
        self._memberships.move_to_end(key)
        if len(self._memberships) > MAX_PARTIES:
            self._memberships.popitem(last=False)
