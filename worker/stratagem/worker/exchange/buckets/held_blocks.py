"""The places of all members' parts of the parameters, block by block of the model.

What a member holds of a block is one run of bytes, so that it travels as one message. Each part
begins on `SLOT_BYTES`. Follows from the division of the parameters and the blocks only. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.worker.exchange.buckets.bucket_layout import SLOT_BYTES
from stratagem.worker.exchange.buckets.slice_owners import OwnedPart, SliceOwners


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a parameter, and where its bytes begin among those of its owner and block."""

    part: OwnedPart
    start: int


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """What each member holds of each block."""

    parts: tuple[tuple[tuple[HeldPart, ...], ...], ...]
    """By rank and block."""
    sizes: tuple[tuple[int, ...], ...]
    """By rank and block, in bytes; multiples of SLOT_BYTES."""

    @property
    def num_blocks(self) -> int:
        return len(self.sizes[0])


def hold_blocks(
    owners: SliceOwners, blocks: Sequence[Sequence[int]], item_bytes: Sequence[int]
) -> HeldBlocks:
    """Places the parts of all members. blocks: of each the numbers of its parameters. item_bytes:
    of an element of each parameter."""
    block_of = {index: number for number, block in enumerate(blocks) for index in block}
    parts, sizes = [], []
    for own in owners.parts:
        held: list[list[HeldPart]] = [[] for _ in blocks]
        ends = [0] * len(blocks)
        for part in own:
            number = block_of[part.index]
            held[number].append(HeldPart(part, ends[number]))
            size = (part.stop - part.first) * item_bytes[part.index]
            ends[number] += -(-size // SLOT_BYTES) * SLOT_BYTES
        parts.append(tuple(map(tuple, held)))
        sizes.append(tuple(ends))
    return HeldBlocks(tuple(parts), tuple(sizes))
