"""Models that call their children in a row, and what is said of those that do more."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.models.graph import RULE, children_in_a_row


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.unused = nn.Linear(1, 1)
        self.own = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


ODD = """
import numpy as np
import torch
import torch.nn.functional as F

class Odd(Two):
    def forward(self, {arguments}
        {body}
"""
X = "x):"
CHILD = "into the forward of a child"


@pytest.mark.parametrize(
    ("arguments", "body", "does", "instead"),
    [
        (X, "return self.a(x) if x.sum() > 0 else x", "branches on the values of a tensor", CHILD),
        (X, "return [self.a(row) for row in x]", "loops over a tensor", CHILD),
        (X, "return self.a(x) * len(x)", "takes len() of a tensor", CHILD),
        (X, "return self.a(x.view(x.shape[0], -1))", "reads .shape of a tensor", CHILD),
        (X, "return self.a(x) * float(x.mean())", "makes a Python number of a tensor", CHILD),
        (X, "x[0] = 0", "writes into a tensor", CHILD),
        (
            X,
            "return self.a(torch.as_tensor(np.asarray(x)))",
            "gives a tensor to code that is not of torch",
            CHILD,
        ),
        (
            X,
            "return self.b(F.relu(self.a(x)))",
            "calls relu() between its children",
            "make it a child, nn.ReLU",
        ),
        (
            X,
            "return self.b(x + self.a(x))",
            "computes add between its children",
            "as a graph, with Add",
        ),
        (X, "return self.a(x) * self.own", "uses 'own' of its own", "give it to a child"),
        (X, "return self.a(self.a(x))", "calls 'a' twice", "call each child once"),
        (
            X,
            "return self.layers[0](x)",
            "calls 'layers.0', which is inside another child",
            "an nn.Sequential",
        ),
        (
            X,
            "raise ValueError('too small')",
            "raises ValueError: too small",
            "called once without values",
        ),
        ("*args):  # here", "return self.a(args[0])", "takes *args", "forward(self, x)"),
        (
            "x, mask=None):  # here",
            "return self.a(x)",
            "takes several arguments",
            "forward(self, x)",
        ),
        (
            "x):  # here",
            "return {'y': self.b(self.a(x))}",
            "returns something else than its last child",
            "what the last child has returned",
        ),
    ],
)
def test_a_line_that_does_more(
    tmp_path: Path, arguments: str, body: str, does: str, instead: str
) -> None:
    file = tmp_path / "odd_model.py"
    body = body if "# here" in arguments else f"{body}  # here\n        return self.a(x)"
    file.write_text(ODD.format(arguments=arguments, body=body))
    model = runpy.run_path(str(file), {"Two": Two})["Odd"]()
    with pytest.raises(InvalidInputError) as caught:
        children_in_a_row(model)
    text = str(caught.value)
    assert text.startswith(f"model: Odd cannot be cut: its forward {does}")
    assert f"{file}, line " in text
    assert "# here`; " in text
    assert instead in text
    assert text.endswith(RULE)
    assert not any(word in text for word in ("Proxy", "symbolic", "num_users", "%"))


def test_children_are_named_in_the_order_of_their_calls() -> None:
    assert children_in_a_row(Two()) == ["a", "b"]
    assert children_in_a_row(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) == ["0", "1"]
