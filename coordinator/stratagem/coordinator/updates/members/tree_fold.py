"""Adds partial gradient sums: the coordinator's half of a ParameterServer.

Adds in the same tree as the workers' mesh does, so both engines give the same bits. Works on
whatever piece of a bucket is at hand; elements are independent. Pure; imports no torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratagem.common.numerics.shards import Node, tree_sum

FloatArray = NDArray[np.floating[Any]]


def fold_chunks(members: Iterable[Mapping[Node, FloatArray]], num_live: int) -> FloatArray:
    """Return the sum over shards [0, num_live) of one range of one bucket.

    members: for each member its partial sums of that range, by node of the tree. All arrays have
    one length and dtype (float32 or float64). None is modified; the result is a new array.
    Raises ValueError when a shard is missing or held twice.
    """
    partials: dict[Node, FloatArray] = {}
    for held in members:
        for node, chunk in held.items():
            if node in partials:
                raise ValueError(f"two members hold {node}")
            partials[node] = chunk
    _check(partials, num_live)
    made: set[int] = set()  # ids of arrays of our own, which may be overwritten

    def add(left: FloatArray, right: FloatArray) -> FloatArray:
        for out in (left, right):
            if id(out) in made:
                return np.add(left, right, out=out)
        total = np.add(left, right)
        made.add(id(total))
        return total

    total = tree_sum(partials, num_live, add)
    return total if id(total) in made else total.copy()


def _check(partials: Mapping[Node, FloatArray], num_live: int) -> None:
    kinds = {(chunk.dtype, chunk.shape) for chunk in partials.values()}
    if len(kinds) > 1:
        raise ValueError(f"partial sums differ in dtype or length: {kinds}")
    num_held = sum(node.stop - node.first for node in partials)
    if num_held != num_live:
        raise ValueError(f"partial sums hold {num_held} shards, the step has {num_live}")
