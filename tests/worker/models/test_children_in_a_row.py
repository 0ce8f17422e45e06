"""Models that call their children in a row, and what is said of those that do more."""

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

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


class Branch(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.sum() > 0 else x  # here


class Loop(Two):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.a(row) for row in x]  # here


class Length(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * len(x)  # here


class Sized(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.view(x.shape[0], -1))  # type: ignore[no-any-return]  # here


class Number(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * float(x.mean())  # here


class Writes(Two):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 0  # here
        return self.a(x)  # type: ignore[no-any-return]


class Numpy(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.as_tensor(np.asarray(x)))  # type: ignore[no-any-return]  # here


class Functional(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))  # type: ignore[no-any-return]  # here


class Skip(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.a(x))  # type: ignore[no-any-return]  # here


class Own(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.own  # type: ignore[no-any-return]  # here


class Twice(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x))  # type: ignore[no-any-return]  # here


class Listed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)  # type: ignore[no-any-return]  # here


class Raises(Two):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("too small")  # here


class Many(Two):
    def forward(self, *args: Tensor) -> Tensor:  # here
        return self.a(args[0])  # type: ignore[no-any-return]


class Masked(Two):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # here
        return self.a(x)  # type: ignore[no-any-return]


class Named(Two):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # here
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
