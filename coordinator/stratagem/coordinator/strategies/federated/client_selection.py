"""Selection of the clients that take part in a federated round."""

import hashlib
import math
from collections.abc import Sequence
from random import Random
from typing import assert_never

from stratagem.common.strategy import All, ByCapability, ClientSelection, num_drawn
from stratagem.common.strategy import Random as RandomSelection
from stratagem.coordinator.core.facts import ClientBinding


def select(
    selection: ClientSelection,
    roster: Sequence[ClientBinding],
    seed: int,
    round_num: int,
    num_extra: int = 0,
) -> tuple[int, ...]:
    """Return the clients of a round, ascending; drawn from the roster, whichever workers are alive.

    Random: num_extra + max(1, floor(fraction * len(roster) + 1e-9)) without replacement, seeded by
    (run seed, round), so that a restarted coordinator draws the same.
    """
    match selection:
        case All():
            return tuple(binding.client for binding in roster)
        case RandomSelection(fraction=fraction):
            share = num_drawn(fraction, len(roster))
            count = min(share + num_extra, len(roster))
            key = hashlib.sha256(f"select/{seed}/{round_num}".encode()).digest()
            drawn = Random(int.from_bytes(key[:8])).sample([b.client for b in roster], count)
            return tuple(sorted(drawn))
        case ByCapability(required_tags=required):
            return tuple(b.client for b in roster if set(required) <= set(b.tags))
        case _:
            assert_never(selection)


def quorum_of(quorum: float | int | None, num_selected: int, of_all: int = 1) -> int:
    """Return the number of updates a round needs; of_all: the number where the job names none."""
    if quorum is None:
        return of_all
    if isinstance(quorum, int):
        return min(quorum, num_selected)
    return max(1, math.ceil(quorum * num_selected - 1e-9))
