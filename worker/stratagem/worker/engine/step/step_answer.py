"""What the user's on_step has said of a step: it travels with the sums of the next step.

Only the member that owns the first shard calls on_step. All others learn with the next step what it
has logged, so that it is not lost with that member.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.engine.step.logged_sums import NUM_EXTRAS, means, packed, unpacked
from stratagem.worker.exchange.buckets.step_scalars import END

_ONCE: Final = 1.0


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What on_step has said of the latest step."""

    logged: Mapping[str, float] = field(default_factory=dict)
    wants_end: bool = False


NO_ANSWER: Final = StepAnswer()


def wish_of(answer: StepAnswer, *, stop: bool) -> float:
    """Returns what a member adds to the sum of all wishes to stop: after this step, or before it as
    on_step has asked."""
    return float(stop) + (END if answer.wants_end else 0.0)


class AnswerExtras:
    """The part of a step's extras in which what was logged of the step before reaches all members;
    it has no places where there is no on_step."""

    def __init__(self, callbacks: Callbacks, first: int) -> None:
        """first: its first place among the extras."""
        self.num_extras = NUM_EXTRAS if callbacks.sees_steps else 0
        self._first = first

    def appended(self, extras: Tensor, shard: int, answer: StepAnswer) -> Tensor:
        """Returns the extras of a shard with what was logged; the first shard alone has it."""
        if not self.num_extras:
            return extras
        if shard or not answer.logged:
            nothing = torch.zeros(self.num_extras, dtype=torch.float64)
            return torch.cat([extras, nothing])
        logged = {name: (value, _ONCE) for name, value in answer.logged.items()}
        return torch.cat([extras, packed(logged)])

    def taken(self, total: Tensor) -> dict[str, float]:
        """Returns what was logged, of the sums of all extras."""
        if not self.num_extras:
            return {}
        return means(unpacked(total[self._first : self._first + self.num_extras]))
