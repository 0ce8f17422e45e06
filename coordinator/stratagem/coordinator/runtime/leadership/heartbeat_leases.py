"""Leases of the workers: renewed by heartbeats, expired by one timer, never journaled.

Only the loss that an expired lease leads to is a fact. When a coordinator takes over, every worker
that the journal calls alive gets a full ttl: nothing expires while no coordinator leads, nor while
this process is frozen, because the leader's clock leaves that time out.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime.leadership.heartbeat_pace import HeartbeatPace, PaceRule


class _Lease(NamedTuple):
    """When the last beat came, in leader time, and how long a silence the lease outlives."""

    beat_s: float
    ttl_s: float

    @property
    def end_s(self) -> float:
        return self.beat_s + self.ttl_s


class Leases:
    def __init__(
        self,
        rule: PaceRule,
        clock: Callable[[], float],
        lose: Callable[[Member, str, float], Awaitable[object]],
        on_drop: Callable[[Member], None] = lambda _member: None,
    ) -> None:
        """Set up without leases; clock: leader time; lose: called with each member whose lease has
        expired, the reason and the seconds since its last beat; on_drop: with each that holds one
        no longer, for whatever reason."""
        self.rule = rule
        self._clock = clock
        self._lose = lose
        self._on_drop = on_drop
        self._leases: dict[Member, _Lease] = {}
        self._planned_s = -math.inf
        """Leader time at which leases are looked at next."""
        self._sooner = asyncio.Event()
        self._is_deaf = False

    @property
    def pace(self) -> HeartbeatPace:
        """Return how often workers are to beat now, and how long their leases are."""
        return self.rule.of(len(self._leases))

    def grant(self, members: Iterable[Member], ttl_s: float) -> None:
        """Give each of these members a lease from now."""
        for member in members:
            self._set(member, ttl_s)

    def suspend(self) -> None:
        """Stop expiring leases: no heartbeat can arrive from now on."""
        self._is_deaf = True

    def resume(self) -> None:
        """Expire leases again, with a full ttl for each from now."""
        self._is_deaf = False
        for member, lease in list(self._leases.items()):
            self._set(member, lease.ttl_s)
        self._sooner.set()

    def renew(self, member: Member, ttl_s: float) -> bool:
        """Renew a member's lease. Return False when the member holds none (any more)."""
        if member not in self._leases:
            return False
        self._set(member, ttl_s)
        return True

    def drop(self, member: Member) -> None:
        """End the lease of a member that is lost or was replaced; its later beats are ignored."""
        self._leases.pop(member, None)
        self._on_drop(member)

    def silent_s(self, member: Member) -> float | None:
        """Return the seconds since the member's last beat; None without a lease."""
        lease = self._leases.get(member)
        return None if lease is None else self._clock() - lease.beat_s

    def longest_silence_s(self) -> float:
        """Return the seconds since the last beat of the member silent for longest; 0 without
        members."""
        now_s = self._clock()
        return now_s - min((lease.beat_s for lease in self._leases.values()), default=now_s)

    async def expire(self) -> None:
        """Watch for leases that run out, until cancelled."""
        while True:
            expired = self._expired()
            for member, _ in expired:
                self.drop(member)
            # Losses that are decided together share one transaction.
            now_s = self._clock()
            losses = (
                self._lose(member, f"no heartbeat for {lease.ttl_s:g} s", now_s - lease.beat_s)
                for member, lease in expired
            )
            await asyncio.gather(*losses)
            await self._until_next()

    def _expired(self) -> list[tuple[Member, _Lease]]:
        now, leases = self._clock(), {} if self._is_deaf else self._leases
        return [(member, lease) for member, lease in leases.items() if lease.end_s <= now]

    def _set(self, member: Member, ttl_s: float) -> None:
        lease = self._leases[member] = _Lease(self._clock(), ttl_s)
        if lease.end_s < self._planned_s:
            self._sooner.set()

    async def _until_next(self) -> None:
        """Wait until the first lease ends, or one is given that ends sooner: thousands that
        register, or beat, wake nobody."""
        self._sooner.clear()
        ends = () if self._is_deaf else self._leases.values()
        self._planned_s = min((lease.end_s for lease in ends), default=math.inf)
        wait_s = max(0.01, self._planned_s - self._clock())
        try:
            async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                await self._sooner.wait()
        except TimeoutError:
            return
