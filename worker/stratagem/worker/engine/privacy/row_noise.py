"""What is drawn at random in one protected round of a client: the rows of each step, and its noise.

Both are functions of a secret that lies where the rows lie and of all that the round is computed
from, so a round that is done again has the rows and the noise that it had, while noise is never
used for another sum, of which the difference could be taken:

    round  = name of the round, base state, job, client, number of rows        (in the key of both)
    draw   = HKDF(secret, round, step)                        row i takes part if uniform(i) < rate
    noise  = HKDF(secret, round, step, rows read so far, tensor)

The name of a round holds the run, its submission and how often it went back; it does not hold how
often the round was begun. The rows as they were read, hashed over the steps of the round, stand
for themselves and for the parameters, which follow from the base and them: if the site's data
change between two attempts, the second one has other noise.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from stratagem.common.privacy.noise import Floats, derived_key, standard_normal, uniform


@dataclass(frozen=True, slots=True)
class RowNoise:
    """The draws and the noise of one round of one client."""

    secret: bytes
    names: tuple[str, ...]
    """All that the round is computed from, besides the rows themselves."""
    is_seeded: bool = False
    """Everybody can compute it, so the rows need not be hashed."""
    digest: str = ""
    """SHA-256 of the rows of the steps so far."""

    @property
    def digest_of_names(self) -> str:
        """What tells this round from every other one, in an audit."""
        return hashlib.sha256(derived_key(self.secret, ["name", *self.names])).hexdigest()[:32]

    def drawn(self, step: int, num_rows: int, rate: float) -> Tensor:
        """Return the rows of a step (from 0), in order, each drawn by itself; perhaps none."""
        if rate >= 1.0:
            return torch.arange(num_rows)
        key = derived_key(self.secret, ["draw", *self.names, str(num_rows), str(step)])
        return torch.from_numpy(np.flatnonzero(uniform(key, 0, num_rows) < rate))

    def after(self, rows: Iterable[Tensor]) -> Self:
        """Return the noise of the step that has read these tensors of rows."""
        if self.is_seeded:
            return self
        digest = hashlib.sha256(self.digest.encode())
        for tensor in rows:
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{plain.dtype} {tuple(plain.shape)}\n".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return replace(self, digest=digest.hexdigest())

    def of_tensor(self, step: int, name: str, num: int) -> Floats:
        """Return the standard normal noise of a step on the elements of a tensor."""
        key = derived_key(self.secret, ["rows", *self.names, str(step), self.digest, name])
        return standard_normal(key, 0, num)
