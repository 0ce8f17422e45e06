"""The check that all replicas hold the same state after steps that each made for itself.

Predicted steps exchange nothing. The first exact step after them carries a checksum of each
member's state in one extra, added up over shards like all extras.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.engine.step.state_format import checksum
from stratagem.worker.phases import PhaseTraining

ReplicaState = tuple[Mapping[str, Tensor], Mapping[str, str]]


class ReplicaCheck:
    """One member's side of the comparison; nothing at all without phases."""

    def __init__(self, phases: PhaseTraining | None) -> None:
        self._phases = phases
        self.num_extras = int(phases is not None)
        """Places at the end of the extras."""
        self._checksum = 0

    def begin_step(self, state: Callable[[], ReplicaState]) -> None:
        """Takes the checksum of the state in which an exact step begins, if a check is due."""
        is_due = self._phases is not None and self._phases.is_check_due
        self._checksum = checksum(*state()) if is_due else 0

    def with_checksum(self, extras: Tensor) -> Tensor:
        """Returns the extras of a shard with this member's checksum appended."""
        if self._phases is None:
            return extras
        return torch.cat([extras, torch.tensor([float(self._checksum)], dtype=torch.float64)])

    def compare(self, extras: Tensor, num_live: int, step: int) -> None:
        """Raises unless all members began the step with the same state: where not all are equal
        some member differs from the mean. Sums are exact: 32 bits each, as float64, last of the
        summed extras."""
        if self._phases is None or extras[-1].item() == float(self._checksum) * num_live:
            return
        message = (
            f"the replicas differ before step {step}, after predicted steps: the members' "
            "checksums of parameters, optimizer and predictor are unequal"
        )
        raise UserCodeError("ReplicasDiffer", message, activity=f"training step {step}")
