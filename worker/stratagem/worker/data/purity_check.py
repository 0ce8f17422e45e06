"""Checks that a row is a function of its number and its key: fetched twice, it is the same.

Compares bytes that are taken at once, as a data set may hand out what it changes later. Must not
know jobs.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.data.generators import generators_kept
from stratagem.worker.data.row_datasets import BatchKeys, RowDataset

_KEYS = BatchKeys(("row", "check"))


def check_purity(dataset: RowDataset) -> None:
    """Fetches two rows twice, each with the other between; raises InvalidInputError naming the row
    and the leaf that differ."""
    last = dataset.num_rows - 1
    numbers = list(dict.fromkeys((0, last))) if last >= 0 else []
    with generators_kept():
        first, second = ({n: _fetched(dataset, n) for n in numbers} for _ in range(2))
    for number in numbers:
        found, again = first[number], second[number]
        differing = [leaf for leaf in found | again if found.get(leaf) != again.get(leaf)]
        if differing:
            raise InvalidInputError.at(
                f"data.{dataset.split}",
                f"row {number} is not the same when it is fetched again: {differing[0]} differs; "
                "draw from random, numpy.random or torch's default generator, which are seeded "
                "for each row, or set execution.deterministic: false",
            )


def _fetched(dataset: RowDataset, number: int) -> dict[str, str]:
    """Returns a fingerprint of each leaf of a row, by its path."""
    return dict(leaves_of(dataset.row(number, _KEYS)))


def leaves_of(value: Any) -> Iterator[tuple[str, str]]:
    """Yields (path, fingerprint) of each leaf of a row."""
    for path, leaf in values_of(value):
        yield path, fingerprint(leaf)


def values_of(value: Any, path: str = "the row") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of each leaf of a row."""
    match value:
        case Mapping():
            for key, inner in value.items():
                yield from values_of(inner, f"{path}[{key!r}]")
        case tuple() | list():
            for place, inner in enumerate(value):
                yield from values_of(inner, f"{path}[{place}]")
        case _:
            yield path, value


def fingerprint(value: Any) -> str:
    """Returns the type of a leaf and, where it shows its value, a digest of that."""
    return f"{type(value).__name__} {_text(value)}"


def _text(value: Any) -> str:
    """Returns what is compared of a leaf; nothing of an object that does not show its value."""
    match value:
        case Tensor():
            plain = value.detach().cpu().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"{plain.dtype} {tuple(plain.shape)} {_digest(data)}"
        case np.ndarray():
            return f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
        case bool() | int() | float() | complex() | str() | bytes() | None | np.generic():
            return repr(value)
        case _:
            to_bytes = getattr(value, "tobytes", None)  # images have it
            return _digest(to_bytes()) if callable(to_bytes) else ""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
