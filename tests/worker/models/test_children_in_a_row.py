"""Models that call their children in a row, and what is said of those that do more."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.models.children_in_a_row import RULE, children_in_a_row


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.unused = nn.Linear(1, 1)
        self.own = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


class Branch(Two):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x)) if x.sum() > 0 else x  # here


class Loop(Two):
    def forward(self, x: Tensor) -> Any:
        return [self.a(row) for row in x]  # here


class Length(Two):
    def forward(self, x: Tensor) -> Any:
        return self.a(x) * len(x)  # here


class Sized(Two):
    def forward(self, x: Tensor) -> Any:
        return self.a(x.view(x.shape[0], -1))  # here


class Number(Two):
    def forward(self, x: Tensor) -> Any:
        return self.a(x) * float(x.mean())  # here


class Writes(Two):
    def forward(self, x: Tensor) -> Any:
        x[0] = 0  # here
        return self.a(x)


class Numpy(Two):
    def forward(self, x: Tensor) -> Any:
        return self.a(torch.as_tensor(np.asarray(x)))  # here


class Functional(Two):
    def forward(self, x: Tensor) -> Any:
        return self.b(F.relu(self.a(x)))  # here


class Skip(Two):
    def forward(self, x: Tensor) -> Any:
        return self.b(x + self.a(x))  # here


class Own(Two):
    def forward(self, x: Tensor) -> Any:
        return self.a(x) * self.own  # here


class Twice(Two):
    def forward(self, x: Tensor) -> Any:
        return self.a(self.a(x))  # here


class Listed(Two):
    def forward(self, x: Tensor) -> Any:
        return self.layers[0](x)  # here


class Raises(Two):
    def forward(self, x: Tensor) -> Any:
        raise ValueError("too small")  # here


class Many(Two):
    def forward(self, *args: Tensor) -> Any:  # here
        return self.a(args[0])


class Masked(Two):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # here
        return self.a(x)


class Named(Two):
    def forward(self, x: Tensor) -> Any:  # here
        return {"y": self.b(self.a(x))}


@pytest.mark.parametrize(
    ("kind", "does", "instead"),
    [
        (Branch, "branches on the values of a tensor", "into the forward of a child"),
        (Loop, "loops over a tensor", "into the forward of a child"),
        (Length, "takes len() of a tensor", "into the forward of a child"),
        (Sized, "reads .shape of a tensor", "into the forward of a child"),
        (Number, "makes a Python number of a tensor", "into the forward of a child"),
        (Writes, "writes into a tensor", "into the forward of a child"),
        (Numpy, "gives a tensor to code that is not of torch", "into the forward of a child"),
        (Functional, "calls relu() between its children", "make it a child, nn.ReLU"),
        (Skip, "computes add between its children", "as a graph, with Add"),
        (Own, "uses 'own' of its own", "give it to a child"),
        (Twice, "calls 'a' twice", "call each child once"),
        (Listed, "calls 'layers.0', which is inside another child", "an nn.Sequential"),
        (Raises, "raises ValueError: too small", "called once without values"),
        (Many, "takes *args", "forward(self, x)"),
        (Masked, "takes several arguments", "forward(self, x)"),
        (Named, "returns something else than its last child", "what the last child has returned"),
    ],
)
def test_the_line_that_does_more_is_named(kind: type[nn.Module], does: str, instead: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        children_in_a_row(kind())
    text = str(caught.value)
    assert text.startswith(f"model: {kind.__name__} cannot be cut: its forward {does}")
    assert f"{__file__}, line " in text
    assert "# here`; " in text
    assert instead in text
    assert text.endswith(RULE)
    assert not any(word in text for word in ("Proxy", "symbolic", "num_users", "%"))


def test_children_are_named_in_the_order_of_their_calls() -> None:
    assert children_in_a_row(Two()) == ["a", "b"]
    assert children_in_a_row(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) == ["0", "1"]
