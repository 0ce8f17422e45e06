"""The models that step times are measured with, their data, and marks of when each step began.

Imports torch alone, so that a script of a peer which imports it is as plain as one of a user's.
"""

import os
import struct
import time
from pathlib import Path

import torch
from torch import Tensor, nn

GLOBAL_BATCH = {"mlp": 256, "transformer": 16}
NUM_BATCHES = 8
MARKS = "RACE_MARKS"
"""The variable that names the folder in which processes leave their marks; unset: nowhere."""
MARK = struct.Struct("=dd")


class Transformer(nn.Module):
    """10 M parameters; 32 tokens a row."""

    def __init__(self, vocabulary: int = 10_000, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(tokens)))
        return logits.flatten(0, 1)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "transformer":
        return Transformer()
    return nn.Sequential(
        nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 400), nn.ReLU(), nn.Linear(400, 10)
    )


def make_rows(name: str, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of inputs and of targets."""
    generator = torch.Generator().manual_seed(seed)
    if name == "transformer":
        tokens = torch.randint(10_000, (rows, 33), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    inputs = torch.randn(rows, 784, generator=generator)
    return inputs, torch.randint(10, (rows,), generator=generator)


class Marked(nn.Module):
    """A model that notes when each of its passes in training begins."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = make_model(name)
        self._file: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and MARKS in os.environ:
            if self._file is None:
                path = Path(os.environ[MARKS]) / str(os.getpid())
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(self._file, MARK.pack(time.monotonic(), time.process_time()))
        result: Tensor = self.inner(x)
        return result


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target.flatten())


def load(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    return {"train": make_rows(name, NUM_BATCHES * GLOBAL_BATCH[name], 0)}


def take_marks(folder: Path) -> list[list[tuple[float, float]]]:
    """For each process: when its passes began, and the CPU seconds it had used by then. The next
    model begins anew."""
    marks = []
    for path in sorted(folder.iterdir()):
        marks.append(list(MARK.iter_unpack(path.read_bytes())))
        path.unlink()
    return marks
