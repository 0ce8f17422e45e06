"""Adds the parameters' names to torch's error about a gradient that autograd refused.

A user's own function may return a gradient of a wrong shape; torch names the function only.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, NoReturn

from torch import Tensor, nn

from stratagem.worker.models.model_tensors import refuse_sparse_gradients

_REFUSED: Final = re.compile(r"Function (\w+) returned an invalid gradient at index (\d+)")


def raise_with_names(
    error: RuntimeError, roots: Iterable[Tensor], named: Iterable[tuple[str, nn.Parameter]]
) -> NoReturn:
    """Raises the error of a backward pass, with the names of the parameters if it is about their
    gradients."""
    named = list(named)
    refuse_sparse_gradients(named)
    names = _names_in(error, roots, named)
    if not names:
        raise error
    words = f"parameter {names[0]}" if len(names) == 1 else f"parameters {', '.join(names)}"
    text = f"{error}; it is on the way to the gradient of {words}"
    raise RuntimeError(text) from error


def _names_in(
    error: RuntimeError, roots: Iterable[Tensor], named: Iterable[tuple[str, nn.Parameter]]
) -> list[str]:
    """Returns the names of the parameters whose gradient the error is about; none if it is about
    something else."""
    refused = _REFUSED.search(str(error))
    if refused is None:
        return []
    name_of = {id(param): name for name, param in named}
    starts = [
        edges[index][0]
        for node in _nodes(root.grad_fn for root in roots)
        if node.name() == refused[1]
        for edges, index in [(node.next_functions, int(refused[2]))]
        if index < len(edges)
    ]
    # Of a function that is not given a parameter itself, those behind what it is given.
    return [
        name_of[id(node.variable)]
        for node in _nodes(starts)
        if id(getattr(node, "variable", None)) in name_of
    ]


def _nodes(starts: Iterable[Any]) -> list[Any]:
    """All nodes of the graph behind these, each once."""
    nodes: dict[int, Any] = {}
    left = [node for node in starts if node is not None]
    while left:
        node = left.pop()
        if id(node) not in nodes:
            nodes[id(node)] = node
            left += [after for after, _ in node.next_functions if after is not None]
    return list(nodes.values())
