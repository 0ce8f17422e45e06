"""Rows of which it is known that nothing is drawn for them, and rows of which it is not."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from stratagem.common.base.errors import UserCodeError
from stratagem.common.numerics.keys import mix
from stratagem.worker.data import rows as row_datasets
from stratagem.worker.data.datasets import map_tensors
from stratagem.worker.data.rows import BatchKeys, RowDataset, generators_kept, seed_generators
from tests.userland.data import NoisyRows

NUM_ROWS = 12
KEYS = BatchKeys((3, "row", 0), (3, 0, 0, 0))
CODES = torch.arange(NUM_ROWS * 2).reshape(NUM_ROWS, 2)
PLAIN: dict[str, Any] = {
    "pairs": [(CODES[row], row) for row in range(NUM_ROWS)],
    "dicts": [{"x": CODES[row], "deep": [row / 7, {"name": "a"}]} for row in range(NUM_ROWS)],
    "tensor": CODES,
    "array": CODES.numpy(),
    "of torch": TensorDataset(CODES, CODES * 0.5),
    "parts": ConcatDataset([Subset(TensorDataset(CODES), [4, 2, 4]), TensorDataset(CODES[:9])]),
}


class InOneOfTen(NoisyRows):
    """Draws in one row only."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return super().__getitem__(row) if row % 10 == 3 else (self.x[row], row)


class OwnList(list[int]):
    def __getitem__(self, row: Any) -> Any:
        return super().__getitem__(row) + torch.rand(())


class OwnTensors(TensorDataset):
    def __getitem__(self, row: Any) -> Any:
        return self.tensors[0][row] + random.random()


class ByTheSeed(NoisyRows):
    """Reads a generator without a trace in its state."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        noise = torch.rand(1, generator=torch.Generator().manual_seed(torch.initial_seed()))
        with torch.random.fork_rng(devices=[]):
            return self.x[row] + noise * torch.rand(()), row


class OwnDict(dict[str, Any]):
    """Draws while a batch is made of it."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) + torch.rand(())


class Opaque:
    """Hides from the engine what it holds."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> Any:
        return self.source[row]


NOISY: list[Any] = [NoisyRows(4), NoisyRows(NUM_ROWS)]
DRAWING: dict[str, Any] = {
    "always": NoisyRows(NUM_ROWS),
    "in one of ten": InOneOfTen(NUM_ROWS),
    "own list": OwnList(range(NUM_ROWS)),
    "own tensors": OwnTensors(CODES),
    "by the seed": ByTheSeed(NUM_ROWS),
    "own dicts": [OwnDict(x=row) for row in range(NUM_ROWS)],
    "one own dict": [OwnDict(x=1) if row == 3 else {"x": 1} for row in range(NUM_ROWS)],
    "a part": Subset(ConcatDataset(NOISY), list(range(NUM_ROWS))),
    "opaque": Opaque(PLAIN["dicts"]),
}


def pad(rows: list[Any]) -> Any:
    """Draws; takes no rows, too."""
    return (default_collate(rows) if rows else None), torch.rand(2) + random.random()


def one_by_one(source: Any, numbers: list[int], collate: Callable[[list[Any]], Any]) -> Any:
    """What `read` is defined as; a number that is too large is one of a row that came before."""
    rows = []
    with generators_kept():
        for number in numbers:
            occurrence, row = divmod(number, NUM_ROWS)
            seed_generators(mix(*KEYS.rows, row, occurrence))
            rows.append(np.array(source[row]) if isinstance(source, np.ndarray) else source[row])
        seed_generators(mix("collate", *KEYS.batch))
        batch = collate(rows)
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    return tuple(batch) if is_pair else (batch, batch)


def read(source: Any, numbers: list[int], collate: Callable[[list[Any]], Any]) -> Any:
    dataset = RowDataset(source, "train", NUM_ROWS, collate)
    return dataset.read(dataset.order(torch.tensor(numbers, dtype=torch.int64), KEYS))


def texts_of(batch: Any) -> list[str]:
    """All tensors of a batch, in order, as texts."""
    found: list[str] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(f"{tensor.dtype} {tensor.tolist()}")
        return tensor

    try:
        map_tensors(batch, add)
    except Exception:  # texts in it
        found.append(str(batch))
    return found


@pytest.mark.parametrize("name", [*PLAIN, *DRAWING])
@pytest.mark.parametrize("collate", [default_collate, pad])
def test_a_batch_is_that_of_keyed_rows(name: str, collate: Callable[[list[Any]], Any]) -> None:
    source = {**PLAIN, **DRAWING}[name]
    for numbers in ([], [3], [0, 3, 11, NUM_ROWS + 3, 5, 2 * NUM_ROWS + 3, 1]):
        if not numbers and collate is default_collate:
            continue
        torch.manual_seed(len(numbers))
        expected, state = one_by_one(source, numbers, collate), torch.get_rng_state()
        assert texts_of(read(source, numbers, collate)) == texts_of(expected)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [*PLAIN, "memory map"])
def test_plain_rows_need_no_seed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which takes longer than fetching them."""
    np.save(tmp_path / "x.npy", CODES.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    expected = one_by_one({**PLAIN, "memory map": mapped}[name], [7, 1, 7], default_collate)
    monkeypatch.delattr(row_datasets, "seed_generators")
    found = read({**PLAIN, "memory map": mapped}[name], [7, 1, 7], default_collate)
    assert texts_of(found) == texts_of(expected)


def test_a_batch_is_made_with_keys_where_that_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noisy(values: list[Any], **_: Any) -> Tensor:
        return torch.tensor(values) + torch.rand(())

    monkeypatch.setitem(default_collate_fn_map, int, noisy)
    expected = one_by_one(PLAIN["pairs"], [4, 2], default_collate)
    assert texts_of(read(PLAIN["pairs"], [4, 2], default_collate)) == texts_of(expected)
    assert not torch.equal(expected[1], torch.tensor([4, 2]))


def test_a_row_that_is_missing_is_named() -> None:
    short = Subset(TensorDataset(CODES), [*range(NUM_ROWS - 1), 99])
    with pytest.raises(UserCodeError, match=r"row 11 of data\.train"):
        read(short, [3, 11], default_collate)
    with pytest.raises(UserCodeError, match=r"collating rows of data\.train"):
        read([torch.zeros(row) for row in range(NUM_ROWS)], [3, 11], default_collate)
