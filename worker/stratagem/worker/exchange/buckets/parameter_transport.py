"""The interface of what brings the parts of a block of parameters from their owners to a member,
and that of a lone member."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from stratagem.worker.exchange.buckets.held_blocks import HeldBlocks


class ParameterTransport(Protocol):
    """Gives a member what all hold of a block, while none of them changes it: from the end of
    `updated` to the next step's sums."""

    held: HeldBlocks

    def memory(self) -> Sequence[Tensor]:
        """Returns by block the bytes in which this member has to keep its own parts."""

    def fetch(self, block: int) -> Sequence[Tensor]:
        """Returns by rank the bytes of the parts of a block; valid until the next call. Raises
        ExchangeError."""

    def end_passes(self) -> None:
        """Says that this member needs no block before the next step or evaluation, and gives others
        theirs until all say so. Raises ExchangeError."""

    def updated(self) -> None:
        """Says that the own parts are those after the step; blocks until all are. Raises
        ExchangeError."""

    def cut(self) -> None:
        """Makes what is under way raise; from any thread."""

    def close(self) -> None:
        """Frees threads and links. The memory stays with who holds it."""


class LoneParameters:
    """The parameters of a lone member, which holds all of them."""

    def __init__(self, held: HeldBlocks, device: torch.device) -> None:
        self.held = held
        self._own = own_memory(held, 0, device)

    def memory(self) -> Sequence[Tensor]:
        return self._own

    def fetch(self, block: int) -> Sequence[Tensor]:
        return [self._own[block]]

    def end_passes(self) -> None: ...

    def updated(self) -> None: ...

    def cut(self) -> None: ...

    def close(self) -> None: ...


def own_memory(held: HeldBlocks, rank: int, device: torch.device) -> list[Tensor]:
    """Returns by block new memory for what a member holds."""
    return [torch.zeros(size, dtype=torch.uint8, device=device) for size in held.sizes[rank]]
