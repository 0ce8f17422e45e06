"""The names of slices of a state that is divided among members element by element.

What a member keeps of a parameter's optimizer state, or of a parameter, travels under such a name,
as a flat tensor or a single number; put together in order, the slices are the tensor that an
undivided state has. Pure.
"""

from dataclasses import dataclass
from typing import Final

from stratagem.common.base.errors import InvalidInputError

_PREFIX: Final = "slice/"
_PARAMETER: Final = "parameter/"


@dataclass(frozen=True, slots=True, order=True)
class SliceName:
    """The place of a slice: slices in this order stand as the tensors of an undivided state do."""

    parameter: int
    """The parameter's number, from 0."""
    place: int
    """Among what is kept of the parameter."""
    first: int
    """The first element of the parameter that the slice is of."""
    whole: str
    """The name of the tensor in an undivided state."""

    def __str__(self) -> str:
        return f"{_PREFIX}{self.parameter}/{self.place}/{self.first}/{self.whole}"


@dataclass(frozen=True, slots=True, order=True)
class ParameterSlice:
    """The place of a slice of a parameter that no member has as a whole."""

    place: int
    """Of the parameter among all tensors of the model, from 0."""
    first: int
    """The first element of the parameter that the slice is of."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    whole: str
    """The name of the tensor in an undivided state."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{_PARAMETER}{self.place}/{self.first}/{shape}/{self.whole}"


def slice_name(name: str) -> SliceName | None:
    """Return what the name of a tensor says of a slice; None where it names none.

    Raises InvalidInputError for a name that begins as one and is none.
    """
    if not name.startswith(_PREFIX):
        return None
    *numbers, whole = name.removeprefix(_PREFIX).split("/", 3)
    if len(numbers) != 3 or not all(map(_is_number, numbers)):
        raise InvalidInputError.at("state", f"{name!r} names no slice of a tensor")
    parameter, place, first = map(int, numbers)
    return SliceName(parameter, place, first, whole)


def parameter_slice(name: str) -> ParameterSlice | None:
    """Return what the name of a tensor says of a slice of a parameter; None where it names none.

    Raises InvalidInputError for a name that begins as one and is none.
    """
    if not name.startswith(_PARAMETER):
        return None
    place, first, shape, whole = (*name.removeprefix(_PARAMETER).split("/", 3), "", "", "", "")[:4]
    lengths = shape.split("x") if shape else []
    if not whole or not all(map(_is_number, (place, first, *lengths))):
        raise InvalidInputError.at("state", f"{name!r} names no slice of a parameter")
    return ParameterSlice(int(place), int(first), tuple(map(int, lengths)), whole)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
