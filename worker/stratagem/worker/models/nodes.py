"""The nodes of a model that is cut into stages: their program, modules and parameters.

The module has the rules for models that can be cut, the separation of tied parameters into one copy
per node, and the removal of nodes of other workers. Names stay those of the whole model.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.model.program import ModelProgram, chain, flatten
from stratagem.worker.models.build import node_modules
from stratagem.worker.models.graph import children_in_a_row
from stratagem.worker.models.program import add_uses, draws_random_numbers


@dataclass(frozen=True, slots=True)
class Copy:
    """One node's copy of a parameter; all copies in a process share memory."""

    node: str
    param: nn.Parameter


@dataclass(frozen=True, slots=True)
class Trained:
    """A trainable parameter, named by its first name, with its copies in program order."""

    name: str
    copies: tuple[Copy, ...]

    @property
    def param(self) -> nn.Parameter:
        return self.copies[0].param

    def gradient(self) -> Tensor | None:
        """Return the sum of the copies' gradients, from the last copy on; None without any."""
        return add_uses(copy.param.grad for copy in self.copies)

    def forget(self) -> None:
        """Drop the gradients of all copies."""
        for copy in self.copies:
            copy.param.grad = None


def program_of(model: nn.Module, job: JobSpec) -> ModelProgram:
    """Return the model's program: its graph nodes, or its children in order. Raises
    InvalidInputError if it has none."""
    if job.model.graph is not None:
        return flatten(job.model.graph)
    names = children_in_a_row(model)
    _check_children_hold_everything(model, names)
    return chain(names)


def separate_tied(model: nn.Module, program: ModelProgram | None) -> list[Trained]:
    """Return all trainable parameters, in order of `named_parameters`, with one copy per node.

    Copies of a tied parameter share memory but have separate gradients, so that each node's
    gradient is summed over micro-batches by itself, wherever the node is.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if program is None:
        return [Trained(name, (Copy("", param),)) for name, param in named]
    names = {id(param): name for name, param in named}
    copies: dict[str, dict[str, nn.Parameter]] = {name: {} for name, _ in named}
    seen: set[int] = set()
    for node, root in node_modules(model, program).items():
        for module in root.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for key, param in list(module._parameters.items()):
                if param is None or id(param) not in names:
                    continue
                held = copies[names[id(param)]]
                if node not in held:
                    held[node] = nn.Parameter(param.data) if held else param
                if held[node] is not param:
                    # setattr, because RNNs keep a second list of their weights in step with it.
                    setattr(module, key, held[node])
    return [
        Trained(name, tuple(Copy(node, tensor) for node, tensor in copies[name].items()))
        for name, _ in named
    ]


def without_storage(trained: Iterable[Trained], nodes: Collection[str]) -> list[Trained]:
    """Return the parameters, with their copies in these nodes moved to the meta device."""

    def emptied(copy: Copy) -> Copy:
        if copy.node not in nodes:
            return copy
        return Copy(copy.node, nn.Parameter(torch.empty_like(copy.param, device="meta")))

    return [
        Trained(weight.name, tuple(emptied(copy) for copy in weight.copies)) for weight in trained
    ]


def tie_again(trained: Iterable[Trained]) -> None:
    """Let copies share memory again after a move to another device has separated them."""
    for weight in trained:
        here = [copy.param for copy in weight.copies if not copy.param.is_meta]
        for param in here[1:]:
            param.data = here[0].data


class Absent(nn.Module):
    """Placeholder module, without tensors, for a node on another worker."""

    def forward(self, *_: Any) -> Any:
        raise RuntimeError("this node belongs to another worker")


def check_not_shared(model: nn.Module, owner: Mapping[str, int], program: ModelProgram) -> None:
    """Raise InvalidInputError if nodes of different owners share a module."""
    holder: dict[int, str] = {}
    for node, root in node_modules(model, program).items():
        for name, module in root.named_modules():
            first = holder.setdefault(id(module), node)
            has_state = bool(module._parameters or module._buffers)
            if owner[first] != owner[node] and (has_state or draws_random_numbers(module)):
                where = f"{node}.{name}".rstrip(".")
                raise InvalidInputError.at(
                    "partitions",
                    f"module {where!r} ({type(module).__name__}) is the same object in the nodes "
                    f"{first!r} and {node!r} of different partitions; tie their parameters "
                    "instead, or put both into one partition",
                )


def remove_nodes(model: nn.Module, nodes: Iterable[str]) -> None:
    """Replace these nodes by placeholders, and free their parameters."""
    for node in nodes:
        path, _, name = node.replace("/", ".").rpartition(".")
        model.get_submodule(path)._modules[name] = Absent()


def _check_children_hold_everything(model: nn.Module, names: list[str]) -> None:
    for name in model.state_dict():
        if name.partition(".")[0] not in names:
            raise InvalidInputError.at(
                "model", f"{name!r} belongs to none of the nodes {', '.join(names) or '(none)'}"
            )
