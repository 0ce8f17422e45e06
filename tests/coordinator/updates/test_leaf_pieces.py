"""Leaves of a divided state are made of pieces of its parts, and shared out evenly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from stratagem.common.tensors.leaves import ByteReader, leaves_of, pieces_of
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Manifest, Purpose
from stratagem.common.tensors.same_bytes import SliceName
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.coordinator.updates.merge import PartPiece, pieced_leaves, shared_out, whole_of

MODEL = {"model/a": torch.randn(400_001), "model/b": torch.randn(7), "model/n": torch.tensor(3)}
WHOLE = {
    **MODEL,
    "optimizer/a/exp_avg": torch.randn(400_001),
    "optimizer/b/exp_avg": torch.randn(7),
}


def sliced_parts(*cuts: int) -> list[dict[str, Tensor]]:
    """The state of members that own what lies between the cuts of `a`; `b` is the last one's."""
    ends = [0, *cuts, 400_001]
    parts: list[dict[str, Tensor]] = []
    for first, stop in pairwise(ends):
        name = str(SliceName(0, 0, first, "optimizer/a/exp_avg"))
        parts.append({name: WHOLE["optimizer/a/exp_avg"][first:stop].clone()})
    parts[-1][str(SliceName(1, 0, 0, "optimizer/b/exp_avg"))] = WHOLE["optimizer/b/exp_avg"]
    parts[0] |= MODEL
    return parts


def described(tensors: dict[str, Tensor]) -> tuple[Manifest, ByteReader]:
    manifest, buffers = manifest_of(tensors, Purpose.STATE, metadata={"step": "1"})
    return manifest, ByteReader(buffers)


DIVISIONS = {
    "alone": [WHOLE],
    "slices": sliced_parts(65_536, 131_072),
    "an empty one": sliced_parts(0, 65_536, 65_536),
    "stages": [{name: WHOLE[name] for name in sorted(WHOLE)[n::3]} for n in range(3)],
}


@pytest.mark.parametrize("division", DIVISIONS)
def test_pieces_are_the_bytes_of_the_leaves(division: str) -> None:
    parts = [described(tensors) for tensors in DIVISIONS[division]]
    whole, sources = whole_of([manifest for manifest, _ in parts], DEFAULT_LIMITS)
    ordered = {spec.name: WHOLE[spec.name] for spec in whole.tensors}
    manifest, buffers = manifest_of(ordered, Purpose.STATE, metadata={"step": "1"})
    assert manifest == whole
    leaves = leaves_of(whole)
    assert len(leaves) == 3
    for leaf, pieces in zip(leaves, pieced_leaves(whole, sources), strict=True):
        found = [b"".join(parts[n][1].views(offset, size)) for n, offset, size in pieces]
        assert b"".join(found) == b"".join(pieces_of(leaf, manifest, buffers))


def test_neighbouring_pieces_of_a_part_are_one() -> None:
    manifest, _ = described({"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(1)})
    whole, sources = whole_of([manifest], DEFAULT_LIMITS)
    assert pieced_leaves(whole, sources) == [(PartPiece(0, 0, 32),)]


def leaf(**by_part: int) -> tuple[PartPiece, ...]:
    return tuple(PartPiece(int(part[1:]), 0, size) for part, size in by_part.items())


def test_each_writes_about_as_much_and_of_that_what_it_holds() -> None:
    leaves = {n: leaf(p0=8) for n in range(4)} | {n: leaf(p1=3, p2=5) for n in range(4, 8)}
    shares = shared_out(leaves, [[0], [1], [2]])
    assert sorted(n for share in shares for n in share) == list(range(8))
    assert shares[0] == [0, 1, 2]
    assert shares[2][0] == 4
    assert {len(share) for share in shares} == {2, 3}


def test_all_is_shared_out() -> None:
    leaves = {n: leaf(p0=n + 1) for n in range(5)}
    for num_writers in (1, 2, 3, 7):
        shares = shared_out(leaves, [[n] for n in range(num_writers)])
        assert sorted(n for share in shares for n in share) == list(range(5))
    assert shared_out({}, [[0]]) == [[]]
