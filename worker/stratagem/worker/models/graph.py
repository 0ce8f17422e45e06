"""Find the children that a model calls one after the other, since only such models can be cut.

The model's forward is traced with torch.fx, each child being one call. Anything else is refused
with the line of the user's code that does it, and the remedy.
"""

import linecache
import operator
import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Final

from torch import fx, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.user_code import bundles
from stratagem.worker.user_code.entrypoints import is_users

_Line = tuple[str, int]
"""(file, line number)."""

RULE: Final = (
    "a model that is cut must be a graph, an nn.Sequential, or call its children in a row, and do "
    "nothing else"
)
_INTO_A_CHILD: Final = "move it into the forward of a child, where any code may stand"

_RAISED: Final = (
    (
        "used as inputs to control flow",
        "branches on the values of a tensor or on its shape",
        _INTO_A_CHILD,
    ),
    (
        "cannot be iterated",
        "loops over a tensor, or takes it apart as *args or **kwargs",
        _INTO_A_CHILD,
    ),
    ("'len' is not supported", "takes len() of a tensor", _INTO_A_CHILD),
    (
        "interpreted as an integer|must be a string or a real number|must be a string, a bytes"
        "|__index__|__int__|__float__",
        "makes a Python number of a tensor or of its shape",
        _INTO_A_CHILD,
    ),
    (
        "does not support item (assignment|deletion)",
        "writes into a tensor",
        _INTO_A_CHILD,
    ),
    (
        "Proxy|__array|invalid data type|can't convert|torch.fx",
        "gives a tensor to code that is not of torch, or makes a tensor from one",
        _INTO_A_CHILD,
    ),
)
"""The causes of a failed trace: a text in the error's message, what the line of code does wrong,
and the remedy."""
_MODULES: Final = {
    kind.__name__.lower(): kind.__name__
    for kind in (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.Dropout, nn.Flatten)
} | {"log_softmax": "LogSoftmax", "leaky_relu": "LeakyReLU", "max_pool2d": "MaxPool2d"}
"""Names of functions and tensor methods that also exist as modules."""


def children_in_a_row(model: nn.Module) -> list[str]:
    """Return the names of the model's children in the order of their calls. Raises
    InvalidInputError, with the line, if the model does anything else."""
    if type(model).forward is nn.Sequential.forward:
        return list(model._modules)
    tracer = _Tracer()
    try:
        traced = tracer.trace(model)
    except Exception as error:
        does, remedy = _raised(error)
        raise _refusal(model, does, _line_of(error), remedy) from error
    names: list[str] = []
    previous: Any = None
    for node in traced.nodes:
        if node.op == "placeholder" and previous is None and not node.target.startswith("*"):
            previous = node
        elif node.op == "call_module" and node.args == (previous,) and not node.kwargs:
            if "." in node.target:
                does = f"calls {node.target!r}, which is inside another child"
                remedy = "make it a child of the model itself, or that child an nn.Sequential"
                raise _refusal(model, does, tracer.lines.get(node), remedy)
            if node.target in names:
                remedy = "call each child once, or put all the calls into the forward of one child"
                does = f"calls {node.target!r} twice"
                raise _refusal(model, does, tracer.lines.get(node), remedy)
            names.append(node.target)
            previous = node
        elif node.op != "output" or node.args != (previous,):
            raise _refusal(model, *_done_by(node, tracer.lines.get(node)))
    return names


class _Tracer(fx.Tracer):
    """Tracer that treats each child as one call, and records the user's line behind each node."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[fx.Node, _Line] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frames = traceback.walk_stack(sys._getframe(1))
        lines = [(frame.f_code.co_filename, line) for frame, line in frames]
        inner = next((line for line in lines if is_users(line[0])), None)
        # Outside of forward the nearest foreign code would be our caller.
        if inner is not None and node.op not in ("placeholder", "output"):
            self.lines[node] = inner
        return node


def _refusal(model: nn.Module, does: str, line: _Line | None, remedy: str) -> InvalidInputError:
    code = getattr(type(model).forward, "__code__", None)
    if line is None and code is not None:
        line = code.co_filename, code.co_firstlineno
    where = f", at {_text_of(line)}" if line is not None else ""
    text = f"{type(model).__name__} cannot be cut: its forward {does}{where}; {remedy}; {RULE}"
    return InvalidInputError.at("model", text)


def _text_of(line: _Line) -> str:
    """Return a line as "model.py, line 13: `if x.sum() > 0:`"."""
    file, number = line
    source = linecache.getline(file, number).strip()
    place = f"{bundles.plain_path(file)}, line {number}"
    return f"{place}: `{source}`" if source else place


def _line_of(error: BaseException) -> _Line | None:
    """Return the innermost line of the user's code in an error's traceback."""
    frames: Iterable[_Line] = (
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    )
    return next((line for line in reversed(list(frames)) if is_users(line[0])), None)


def _raised(error: Exception) -> tuple[str, str]:
    """Return (the fault of the line that ended the trace, the remedy)."""
    text = f"{type(error).__name__}: {error}"
    for pattern, does, remedy in _RAISED:
        if re.search(pattern, text):
            return does, remedy
    return f"raises {text}", "it is called once without values, to find the children that it calls"


def _done_by(node: fx.Node, line: _Line | None) -> tuple[str, _Line | None, str]:
    """Return (fault, line, remedy) for a node of the trace other than a call of a child with the
    output of the previous one."""
    name = getattr(node.target, "__name__", str(node.target))
    match node.op:
        case "placeholder":
            takes = f"takes {node.target}" if name.startswith("*") else "takes several arguments"
            return (
                takes,
                line,
                "write forward(self, x), and take a tuple x apart in the first child",
            )
        case "get_attr":
            return f"uses {node.target!r} of its own", line, "give it to a child that uses it"
        case "output":
            remedy = "return what the last child has returned"
            return "returns something else than its last child does", line, remedy
        case "call_module":
            does = f"gives {node.target!r} something else than what the child before has returned"
            return does, line, "call the children in a row, or write the model as a graph"
    if node.target is getattr:
        return f"reads .{node.args[1]} of a tensor", line, _INTO_A_CHILD
    if node.target is operator.getitem:
        return "takes a part of a tensor or a tuple", line, _INTO_A_CHILD
    if name in ("add", "iadd", "mul", "imul", "cat"):
        remedy = f"{_INTO_A_CHILD}, or write the model as a graph, with Add, Multiply or Concat"
        return f"computes {name} between its children", line, remedy
    if name in _MODULES:
        remedy = f"make it a child, nn.{_MODULES[name]}, or {_INTO_A_CHILD}"
        return f"calls {name}() between its children", line, remedy
    return f"calls {name}() between its children", line, _INTO_A_CHILD
