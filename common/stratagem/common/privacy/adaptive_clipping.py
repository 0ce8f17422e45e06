"""Adaptive clipping: the norm to which updates are clipped follows a quantile of their norms.

Each client reports with its update whether its norm was within the clipping norm C. With the noised
share b of clients within it, the next C is C · exp(-rate · (b - quantile)). The share costs privacy
too: with noise z_Δ on the sum of the updates and σ_b on the sum of the answers, both together cost
what one sum with noise z costs, where z^-2 = z_Δ^-2 + (2 σ_b)^-2. Source: Andrew et al. 2021,
https://arxiv.org/abs/1905.03871, Algorithm 1 and Theorem 1.
"""

import math
from typing import Final

ANSWERS_PER_NOISE: Final = 20
"""The ratio of the expected number of clients to the noise on the sum of their yes/no answers, as
the paper recommends."""


def answer_noise(num_expected: float) -> float:
    """Return the standard deviation σ_b of the noise on the sum of the clients' answers whether
    their norm was within the clipping norm."""
    return num_expected / ANSWERS_PER_NOISE


def sum_noise_multiplier(noise_multiplier: float, num_expected: float) -> float | None:
    """Return z_Δ, the noise multiplier for the sum of the updates, which is larger than z; None if
    the noised answers alone cost as much privacy as z allows."""
    limit = 2 * answer_noise(num_expected)
    if noise_multiplier >= limit:
        return None
    return 1 / math.sqrt(1 / noise_multiplier**2 - 1 / limit**2)


def next_norm(norm: float, share_within: float, quantile: float, rate: float) -> float:
    """Return the clipping norm of the next round. share_within: the noised share of clients within
    the current norm, perhaps not in [0, 1]. The factor of one round is limited to e^±8, beyond
    which the share is only noise."""
    return norm * math.exp(max(-8.0, min(8.0, -rate * (share_within - quantile))))
