"""The noise of one private round: the draw of its clients, and the noise on what they send.

    sum     = Σ clip(Δ_k) + N(0, sum_noise²), rounded to a grid      (for each element)
    mean    = sum / expected number of clients
    answers = Σ b_k + N(0, answer_noise²), over that number          (who was within the norm)

All noise is derived from the secret, the name of the round and that of the tensor. The name is
that of the round's folder in the spool, which no other round has: neither one of another run of
the same id, nor the same round after the run has gone back to an earlier commit.
"""

import json
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from stratagem.common.privacy.noise import (
    Floats,
    derived_key,
    rounded_to_grid,
    standard_normal,
    uniform,
)
from stratagem.common.tensors.manifest import Manifest, dtype_named

FROZEN_KEY: Final = "frozen"
"""Metadata of a state: the names of its frozen parameters, as JSON, in a private run."""


def drawn_clients(
    secret: bytes, round_name: str, candidates: Sequence[int], rate: float
) -> tuple[int, ...]:
    """Return the clients of a round, each drawn by itself with this probability."""
    key = derived_key(secret, ["draw", round_name])
    return tuple(c for c in candidates if rate == 1.0 or uniform(key, c, 1)[0] < rate)


def noised_share(
    secret: bytes, round_name: str, num_within: int, answer_noise: float, num_expected: float
) -> float:
    """Return the noised share of the clients that were within the clipping norm."""
    key = derived_key(secret, ["answers", round_name])
    noise = answer_noise * float(standard_normal(key, 0, 1)[0])
    return float(rounded_to_grid(np.array([num_within + noise]), answer_noise)[0]) / num_expected


class TensorNoise:
    """The noise of a round on the elements of a model, found by their place in its data.

    Frozen parameters have none: no client changes them, whatever its rows are.
    """

    def __init__(self, secret: bytes, round_name: str, manifest: Manifest) -> None:
        self._secret, self._round_name = secret, round_name
        self._specs = [spec for spec in manifest.stored() if spec.size_bytes]
        self._frozen = frozenset(json.loads(manifest.metadata.get(FROZEN_KEY, "[]")))
        self._ends = np.array([spec.offset + spec.size_bytes for spec in self._specs])

    def read(self, dtype: str, offset: int, num: int) -> Floats:
        """Return standard normal noise for elements of neighbouring tensors of one type, from a
        byte of the data on; NaN for those of frozen parameters."""
        item_bytes = dtype_named(dtype).item_bytes
        noise = np.empty(num)
        index, done = int(np.searchsorted(self._ends, offset, side="right")), 0
        while done < num:
            spec = self._specs[index]
            first = 0 if done else (offset - spec.offset) // item_bytes
            here = min(num - done, spec.size_bytes // item_bytes - first)
            if spec.name in self._frozen:
                noise[done : done + here] = math.nan
            else:
                key = derived_key(self._secret, ["sum", self._round_name, spec.name])
                noise[done : done + here] = standard_normal(key, first, here)
            done, index = done + here, index + 1
        return noise
