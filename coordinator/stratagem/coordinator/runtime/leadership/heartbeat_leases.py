"""Leases of the workers: renewed by heartbeats, expired by one timer, never journaled.

Only the loss that an expired lease leads to is a fact. When a coordinator takes over, every worker
that the journal calls alive gets a full ttl: nothing expires while no coordinator leads, nor while
this process is frozen, because the leader's clock leaves that time out.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from stratagem.coordinator.core.facts import Member


class Leases:
    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float],
        lose: Callable[[Member, str], Awaitable[object]],
    ) -> None:
        """Set up without leases; clock: leader time; lose: called with each member whose lease has
        expired."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._lose = lose
        self._beats: dict[Member, float] = {}
        self._granted = asyncio.Event()
        self._is_deaf = False

    def grant(self, members: Iterable[Member]) -> None:
        """Give each of these members a full ttl from now."""
        now = self._clock()
        for member in members:
            self._beats[member] = now
        self._granted.set()

    def suspend(self) -> None:
        """Stop expiring leases: no heartbeat can arrive from now on."""
        self._is_deaf = True

    def resume(self) -> None:
        """Expire leases again, with a full ttl for each from now."""
        self._is_deaf = False
        self.grant(list(self._beats))

    def renew(self, member: Member) -> bool:
        """Renew a member's lease. Return False when the member holds none (any more)."""
        if member not in self._beats:
            return False
        self._beats[member] = self._clock()
        return True

    def drop(self, member: Member) -> None:
        """End the lease of a member that is lost or was replaced; its later beats are ignored."""
        self._beats.pop(member, None)

    def silent_s(self, member: Member) -> float | None:
        """Return the seconds since the member's last beat; None without a lease."""
        beat = self._beats.get(member)
        return None if beat is None else self._clock() - beat

    def longest_silence_s(self) -> float:
        """Return the seconds since the last beat of the member silent for longest; 0 without
        members."""
        return self._clock() - min(self._beats.values()) if self._beats else 0.0

    async def expire(self) -> None:
        """Watch for leases that run out, until cancelled."""
        while True:
            for member in self._expired():
                self.drop(member)
                await self._lose(member, f"no heartbeat for {self._ttl_s:g} s")
            await self._until_next()

    def _expired(self) -> list[Member]:
        now, beats = self._clock(), {} if self._is_deaf else self._beats
        return [member for member, beat in beats.items() if now - beat >= self._ttl_s]

    async def _until_next(self) -> None:
        self._granted.clear()
        if self._is_deaf or not self._beats:
            await self._granted.wait()
            return
        # What is granted meanwhile ends later, so thousands that register wake nobody.
        first_end = min(self._beats.values()) + self._ttl_s
        await asyncio.sleep(max(0.01, first_end - self._clock()))
