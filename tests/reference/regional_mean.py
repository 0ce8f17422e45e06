"""The mean of a round in regions, in plain numpy: each region sends one float64 sum."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def region_sum(values: Sequence[Array], weights: Sequence[float]) -> Array:
    """What a region sends: the sum of rows times values of its clients, in their order."""
    total = values[0].astype(np.float64) * float(weights[0])
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value.astype(np.float64) * float(weight)
    return total


def mean_of_regions(sums: Sequence[Array], weights: Sequence[float]) -> Array:
    """What the coordinator makes of the sums, which stand in order of region; not rounded yet."""
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return np.asarray(total / float(sum(weights)))


def regional_state(
    regions: Mapping[str, Sequence[int]], updates: Mapping[int, tuple[float, dict[str, Tensor]]]
) -> dict[str, Tensor]:
    """The next state of a federation, of rows and states by client."""
    here = [[c for c in sorted(regions[region]) if c in updates] for region in sorted(regions)]
    largest = max(sorted(updates), key=lambda client: (updates[client][0], -client))
    state = {}
    for name, kept in updates[largest][1].items():
        if not kept.is_floating_point():
            state[name] = kept
            continue
        values = {client: each[1][name].double().numpy() for client, each in updates.items()}
        sums = [
            region_sum([values[c] for c in clients], [updates[c][0] for c in clients])
            for clients in here
            if clients
        ]
        weights = [weight for weight, _ in updates.values()]
        state[name] = torch.from_numpy(np.asarray(mean_of_regions(sums, weights)))
    return state
