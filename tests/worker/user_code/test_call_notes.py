"""What errors say of the call that they come from."""

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.worker.user_code.call_notes import noted, text_of
from stratagem.worker.user_code.entrypoints import user_code

X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (X, "float32[2, 4]"),
        ((X, X[:, 0].long()), "(float32[2, 4], int64[2])"),
        ({"a": [X], "b": (X,)}, "{'a': [float32[2, 4]], 'b': (float32[2, 4],)}"),
        (UserDict({"a": X}), "{'a': float32[2, 4]}"),
        (["secret", 3, None], "[str, int, NoneType]"),
        (list(range(30)), f"[{', '.join(['int'] * 8)}, … 30 in all]"),
        (torch.tensor(3.0), "float32[]"),
        ({"Jane Doe": X, 7: X}, "{str: float32[2, 4], int: float32[2, 4]}"),
    ],
)
def test_types_and_shapes_are_told_and_no_value(value: Any, text: str) -> None:
    assert text_of(value) == text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_have_no_shape_to_tell(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([X[0], X[0, :2]], layout=layout)
    assert text_of(nested) == "float32[nested]"


class Wants(nn.Module):
    def forward(self, x: Any, labels: Any) -> Any: ...


@pytest.mark.parametrize(
    ("model", "given", "hint"),
    [
        (nn.Linear(4, 1), {"x": X}, "was called with {'x': float32[2, 4]}; each batch is one dict"),
        (nn.Linear(4, 1), [X], "was called with [float32[2, 4]]; each batch is one list"),
        (Wants(), X, "the model gets x, as its one argument"),
        (nn.Linear(4, 1), X.long(), "convert x to the dtype that the layer takes"),
        (
            nn.Embedding(3, 2),
            X.long() + 5,
            "x is below 0 or beyond the rows of an embedding; of its embeddings each has 3 rows",
        ),
        (nn.Linear(3, 1), X, "model Linear was called with float32[2, 4]"),
    ],
)
def test_a_model_that_fails_is_told_with_its_input(model: nn.Module, given: Any, hint: str) -> None:
    with pytest.raises(UserCodeError) as caught, user_code("step 1"), noted(model, given):
        model(given)
    assert hint in caught.value.message
    assert hint in caught.value.traceback


class Torn(UserDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise LookupError("torn")


class Mute(ValueError):
    def __str__(self) -> str:
        raise LookupError("no words")


@pytest.mark.parametrize(
    ("error", "given"), [(ValueError("mine"), Torn({"a": X})), (Mute(), X)], ids=["given", "error"]
)
def test_no_note_takes_the_place_of_the_error(error: ValueError, given: Any) -> None:
    with pytest.raises(ValueError) as caught, noted(nn.Linear(4, 1), given):
        raise error
    assert caught.value is error


def test_our_own_errors_are_left_as_they_are() -> None:
    with pytest.raises(InvalidInputError) as caught, noted("the loss", X):
        raise InvalidInputError.at("loss", "is not there")
    assert not hasattr(caught.value, "__notes__")
