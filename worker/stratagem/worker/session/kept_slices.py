"""Copies of slices of a state that is being divided anew, until all members are known to have their
new ones: when the members change before that, those that are done have what the others still need.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from stratagem.v1 import coordinator_pb2

State = tuple[Mapping[str, Tensor], Mapping[str, str]]
"""Tensors and metadata."""


@dataclass(frozen=True, slots=True)
class KeptSlices:
    """What a member had of the division before. The tensors are copies that never change."""

    membership: int
    """At which the state was divided so."""
    size: int
    """Into how many slices."""
    step: int
    """After which they were copied."""
    slices: Mapping[int, State]
    """By number."""
    grad_norm: float
    is_finite: bool

    def said(self) -> coordinator_pb2.KeptSlices:
        """Return what this member says of them at a rendezvous."""
        return coordinator_pb2.KeptSlices(
            numbers=sorted(self.slices),
            size=self.size,
            membership=self.membership,
            step=self.step,
            grad_norm=self.grad_norm,
            is_finite=self.is_finite,
        )

    def given(self, numbers: Iterable[int]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return some of the slices in one state."""
        parts = [self.slices[number] for number in numbers]
        tensors = {name: tensor for found, _ in parts for name, tensor in found.items()}
        metadata = {name: text for _, texts in parts for name, text in texts.items()}
        return tensors, metadata
