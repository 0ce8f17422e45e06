"""A round of secure aggregation as the documentation says it, in numpy: quantise, add, divide.

There are no masks here: they cancel, so what the product unmasks must be this sum to the bit.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stratagem.common.strategy.secure import SecureAggregation


def secure_means(
    spec: SecureAggregation,
    world: Mapping[str, Tensor],
    states: Sequence[Mapping[str, Tensor]],
    rows: Sequence[float],
) -> dict[str, Tensor]:
    """The next state, floating tensors in float64."""
    scale = (2 ** (spec.bits - 1) - 1) / spec.clip
    weights = [1 if spec.max_rows is None else min(int(n), spec.max_rows) for n in rows]
    means = dict(world)
    for name, before in world.items():
        if not before.is_floating_point():
            continue
        total = np.zeros(before.shape, np.int64)
        for state, weight in zip(states, weights, strict=True):
            change = state[name].double().numpy() - before.double().numpy()
            total += np.rint(np.clip(change, -spec.clip, spec.clip) * scale).astype(int) * weight
        mean = total.astype(np.float64) / (scale * sum(weights))
        means[name] = before.double() + torch.from_numpy(np.asarray(mean))
    return means
