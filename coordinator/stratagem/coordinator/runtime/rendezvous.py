"""The rendezvous barrier: answers all members of a (run, party, membership) once each has called.

It lives on the event loop and in memory: after a restart of the coordinator the members simply call
again. The members of a membership are read from the state each time.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from stratagem.common.base.errors import StaleError, UnavailableError
from stratagem.common.base.ids import Party, RunId
from stratagem.v1.coordinator_pb2 import HeldSlices


@dataclass(frozen=True, slots=True)
class Arrival:
    """The data that a member brings to the barrier; applied_step is None if it holds no state.

    slices: the description of its slices of a divided state, for the other members.
    """

    endpoint: bytes
    applied_step: int | None
    address: str
    slices: HeldSlices | None = None


@dataclass(slots=True)
class _Barrier:
    size: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    done: "asyncio.Future[tuple[Arrival, ...]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


Key = tuple[RunId, Party, int]


class Barriers:
    def __init__(self, current: Callable[[RunId, Party], tuple[int, int] | None]) -> None:
        """Begin without barriers. current: returns (membership, number of members) of a party, or
        None if there is no such party."""
        self._current = current
        self._open: dict[Key, _Barrier] = {}

    async def join(
        self, run_id: RunId, party: Party, membership: int, rank: int, arrival: Arrival
    ) -> tuple[Arrival, ...]:
        """Wait for all members, and return their arrivals in order of rank.

        A member that calls again (because the answer was lost) replaces its first arrival. Raises
        StaleError if the membership is not the current one, now or later.
        """
        barrier = self._barrier((run_id, party, membership), rank)
        barrier.arrivals[rank] = arrival
        if len(barrier.arrivals) == barrier.size and not barrier.done.done():
            barrier.done.set_result(tuple(barrier.arrivals[r] for r in range(barrier.size)))
        return await asyncio.shield(barrier.done)

    def missing(self, run_id: RunId, party: Party, membership: int) -> tuple[int, ...]:
        """Return the ranks that have not arrived yet; () if there is no open barrier."""
        barrier = self._open.get((run_id, party, membership))
        if barrier is None or barrier.done.done():
            return ()
        return tuple(r for r in range(barrier.size) if r not in barrier.arrivals)

    def drop_stale(self) -> None:
        """Fail all barriers of memberships that are no longer current."""
        for key in [k for k in self._open if not self._is_current(k)]:
            barrier = self._open.pop(key)
            if not barrier.done.done():
                barrier.done.set_exception(_stale(key))
                # Consumed here, in case no member waits any more.
                barrier.done.exception()

    def close(self) -> None:
        """Fail all barriers, because this coordinator no longer leads."""
        for barrier in self._open.values():
            if not barrier.done.done():
                barrier.done.set_exception(UnavailableError("the coordinator is shutting down"))
                barrier.done.exception()
        self._open.clear()

    def _barrier(self, key: Key, rank: int) -> _Barrier:
        current = self._current(key[0], key[1])
        if current is None or current[0] != key[2] or rank >= current[1]:
            raise _stale(key)
        barrier = self._open.get(key)
        # A member that comes back to a finished barrier opens a new one: the others follow.
        if barrier is None or (barrier.done.done() and rank in barrier.arrivals):
            barrier = self._open[key] = _Barrier(current[1])
        return barrier

    def _is_current(self, key: Key) -> bool:
        current = self._current(key[0], key[1])
        return current is not None and current[0] == key[2]


def _stale(key: Key) -> StaleError:
    run_id, party, membership = key
    where = f"run {run_id!r}" + (f", party {party!r}" if party else "")
    return StaleError(f"{where}: membership {membership} is not the current one")
