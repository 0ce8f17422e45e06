"""What travels beside the gradients of a synchronous step and is added up with them, shard by
shard: changes of the buffers, what the step logs, what on_step has said, and a checksum.

Only this module knows their order there.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.engine.step.logged_sums import NUM_EXTRAS, LoggedSums, packed, unpacked
from stratagem.worker.engine.step.model_buffers import Buffers
from stratagem.worker.engine.step.step_answer import AnswerExtras, StepAnswer
from stratagem.worker.engine.trainers.replica_check import ReplicaCheck
from stratagem.worker.engine.trainers.trainer_state import State
from stratagem.worker.phases import PhaseTraining


class StepExtras:
    """One member's extras of each step. Used by one thread."""

    def __init__(
        self,
        buffers: Buffers,
        callbacks: Callbacks,
        phases: PhaseTraining | None,
        *,
        may_log: bool,
    ) -> None:
        self._buffers, self._may_log = buffers, may_log
        self._first_logged = buffers.num_elements
        self._end_logged = self._first_logged + (NUM_EXTRAS if may_log else 0)
        self._answers = AnswerExtras(callbacks, self._end_logged)
        self._replicas = ReplicaCheck(phases)
        self.num_elements = self._end_logged + self._answers.num_extras + self._replicas.num_extras

    def begin_step(self, state: Callable[[], State]) -> None:
        """Begins an exact step in this state."""
        self._replicas.begin_step(state)

    def of_shard(self, shard: int, num_live: int, logged: LoggedSums, answer: StepAnswer) -> Tensor:
        """Returns the extras of a shard after its passes; 1-d float64."""
        extras = self._buffers.contribution(shard, num_live)
        if self._may_log:
            extras = torch.cat([extras, packed(logged)])
        extras = self._answers.appended(extras, shard, answer)
        return self._replicas.with_checksum(extras)

    def compare(self, total: Tensor, num_live: int, step: int) -> None:
        """Raises unless all members began the step with the same state, where that is checked."""
        self._replicas.compare(total, num_live, step)

    def logged(self, total: Tensor, own: LoggedSums | None) -> LoggedSums:
        """Returns what all shards have logged. own: what one of this member's has, if it has any;
        raises UserCodeError unless all have the same names."""
        if not self._may_log:
            return {}
        names = None if own is None else tuple(own)
        return unpacked(total[self._first_logged : self._end_logged], names)

    def answered(self, total: Tensor) -> dict[str, float]:
        """Returns what on_step has logged of the step before."""
        return self._answers.taken(total)
