"""One client in one round of a federation."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class ClientState(StrEnum):
    """What has become of a client in a round."""

    SELECTED = "selected"
    """It was asked, and has not answered."""
    DONE = "done"
    """Its update counts, or will when the round closes."""
    LATE = "late"
    """The round was closed without it."""
    REJECTED = "rejected"
    EXCUSED = "excused"
    """It could not be asked, or has left the round; it has not failed."""


@dataclass(frozen=True, slots=True)
class ClientInRound:
    """One client in one round."""

    client: int
    state: ClientState
    worker_id: str = ""
    """Where it trains; empty while it waits for a worker."""
    loss: float = math.nan
    num_samples: int = 0
    seconds: float = math.nan
    sent_bytes: int = 0
    """With a codec; 0 without."""
    cause: str = ""
    """Of a rejected update: one of few words, such as "not_finite"."""
    reason: str = ""
    """Why it was rejected or excused, as a sentence."""
    staleness: int = 0
    """How many rounds before this one the update was trained for."""
    assigned_s: float | None = None
    """Wall time at which it was given to its worker."""
    answered_s: float | None = None
    """Wall time of its update, or of its rejection."""


def mean_loss(clients: Iterable[ClientInRound]) -> float:
    """Return the mean loss of updates, weighted by their samples; NaN of none."""
    known = [(each.num_samples, each.loss) for each in clients if each.num_samples]
    samples = sum(num for num, _ in known)
    return sum(num * loss for num, loss in known) / samples if samples else math.nan
