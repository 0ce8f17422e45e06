"""What a user would write: named by the jobs of these tests, run inside worker processes."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem.worker.engine.numerics.layer_support import KINDS, LayerKind
from tests.worker.service.rows import Numbers


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 5))


NO_GATE = "STRATAGEM_TEST_NO_GATE"


class Rare(nn.Module):
    """A kind of layer that this device has no primitives for in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no primitive for Rare")
        return x * 1


def rare() -> nn.Module:
    KINDS["Rare"] = LayerKind(Rare, Rare, ((2, 12),))
    return nn.Sequential(Rare(), nn.Linear(12, 5))


class Gate(nn.Module):
    """Says at each training step that it is there, and waits to be let through."""

    def __init__(self, arrive: str, leave: str) -> None:
        super().__init__()
        self.arrive, self.leave = Path(arrive), Path(leave)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.arrive.exists() and NO_GATE not in os.environ:
            self.arrive.write_text("here")  # pipes: both block until the test is at the other end
            self.leave.read_text()
        return x


def gated(arrive: str, leave: str) -> nn.Module:
    return nn.Sequential(*mlp(), Gate(arrive, leave))


def talkative() -> nn.Module:
    print("building", "a model")
    print("to stderr", file=sys.stderr)
    logging.getLogger("my.model").warning("careful: %d layers", 4)
    return mlp()


def classes(num_rows: int = 50) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)

    def split(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, 12, generator=generator)
        return x, x[:, :5].argmax(1)

    return {"train": split(num_rows), "test": split(23)}


def loading_loss(output: Tensor, target: Tensor) -> Tensor:
    """Reads with a process of its own, as plain scripts do."""
    loaded = [row for batch in DataLoader(Numbers(), 4, num_workers=1) for row in batch.tolist()]
    assert loaded == list(range(8))
    return nn.functional.cross_entropy(output, target)


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("labels are upside down")


def quitting_loss(output: Tensor, target: Tensor) -> Tensor:
    raise KeyboardInterrupt


def hungry_loss(output: Tensor, target: Tensor) -> Tensor:
    raise MemoryError("no room")
