"""The fact of differential privacy: what a federated round will cost, and how it is noised."""

from stratagem.common.base.ids import Party
from stratagem.coordinator.core.facts.fact_values import Value


class RoundAccounted(Value):
    """The clients of a round are drawn, and what it will have cost is computed; it is not open."""

    party: Party
    round_num: int
    drawn: tuple[int, ...]
    """The clients, in order; perhaps none."""
    sampling_rate: float
    """The probability with which each client was drawn, as the accountant counts on it."""
    num_expected: float
    """The number of clients that the noised sum is divided by, whoever takes part."""
    clip_norm: float
    noise_multiplier: float
    """z, of which epsilon follows."""
    sum_noise: float
    """Standard deviation of the noise on the sum of the changes."""
    answer_noise: float
    """Standard deviation of the noise on the number of clients within the norm; 0: not asked."""
    epsilon: float
    """What all rounds will have spent with this one."""
    delta: float
    accountant: str
    """Name and version of what has computed epsilon."""
    fingerprint: str
    """Fingerprint of the secret that the noise comes from."""
