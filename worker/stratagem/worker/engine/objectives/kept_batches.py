"""What is kept of evaluated batches for metrics of whole splits: outputs and targets, on the CPU.

Nestings of tuples, lists and dicts are taken apart into tensors, so that they can be sent as any
other tensors, and put together again where the metrics are computed. Must not know what is
computed of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError

LAYOUT: Final = "layout"
"""The key of the metadata that says how the tensors of a batch are nested."""

_TENSOR: Final = "tensor"


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """Output and target of one batch: their tensors in order, and how these are nested, as JSON."""

    layout: str
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def unpacked(self, tensors: Sequence[Tensor] | None = None) -> tuple[Any, Any]:
        """(output, target) with copies of the tensors, which may be changed; or with these ones."""
        left = iter([each.clone() for each in self.tensors] if tensors is None else tensors)
        output, target = json.loads(self.layout)
        return _nested(output, left), _nested(target, left)


def kept_batch(output: Any, target: Any) -> KeptBatch:
    """Copies output and target of a batch to the CPU.

    Raises InvalidInputError for what is no nesting of tensors.
    """
    tensors: list[Tensor] = []
    # Copies that are made in inference mode could not be changed outside of it.
    with torch.inference_mode(mode=False), torch.no_grad():
        layout = json.dumps(
            [_layout(output, "output", tensors), _layout(target, "target", tensors)]
        )
    return KeptBatch(layout, tuple(tensors))


def joined(batches: Sequence[KeptBatch]) -> tuple[Any, Any]:
    """(outputs, targets) of all rows of these batches, in order, in memory of their own.

    Raises InvalidInputError where the batches differ in more than their rows.
    """
    first = batches[0]
    if any(batch.layout != first.layout for batch in batches):
        raise _unlike("are nested in different ways")
    columns = list(zip(*(batch.tensors for batch in batches), strict=True))
    for column in columns:
        shapes = sorted({tuple(tensor.shape[1:]) for tensor in column})
        if any(tensor.dim() == 0 for tensor in column):
            raise _unlike("are single numbers, without rows")
        if len(shapes) > 1 or len({tensor.dtype for tensor in column}) > 1:
            kinds = sorted({f"{each.dtype} {tuple(each.shape)}" for each in column})
            raise _unlike(f"differ in more than rows: {kinds[0]} and {kinds[1]}")
    return first.unpacked([torch.cat(column) for column in columns])


def named_tensors(split: str, batch: int, kept: KeptBatch) -> dict[str, Tensor]:
    """The tensors of a batch by the names under which they are sent."""
    return {
        f"{split}/{number:04d}/{batch:012d}": tensor for number, tensor in enumerate(kept.tensors)
    }


def from_named(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], split: str
) -> list[KeptBatch]:
    """The batches of a split in order, from what `named_tensors` gave for all of them."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        of_split, number, batch = name.rsplit("/", 2)
        if of_split == split:
            found.setdefault(batch, {})[number] = tensor
    layout = metadata.get(LAYOUT, "")
    return [
        KeptBatch(layout, tuple(each for _, each in sorted(found[batch].items())))
        for batch in sorted(found)
    ]


def _layout(value: Any, name: str, tensors: list[Tensor]) -> Any:
    match value:
        case Tensor():
            copy = torch.empty(value.shape, dtype=value.dtype)
            tensors.append(copy.copy_(value))
            return _TENSOR
        case None:
            return None
        case Mapping():
            return {
                str(key): _layout(each, f"{name}.{key}", tensors) for key, each in value.items()
            }
        case tuple() | list():
            kind = type(value).__name__ if type(value) in (tuple, list) else "tuple"
            inner = [_layout(each, f"{name}.{key}", tensors) for key, each in enumerate(value)]
            return [kind, *inner]
        case _:
            text = f"the {name} of a batch is a {type(value).__name__}, and no tensor"
            hint = "evaluation.keep can make tensors of it"
            raise InvalidInputError.at("evaluation.metrics", f"{text}; {hint}")


def _nested(layout: Any, tensors: Iterator[Tensor]) -> Any:
    match layout:
        case None:
            return None
        case dict():
            return {key: _nested(each, tensors) for key, each in layout.items()}
        case [kind, *inner]:
            values = [_nested(each, tensors) for each in inner]
            return values if kind == "list" else tuple(values)
        case _:
            return next(tensors)


def _unlike(text: str) -> InvalidInputError:
    hint = "evaluation.keep can make them alike, and an object with update() gets them one by one"
    return InvalidInputError.at(
        "evaluation.metrics", f"outputs or targets of batches {text}; {hint}"
    )
