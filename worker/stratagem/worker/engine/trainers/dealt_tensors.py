"""Deals out what all members of a party hold alike, so that each copies some of it for a commit.

A function of names and sizes alone: all members come to the same answer without a word.
"""

from collections.abc import Mapping

from torch import Tensor

from stratagem.worker.engine.step import state_format


def dealt_out(
    tensors: Mapping[str, Tensor], num_members: int, first_bytes: int
) -> list[frozenset[str]]:
    """Returns by member which of these tensors it copies: about as many bytes for each, the largest
    ones first. Those that are one tensor under several names stay together.

    first_bytes: what the first member copies beside.
    """
    alike: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        key = state_format.storage_key(tensor) if tensor.numel() else name
        alike.setdefault(key, []).append(name)
    groups = sorted(alike.values(), key=lambda names: -tensors[names[0]].nbytes)
    loads, shares = (
        [first_bytes] + [0] * (num_members - 1),
        [set[str]() for _ in range(num_members)],
    )
    for names in groups:
        member = loads.index(min(loads))
        loads[member] += tensors[names[0]].nbytes
        shares[member].update(names)
    return [frozenset(share) for share in shares]
