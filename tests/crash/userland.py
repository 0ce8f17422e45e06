"""What a user would write: small models and data that the crash tests train."""

import ctypes
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

NUM_FEATURES = 8
NUM_CLASSES = 3


def build(hidden: int = 16, dropout: float = 0.2) -> nn.Module:
    """Two layers with dropout, whose masks must come out the same after every crash."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, NUM_CLASSES),
    )


class _Hooked(nn.Module):
    """Calls a function with the number of training batches so far, before each of them."""

    def __init__(self, act: "object", hidden: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.inner = build(hidden, dropout)
        self._act = act
        self._num_batches = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self._num_batches += 1
            assert callable(self._act)
            self._act(self._num_batches)
        logits: Tensor = self.inner(x)
        return logits


def build_paced(pace_s: float, hidden: int = 16, dropout: float = 0.2) -> nn.Module:
    """Takes pace_s seconds per batch, so that a fault can hit a run in its middle."""
    return _Hooked(lambda _num: time.sleep(pace_s), hidden, dropout)


def build_timed(folder: str, pace_s: float) -> nn.Module:
    """As build_paced, and notes when each batch began: one line per batch, one file per process."""
    path = Path(folder) / str(os.getpid())

    def note(_num: int) -> None:
        with path.open("a") as file:
            file.write(f"{time.time()}\n")
        time.sleep(pace_s)

    return _Hooked(note)


def build_deadly(at_batch: int, signum: int = 0) -> nn.Module:
    """Ends its process at a batch, by a signal or by an exit that nobody can catch."""

    def act(num: int) -> None:
        if num == at_batch:
            print("this batch", "is the last one", flush=True)
            if signum == signal.SIGSEGV:
                ctypes.string_at(0)
            elif signum:
                os.kill(os.getpid(), signum)
            os._exit(11)

    return _Hooked(act)


def build_large(width: int) -> nn.Module:
    """One wide layer: an update that is spooled in more than one piece."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, width, bias=False), nn.Linear(width, NUM_CLASSES, bias=False)
    )


def load(num_rows: int = 60) -> dict[str, tuple[Tensor, Tensor]]:
    """Rows around three centres; 60 rows and batches of 8 leave a short last batch."""
    draw = torch.Generator().manual_seed(7)
    centres = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=draw)
    y = torch.randint(NUM_CLASSES, (num_rows + 20,), generator=draw)
    x = centres[y] + 0.3 * torch.randn(num_rows + 20, NUM_FEATURES, generator=draw)
    return {"train": (x[:num_rows], y[:num_rows]), "test": (x[num_rows:], y[num_rows:])}
