"""The blocks of a model: what is compiled, or computed again, as one.

For a graph, an nn.Sequential and a model that calls its children in a row these are its nodes, in
the order of the program, and neighbours can be grouped. For any other model they are its repeated
layers and other children, found without running it; each can only be treated by itself.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.model.program import ModelProgram
from stratagem.worker.models.graph_model import node_modules
from stratagem.worker.models.model_nodes import program_of


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one model; `program` is None for a model whose forward pass is its own code."""

    modules: tuple[nn.Module, ...]
    program: ModelProgram | None


def blocks_of(model: nn.Module, job: JobSpec) -> Blocks:
    """Returns the blocks of a model in order, each module once."""
    try:
        with _unchanged(model):
            program = program_of(model, job)
    except InvalidInputError:
        return Blocks(_unique(_repeated(model)), None)
    return Blocks(_unique(node_modules(model, program).values()), program)


def layers_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the repeated layers and other children of a model that have parameters, each module
    once, without running it."""
    return _unique(_repeated(model))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Tracing runs the user's forward, which may assign what it traced to its modules."""
    held = [
        attributes
        for module in model.modules()
        for attributes in (module.__dict__, module._buffers, module._parameters)
    ]
    before = [dict(attributes) for attributes in held]
    try:
        yield
    finally:
        for attributes, values in zip(held, before, strict=True):
            attributes.clear()
            attributes.update(values)


def _unique(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    return tuple(dict.fromkeys(modules))


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    if len(children) == 1 and not _is_list(children[0]):
        yield from _repeated(children[0]) if list(children[0].children()) else children
        return
    for child in children:
        if _is_list(child):
            yield from _repeated(child)
        else:
            yield child


def _is_list(module: nn.Module) -> bool:
    """True for lists of layers; a Sequential of single operations is one layer."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    is_deep = any(list(child.children()) for child in module.children())
    return isinstance(module, nn.Sequential) and is_deep
