"""Activation checkpointing: keep the input of a group of blocks, compute the rest again in
backward.

The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost"
(arXiv:1604.06174). The second computation has the same random numbers (generators and seeds are
those of the first) and the same buffers, whose changes are not counted twice, so gradients have the
bits of ordinary training.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.model.program import Bundle, Call, FromNode, ModelProgram, NodeInput, Source
from stratagem.worker.models.program import Slots, evaluate, map_nested, run_calls
from stratagem.worker.numerics.precision import Forward

_MAX_BUFFER_ELEMENTS: Final = 1 << 18
"""Maximum number of elements of restored buffers; larger buffers must be constant."""


def checkpointed(forward: Forward, modules: Iterable[nn.Module]) -> Forward:
    """Wrap a function so that backward recomputes all but its arguments. modules: those called."""
    buffers = [
        buffer
        for module in modules
        for buffer in module.buffers()
        if buffer.numel() <= _MAX_BUFFER_ELEMENTS
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        versions = [tensor._version for tensor in tensors]
        result = checkpoint(
            forward,
            *args,
            use_reentrant=False,
            # around the first computation, and around those in backward: there may be several
            context_fn=lambda: (nullcontext(), _RestoredBuffers(buffers)),
            **kwargs,
        )
        if versions != [tensor._version for tensor in tensors]:
            raise InvalidInputError.at(
                "execution.gradient",
                "Checkpointed cannot be used: a block changes its input in place; use Full",
            )
        return result

    return run


def in_groups(
    program: ModelProgram, modules: Mapping[str, nn.Module], interval: int
) -> Callable[..., Any]:
    """Return a model's forward pass by its program, checkpointed in groups of `interval` nodes."""
    run = grouped(program.calls, modules, program.num_uses, interval)

    def forward(*inputs: Any) -> Any:
        given = inputs[0] if len(inputs) == 1 else inputs
        slots = Slots()
        run(given, slots)
        return evaluate(program.output, given, slots)

    return forward


def grouped(
    calls: Sequence[Call],
    modules: Mapping[str, nn.Module],
    num_uses: Mapping[str, int],
    interval: int,
) -> Callable[[Any, Slots], None]:
    """Run the calls like `run_calls`, with every `interval` of them checkpointed together."""
    for module in modules.values():
        for submodule in module.modules():
            if getattr(submodule, "inplace", False):
                # In place it would overwrite the input of its group. The bits are equal.
                submodule.inplace = False  # type: ignore[assignment]
    groups = [
        _group(calls[start : start + interval], modules, num_uses)
        for start in range(0, len(calls), interval)
    ]

    def run(given: Any, slots: Slots) -> None:
        for group in groups:
            group(given, slots)

    return run


def _group(
    calls: Sequence[Call], modules: Mapping[str, nn.Module], num_uses: Mapping[str, int]
) -> Callable[[Any, Slots], None]:
    needed = [key for call in calls for arg in call.args for key in _uses(arg)]
    made = [(call.node, use) for call in calls for use in range(num_uses[call.node])]
    entering = [key for key in needed if key not in set(made)]
    leaving = [key for key in made if key not in set(needed)]

    def compute(given: Any, *values: Any) -> tuple[Any, ...]:
        slots: Slots = dict(zip(entering, values, strict=True))
        run_calls(calls, modules, num_uses, given, slots)
        return tuple(slots[key] for key in leaving)

    forward = checkpointed(compute, [modules[call.node] for call in calls])

    def run(given: Any, slots: Slots) -> None:
        results = forward(given, *(slots.pop(key) for key in entering))
        slots.update(zip(leaving, results, strict=True))

    return run


def _uses(source: Source) -> Iterator[tuple[str, int]]:
    match source:
        case FromNode(node, use):
            yield node, use
        case NodeInput(of, _, _):
            yield from _uses(of)
        case Bundle(parts):
            for part in parts:
                yield from _uses(part)


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    map_nested(value, tensors.append)
    return tensors


class _RestoredBuffers(AbstractContextManager[None]):
    """Reusable context manager in which buffers have their values from its creation."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers, self._before = buffers, _copies(buffers)
        self._latest: list[Tensor] = []

    def __enter__(self) -> None:
        self._latest = _copies(self._buffers)
        _write(self._buffers, self._before)

    def __exit__(self, *_: object) -> None:
        _write(self._buffers, self._latest)
        self._latest = []


def _copies(buffers: Sequence[Tensor]) -> list[Tensor]:
    return [buffer.detach().clone() for buffer in buffers]


def _write(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
