"""What the change of each client counts under FedNova (Wang et al., 2020, arXiv:2007.07481).

A client that takes more steps goes further, and pulls the mean toward its own optimum. So each
change is divided by how far its steps have gone under a gradient of one, ‖a‖₁, and their mean by
rows goes as far as the clients do on average:

    x <- x + (Σ p_k ‖a_k‖₁) · Σ p_k (x_k - x) / ‖a_k‖₁       p_k = n_k / Σ n

With the momentum ρ of SGD, τ steps make ‖a‖₁ = (τ - ρ(1 - ρ^τ)/(1 - ρ)) / (1 - ρ); with the term
of FedProx and α = lr · μ below 1 it is (1 - (1 - α)^τ) / α; else τ.
"""

from collections.abc import Sequence
from math import fsum


def nova_factors(rows: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Return what each change counts. lengths: ‖a‖₁ of each client; one that took no step says
    nothing of where to go, and is left out."""
    counted = [num if length else 0.0 for num, length in zip(rows, lengths, strict=True)]
    num_rows = fsum(counted)
    if not num_rows:
        return [0.0] * len(rows)
    shares = [each / num_rows for each in counted]
    mean = fsum(share * length for share, length in zip(shares, lengths, strict=True))
    pairs = zip(shares, lengths, strict=True)
    return [share * (mean / length) if length else 0.0 for share, length in pairs]


def length_of_steps(num_steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """Return ‖a‖₁; pull: lr · μ of FedProx, which has no momentum."""
    if momentum:
        kept = momentum * (1.0 - _power(momentum, num_steps)) / (1.0 - momentum)
        return (num_steps - kept) / (1.0 - momentum)
    if pull:
        return (1.0 - _power(1.0 - pull, num_steps)) / pull
    return float(num_steps)


def _power(base: float, exponent: int) -> float:
    """Return a power by products alone, which have the same bits on every machine."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result
