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
from typing import TYPE_CHECKING, Final, NamedTuple

from stratagem.common.base.errors import InvalidInputError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

PACKAGE: Final = "dp-accounting"
NEEDED: Final = "needs the package dp-accounting: pip install 'stratagem[privacy]'"

MAX_NOISE_MULTIPLIER: Final = 1000.0
_STEPS_PER_UNIT: Final = 1000
"""Calibrated noise multipliers are multiples of one over this number."""
_LEAST_STEPS: Final = _STEPS_PER_UNIT // 10
"""The least noise multiplier tried, 1/10: less spends epsilons of hundreds, and takes minutes."""
_MAX_STEPS: Final = int(MAX_NOISE_MULTIPLIER * _STEPS_PER_UNIT)
_MAX_GUESSES: Final = 12
"""The number of interpolated guesses after which calibration falls back to bisection."""


def is_installed() -> bool:
    """Return whether dp-accounting is installed, without importing it, which takes a second."""
    return util.find_spec("dp_accounting") is not None


def accountant_version() -> str:
    """Return the name and version of the accounting library, for the journal."""
    return f"{PACKAGE} {metadata.version(PACKAGE)} PLD"


@lru_cache(maxsize=1024)
def epsilon_after(
    num_rounds: int, noise_multiplier: float, sampling_rate: float, delta: float
) -> float:
    """Return the epsilon spent at `delta` after this many rounds; 0 after none. May take seconds.

    noise_multiplier: the noise's standard deviation over the clipping norm. sampling_rate: the
    probability with which each client takes part in a round; 1 unless clients are drawn secretly.
    Raises ModuleNotFoundError without the library.
    """
    if num_rounds == 0:
        return 0.0
    if sampling_rate == 1.0:
        import dp_accounting  # takes a second, and is an extra

        sigma = noise_multiplier / math.sqrt(num_rounds)
        return float(dp_accounting.get_epsilon_gaussian(sigma, delta))
    composed = _of_one_round(noise_multiplier, sampling_rate).self_compose(num_rounds)
    return float(composed.get_epsilon_for_delta(delta))


def calibrated_noise(epsilon: float, delta: float, num_rounds: int, sampling_rate: float) -> float:
    """Return the smallest noise multiplier, in steps of 1/1000, with which this many rounds spend
    at most epsilon. May take tens of seconds. Raises InvalidInputError if the largest one, 1000,
    spends more."""

    def excess(steps: int) -> float:
        """Return log(spent / epsilon), which is at most 0 if the noise suffices."""
        noise = steps / _STEPS_PER_UNIT
        spent = epsilon_after(num_rounds, noise, sampling_rate, delta)
        return math.log(spent / epsilon) if spent else -math.inf

    low, high = _LEAST_STEPS, _STEPS_PER_UNIT
    latest = _Tried(high, excess(high))
    before = latest
    while latest.excess > 0:
        if high == _MAX_STEPS:
            text = (
                f"{epsilon:g} is out of reach: {num_rounds} rounds at a sampling rate of "
                f"{sampling_rate:g} spend more even with a noise multiplier of 1000"
            )
            raise InvalidInputError.at("privacy.target.epsilon", text)
        low, high = high, min(2 * high, _MAX_STEPS)
        before, latest = latest, _Tried(high, excess(high))
    num_guesses = 0
    while high - low > 1:
        num_guesses += 1
        middle = (low + high) // 2
        guess = _crossing(before, latest) if num_guesses <= _MAX_GUESSES else None
        steps = middle if guess is None else min(max(guess, low + 1), high - 1)
        before, latest = latest, _Tried(steps, excess(steps))
        low, high = (low, steps) if latest.excess <= 0 else (steps, high)
    return high / _STEPS_PER_UNIT


class _Tried(NamedTuple):
    """A noise multiplier that was tried, in steps, with log(spent epsilon / allowed epsilon)."""

    steps: int
    excess: float


def _crossing(before: _Tried, latest: _Tried) -> int | None:
    """Extrapolate two tried noise multipliers, in log scale, to the one that spends the allowed
    epsilon. None if no falling line through them crosses it nearby."""
    if not (math.isfinite(before.excess) and math.isfinite(latest.excess)):
        return None
    slope = -1.0
    if before.steps != latest.steps:
        slope = (latest.excess - before.excess) / math.log(latest.steps / before.steps)
    if slope >= 0 or abs(latest.excess / slope) > math.log(2):
        return None  # the line does not cross 0, or far away
    return math.ceil(latest.steps * math.exp(-latest.excess / slope))


@lru_cache(maxsize=16)
def _of_one_round(noise_multiplier: float, sampling_rate: float) -> "PrivacyLossDistribution":
    """Return the privacy loss distribution of one round, which takes longer than composing."""
    from dp_accounting.pld import privacy_loss_distribution  # takes a second, and is an extra

    logging.getLogger("absl").setLevel(logging.ERROR)  # it would warn of skipped orders
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_rate
    )
