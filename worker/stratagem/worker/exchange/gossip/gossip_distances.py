"""The distances between gossiping nodes, as mixing measures them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Distances:
    """Squared norms that a round of mixing measured of one node i; x before the round.

    Under a codec x_j is the public copy of node j.
    """

    moved: float = 0.0
    """‖x_i' - x_i‖², how far mixing moved it."""
    apart: float = 0.0
    """Σ_j w_ij ‖x_i - x_j‖², how far it was from its neighbours."""


def neighbour_distance(distances: Sequence[Distances]) -> float:
    """Returns the nodes' root mean square distance to their neighbours before a round of mixing.

    sqrt(Σ_i Σ_j w_ij ‖x_i - x_j‖² / 2n) over n nodes i. Over all N nodes the sum is 2 xᵀ(I - W)x,
    so with the eigenvalues 1 > λ₂ ≥ … ≥ λ_N of the mixing matrix it is between sqrt(1 - λ₂) and
    sqrt(1 - λ_N) times their distance to the mean; of a complete graph it is that distance.
    """
    return math.sqrt(math.fsum(distance.apart for distance in distances) / (2 * len(distances)))
