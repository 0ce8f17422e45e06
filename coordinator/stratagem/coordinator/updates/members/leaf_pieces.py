"""Says of which pieces of parts each leaf of a divided state is made, and who writes which leaf.

Knows neither runs nor workers: parts and writers are numbers.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from stratagem.common.tensors.leaves import leaves_of
from stratagem.common.tensors.manifest import Manifest, TensorSpec


class PartPiece(NamedTuple):
    """A range of the bytes of a part of a state."""

    part: int
    offset: int
    size: int


PiecedLeaf = tuple[PartPiece, ...]
"""The pieces that make a leaf, in order."""


class _Placed(NamedTuple):
    """Bytes of the whole state from `start` on, and where a part has them."""

    start: int
    piece: PartPiece


def pieced_leaves(
    whole: Manifest, sources: Mapping[str, Sequence[tuple[int, TensorSpec]]]
) -> list[PiecedLeaf]:
    """Return the leaves of a state. sources: of each tensor, in which parts its bytes are, in
    order."""
    placed: list[_Placed] = []
    for target in whole.stored():
        at = target.offset
        for part, spec in sources[target.name]:
            if spec.size_bytes:
                placed.append(_Placed(at, PartPiece(part, spec.offset, spec.size_bytes)))
                at += spec.size_bytes
    starts = [each.start for each in placed]
    found = []
    for leaf in leaves_of(whole):
        pieces: list[PartPiece] = []
        for offset, size in leaf.ranges:
            _add_range(pieces, placed, bisect_right(starts, offset) - 1, offset, size)
        found.append(tuple(pieces))
    return found


def _add_range(
    pieces: list[PartPiece], placed: Sequence[_Placed], at: int, offset: int, size: int
) -> None:
    while size:
        start, piece = placed[at]
        begin = offset - start
        taken = min(size, piece.size - begin)
        part, first = piece.part, piece.offset + begin
        last = pieces[-1] if pieces else None
        if last is not None and (last.part, last.offset + last.size) == (part, first):
            pieces[-1] = last._replace(size=last.size + taken)
        else:
            pieces.append(PartPiece(part, first, taken))
        offset, size, at = offset + taken, size - taken, at + 1


def shared_out(
    leaves: Mapping[int, PiecedLeaf], held: Sequence[Collection[int]]
) -> list[list[int]]:
    """Return by writer the numbers of the leaves that it writes: about as many bytes for each, and
    of those that it holds as many as that allows.

    held: by writer, the parts that it holds.
    """
    sizes = {number: sum(piece.size for piece in leaf) for number, leaf in leaves.items()}
    quota = sum(sizes.values()) / len(held)
    loads, shares = [0] * len(held), [list[int]() for _ in held]
    for number, leaf in leaves.items():
        by_part: dict[int, int] = {}
        for piece in leaf:
            by_part[piece.part] = by_part.get(piece.part, 0) + piece.size
        own = [sum(by_part.get(part, 0) for part in parts) for parts in held]
        places = [_place(loads[n], sizes[number], quota, own[n]) for n in range(len(held))]
        writer = places.index(min(places))
        shares[writer].append(number)
        loads[writer] += sizes[number]
    return shares


def _place(load: int, size: int, quota: float, own: int) -> tuple[bool, int, int]:
    """Order writers for a leaf, the best one first: of those that have room for most of it the one
    that holds the most, else the one with the least to write."""
    is_full = load + size / 2 > quota
    return is_full, load if is_full else -own, load
