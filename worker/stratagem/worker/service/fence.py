"""Refuses orders of coordinators and groups that no longer exist.

Owns the highest term, and the highest membership of each party, that this process has seen.
Nothing is kept over a restart: a new incarnation holds no session that an old order could hurt.

A new term counts once the coordinator has said it in answer to this worker's own call. Else one
call with a high number, from any caller, would make the worker deaf to its coordinator.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from stratagem.common.base.errors import StaleError, UnavailableError
from stratagem.v1 import types_pb2

# Parties of closed runs are remembered too, so that late orders stay harmless; the oldest go.
MAX_PARTIES: Final = 16_384

ASK_TIMEOUT_S: Final = 0.9
"""A call with a new term is answered within twice this."""


class FenceGuard:
    """The highest term and memberships seen, and checks of calls. Lives on the event loop."""

    def __init__(self) -> None:
        self._term = 0
        self._said = asyncio.Event()
        self._ask: Callable[[], None] = lambda: None
        self._memberships: OrderedDict[tuple[str, str], int] = OrderedDict()

    @property
    def term(self) -> int:
        return self._term

    def ask_with(self, ask: Callable[[], None]) -> None:
        """Set the function that has the coordinator say its term soon, which goes to see_term."""
        self._ask = ask

    def see_term(self, term: int) -> None:
        """Take in the term that the coordinator has said."""
        self._term = max(self._term, term)
        self._said.set()
        self._said = asyncio.Event()

    async def check_term(self, term: int) -> None:
        """Raise StaleError for a term older than the coordinator's, UnavailableError for one that
        it does not confirm."""
        for _ in range(2):  # the first answer may have been on its way before the question
            if term > self._term:
                await self._wait_for_answer()
        if term > self._term:
            raise UnavailableError(
                f"fence.term: {term}, but the coordinator's is {self._term} as far as it has said"
            )
        if term < self._term:
            raise StaleError(f"term {term} is older than {self._term}: another coordinator leads")

    async def check(
        self, fence: types_pb2.Fence, run_id: str, party: str, *, is_order: bool = True
    ) -> None:
        """Raise StaleError for what is older than what was seen. An order's fence is remembered."""
        await self.check_term(fence.term)
        key = (run_id, party)
        seen = self._memberships.get(key, 0)
        if fence.membership < seen:
            where = f"{run_id}/{party}".rstrip("/")
            raise StaleError(f"membership {fence.membership} of {where} is older than {seen}")
        if not is_order:
            return
        self._memberships[key] = fence.membership
        self._memberships.move_to_end(key)
        if len(self._memberships) > MAX_PARTIES:
            self._memberships.popitem(last=False)

    async def _wait_for_answer(self) -> None:
        said = self._said
        self._ask()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await said.wait()
        except TimeoutError:
            return
