"""What a user would write: rows that are read by reader processes, and all that can go wrong."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.userland.data import NoisyRows

NUM_ROWS = 20
BAD_ROW = 3


class Twin(NamedTuple):
    """A batch of the user's own class."""

    left: Any
    right: Any

    def swapped(self) -> "Twin":
        return Twin(self.right, self.left)


class Rows:
    """Rows of one kind; the kinds that go wrong do so in one row."""

    def __init__(self, kind: str, folder: str) -> None:
        self.kind, self.folder = kind, Path(folder)

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> tuple[str, Any]:
        return self.kind, self._value(row)

    def _value(self, row: int) -> Any:
        is_bad = row == BAD_ROW
        match self.kind:
            case "noisy":
                return torch.randn(2, 3)
            case "large":  # than what was read before
                return torch.full((row * 40_000 + 1,), float(row))
            case "sum":  # of more numbers than one thread adds
                return (torch.arange(100_003.0) / 7).sum()
            case "prints":
                print(f"reading row {row}")
            case "raises" if is_bad:
                raise KeyError("label")
            case "ends once" if is_bad and not (self.folder / "ended").exists():
                (self.folder / "ended").touch()
                os._exit(7)
            case "ends" if is_bad:
                os._exit(7)
        return torch.tensor(row)


def collate(rows: list[tuple[str, Any]]) -> Any:
    if not rows:
        return torch.zeros(0, 3), torch.zeros(0)
    kind, _ = rows[0]
    values: list[Tensor] = [value for _, value in rows]
    match kind:
        case "large":
            return torch.cat(values), len(values) * torch.ones(1)
        case "nested":
            x = torch.stack(values)
            halves = {"half": x.to(torch.bfloat16), ("of", 1): [x[:0], None], 2: x > 4}
            return Twin(halves, ()), Twin([x.double().expand(3, -1)], (x + 1j, x[0]))
        case "text":
            return ["a", "b"]
        case "sparse":
            return torch.eye(3).to_sparse(), torch.zeros(3)
    stacked = torch.stack(values)
    return {"x": stacked + torch.rand(())} if kind == "noisy" else (stacked, stacked)


KINDS = ["noisy", "large", "sum", "prints", "raises", "nested", "text", "sparse", "plain"]
KINDS += ["ends once", "ends"]


def rows(folder: str) -> dict[str, Any]:
    return {kind: Rows(kind, folder) for kind in KINDS}


def drawn() -> dict[str, Any]:
    """A data set that is drawn when it is made."""
    made = NoisyRows(50)
    made.x = made.x + torch.randn(made.x.shape)
    return {"train": made, "test": NoisyRows(23)}
