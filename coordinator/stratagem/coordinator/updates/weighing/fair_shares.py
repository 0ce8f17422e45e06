"""What the change of each client counts under q-FedAvg (Li et al., 2020, arXiv:1905.10497).

With L = 1 / lr, the change d = w - w_k and F, the loss of w over the client's rows, plus 1e-10, the
paper moves the state w by -Σ δ / Σ h:

    δ = F^q · L · d
    h = q · F^(q-1) · ‖L · d‖² + L · F^q

so the change of client k counts F_k^q · L / Σ h. Here above and below are divided by L and by the
q-th power of the greatest F, as no power then leaves the range of its numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from sys import float_info
from typing import Final

from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.updates.robust.changes import squared_lengths
from stratagem.coordinator.updates.robust.verdict import Verdict
from stratagem.coordinator.updates.state_reader import StateReader, averaged_names
from stratagem.coordinator.updates.update_sources import Source

LOSS_FLOOR: Final = 1e-10
_LARGEST: Final = float_info.max


@dataclass(frozen=True, slots=True)
class Fairness:
    """What makes changes count by losses in one round."""

    q: float
    lr: float
    """Learning rate of the clients; L is its inverse."""
    losses: Sequence[float]
    """Of each client before it trained, in client order; at least 0."""

    def verdict(
        self,
        sources: Sequence[Source],
        manifest: Manifest,
        base: StateReader,
        should_stop: Callable[[], None],
    ) -> Verdict:
        """Return what each change of `base` counts, and its length; each update is read once. Of
        trained parameters only: a loss has no gradient in buffers."""
        averaged = averaged_names(manifest)
        squares = squared_lengths(
            sources, manifest, base, should_stop, lambda spec: spec.name not in averaged
        ).tolist()
        shares = fair_shares(self.losses, squares, self.q, self.lr)
        return Verdict(tuple(shares), tuple(min(sqrt(each), _LARGEST) for each in squares))


def fair_shares(
    losses: Sequence[float], squared_lengths: Sequence[float], q: float, lr: float
) -> list[float]:
    """Return what each change counts; all together count at most 1.

    losses: of each client before it trained, at least 0. squared_lengths: of the changes.
    """
    raised = [loss + LOSS_FLOOR for loss in losses]
    greatest = max(raised)
    powers = [(loss / greatest) ** q for loss in raised]
    total = 0.0
    for loss, power, length in zip(raised, powers, squared_lengths, strict=True):
        slope = q * power / loss
        total += power + (slope * (length / lr) if slope else 0.0)  # 0 times infinite is no number
    return [power / total for power in powers]
