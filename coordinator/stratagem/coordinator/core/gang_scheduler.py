"""Gang scheduling: a segment gets the compute slots of all its workers at once, or waits.

Requests are served in the order they came. A request that must wait reserves what it needs, so
that later ones cannot starve it; nothing holds a slot while it waits for another, so no two runs
can wait for each other in a ring.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Slot = TypeVar("Slot", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Request(Generic[Key, Slot]):
    key: Key
    slots: frozenset[Slot]


def grant(
    waiting: Sequence[Request[Key, Slot]], taken: Iterable[Slot]
) -> tuple[Request[Key, Slot], ...]:
    """Return the requests that can start now, given the slots that are taken."""
    blocked = set(taken)
    granted = []
    for request in waiting:
        if not request.slots & blocked:
            granted.append(request)
        blocked |= request.slots
    return tuple(granted)
