"""The privacy accountant: the epsilon that rounds of a noised sum have spent.

One round is a Poisson-sampled Gaussian mechanism: each client (or row) takes part with probability
q, independently, and the sum of what they send, each of 2-norm at most C, gets Gaussian noise of
standard deviation z·C. Neighbours differ in one client that is added or removed. Rounds are
composed as privacy loss distributions (PLD, https://arxiv.org/abs/2106.08567), computed by the
library dp-accounting; without sampling (q = 1) the composition is one Gaussian mechanism of z/√k,
for which its exact formula is used (https://arxiv.org/abs/1805.06530).
"""

import logging
import math
from functools import lru_cache
from importlib import metadata, util
from typing import TYPE_CHECKING, Final

from stratagem.common.base.errors import InvalidInputError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

PACKAGE: Final = "dp-accounting"
NEEDED: Final = "needs the package dp-accounting: pip install 'stratagem[privacy]'"

MAX_NOISE_MULTIPLIER: Final = 1000.0
_STEPS_PER_UNIT: Final = 1000
"""A calibrated noise multiplier is a multiple of 1/1000."""


def is_installed() -> bool:
    """Return whether the library can be imported, without importing it, which takes a second."""
    return util.find_spec("dp_accounting") is not None


def accountant_version() -> str:
    """Return which accountant computes epsilon, for the journal."""
    return f"{PACKAGE} {metadata.version(PACKAGE)} PLD"


@lru_cache(maxsize=1024)
def epsilon_after(
    num_rounds: int, noise_multiplier: float, sampling_rate: float, delta: float
) -> float:
    """Return epsilon at `delta` after so many rounds; 0 after none. Takes up to some seconds.

    noise_multiplier: the noise's standard deviation over the clipping norm. sampling_rate: the
    probability with which each client takes part in a round; 1 where they are not drawn secretly.
    Raises ModuleNotFoundError without the library.
    """
    if num_rounds == 0:
        return 0.0
    import dp_accounting  # takes a second, and is an extra

    if sampling_rate == 1.0:
        sigma = noise_multiplier / math.sqrt(num_rounds)
        return float(dp_accounting.get_epsilon_gaussian(sigma, delta))
    from dp_accounting import pld

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of orders that it leaves out
    accountant = pld.PLDAccountant()
    accountant.compose(_round(noise_multiplier, sampling_rate), num_rounds)
    return float(accountant.get_epsilon(delta))


def calibrated_noise(epsilon: float, delta: float, num_rounds: int, sampling_rate: float) -> float:
    """Return the least noise multiplier, in steps of 1/1000, with which so many rounds spend at
    most epsilon. Takes up to some tens of seconds.

    Raises InvalidInputError where the largest one, 1000, spends more.
    """
    low, high = 0, _STEPS_PER_UNIT

    def suffices(steps: int) -> bool:
        noise = steps / _STEPS_PER_UNIT
        return epsilon_after(num_rounds, noise, sampling_rate, delta) <= epsilon

    while not suffices(high):
        if high >= MAX_NOISE_MULTIPLIER * _STEPS_PER_UNIT:
            text = (
                f"{epsilon:g} is out of reach: {num_rounds} rounds at a sampling rate of "
                f"{sampling_rate:g} spend more even with a noise multiplier of 1000"
            )
            raise InvalidInputError.at("privacy.target.epsilon", text)
        low, high = high, high * 2
    # Noise below 1/10 spends hundreds, which takes the accountant minutes to say.
    low = max(low, _STEPS_PER_UNIT // 10)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high / _STEPS_PER_UNIT


def _round(noise_multiplier: float, sampling_rate: float) -> "DpEvent":
    import dp_accounting  # takes a second, and is an extra

    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(sampling_rate, gaussian)
