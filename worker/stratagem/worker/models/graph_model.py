"""A model from a graph document: named nodes of allow-listed torch.nn modules, edges, subgraphs.

Parameters are called `<node id>.<name>` (inside a subgraph `<subgraph id>.<node id>.<name>`), and
modules are made in the order of the document, so that a chain of nodes is initialised exactly as
the same nn.Sequential. Must not know training.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.model.graph import GraphSpec, NodeSpec
from stratagem.common.model.program import ModelProgram, flatten
from stratagem.common.schema.json import not_one_of, thawed, unknown_key
from stratagem.worker.models.run_program import Slots, evaluate, run_calls


class Add(nn.Module):
    """Sum of all inputs, in order of port."""

    def forward(self, *inputs: Tensor) -> Tensor:
        total = inputs[0]
        for tensor in inputs[1:]:
            total = total + tensor
        return total


class Multiply(nn.Module):
    """Product of all inputs, in order of port."""

    def forward(self, *inputs: Tensor) -> Tensor:
        product = inputs[0]
        for tensor in inputs[1:]:
            product = product * tensor
        return product


class Concat(nn.Module):
    """All inputs side by side along one dimension, in order of port."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, self.dim)


class Select(nn.Module):
    """One member of an output that is a tuple, such as that of an LSTM."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index

    def forward(self, value: Sequence[Any]) -> Any:
        return value[self.index]


class Permute(nn.Module):
    """The dimensions in another order."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, value: Tensor) -> Tensor:
        return value.permute(self.dims)


class Mean(nn.Module):
    """The mean over one dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, value: Tensor) -> Tensor:
        return value.mean(self.dim)


# fmt: off
_TORCH_MODULES: Final = (
    # affine, convolution
    "Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d",
    # embedding, recurrence, attention
    "Embedding", "EmbeddingBag", "RNN", "LSTM", "GRU", "MultiheadAttention",
    "TransformerEncoderLayer",
    # normalisation
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "GroupNorm", "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d", "LocalResponseNorm", "RMSNorm",
    # activations
    "ReLU", "ReLU6", "LeakyReLU", "PReLU", "RReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish",
    "Sigmoid", "Tanh", "Softplus", "Softsign",
    "Softmax", "LogSoftmax", "Hardtanh", "Hardswish", "Hardsigmoid", "LogSigmoid", "GLU",
    "Threshold",
    # pooling
    "MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    # dropout
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout",
    # shape
    "Flatten", "Unflatten", "Identity", "Upsample", "PixelShuffle", "PixelUnshuffle", "ZeroPad2d",
    "ConstantPad1d",
    "ConstantPad2d", "ReflectionPad2d", "ReplicationPad2d",
)
# fmt: on

MODULES: Final[Mapping[str, Callable[..., nn.Module]]] = {
    **{name: getattr(nn, name) for name in _TORCH_MODULES},
    **{kind.__name__: kind for kind in (Add, Multiply, Concat, Select, Permute, Mean)},
}


class GraphModule(nn.Module):
    """Runs nodes in topological order; several inputs of a node come in order of port.

    The model's inputs go to the input nodes, ahead of what edges bring there. One output is
    returned as it is, several as a tuple. Without named inputs or outputs those are the nodes
    without incoming and without outgoing edges. Subgraphs are modules for the sake of their
    names only: the outermost graph runs all nodes.
    """

    def __init__(self, graph: GraphSpec) -> None:
        super().__init__()
        self._program = flatten(graph)
        for node in graph.nodes:
            self._add(node.id, _make_node(node))
        for subgraph in graph.subgraphs:
            self._add(subgraph.id, GraphModule(subgraph.graph))

    def _add(self, name: str, module: nn.Module) -> None:
        if hasattr(self, name):
            raise InvalidInputError.at("model.graph", f'"{name}" cannot be the id of a node')
        self.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        program, slots = self._program, Slots()
        modules = node_modules(self, program)
        given = inputs[0] if len(inputs) == 1 else inputs
        run_calls(program.calls, modules, program.num_uses, given, slots)
        return evaluate(program.output, given, slots)


def node_modules(model: nn.Module, program: ModelProgram) -> dict[str, nn.Module]:
    """The module of each node of the program."""
    return {call.node: model.get_submodule(call.node.replace("/", ".")) for call in program.calls}


def graph_module(graph: GraphSpec) -> nn.Module:
    """The model of a graph document, initialised from torch's default generator."""
    return GraphModule(graph)


def _make_node(node: NodeSpec) -> nn.Module:
    field = f"model.graph.{node.id}"
    kind = MODULES.get(node.module)
    if kind is None:
        raise InvalidInputError.at(f"{field}.module", not_one_of(node.module, sorted(MODULES)))
    parameters = inspect.signature(kind).parameters
    allowed = set(parameters) - {"device", "dtype"}
    for key in node.kwargs:
        if key not in allowed and "kwargs" not in parameters:
            raise InvalidInputError.at(f"{field}.kwargs.{key}", unknown_key(key, sorted(allowed)))
    try:
        module = kind(**thawed(node.kwargs))
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidInputError.at(f"{field}.kwargs", f"{node.module}: {error}") from error
    return module.requires_grad_(node.trainable)
