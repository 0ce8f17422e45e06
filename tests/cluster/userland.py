"""What a user would write: models, data and losses that the jobs of these tests name.

Workers import this module as the user's own code. Gated data sets wait inside `take` until the test
opens a gate (a file lock), so that a test decides who is late without any clock.
"""

import fcntl
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_FEATURES, NUM_CLASSES = 12, 5

WORKER = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else ""

Rows = tuple[Tensor, Tensor]


# ---- models ----


def mlp(hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, NUM_CLASSES))


def tower(width: int = 8, depth: int = 1, dropout: float = 0.0) -> nn.Module:
    """Its layout depends on two of the arguments; the third may change at any time."""
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(width if number else NUM_FEATURES, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(width, NUM_CLASSES))


def dropout_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, NUM_CLASSES)
    )


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)
    )


def deep() -> nn.Module:
    """Eight nodes; 6 takes what 5 makes in place."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 16),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.LayerNorm(16),
        nn.Linear(16, NUM_CLASSES),
    )


class Everything(nn.Module):
    """Frozen, unused and tied parameters, and a buffer that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.last = nn.Linear(8, NUM_CLASSES)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.mean()
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        output: Tensor = self.last(self.b(torch.relu(self.a(self.frozen(hidden)))))
        return output


def everything() -> nn.Module:
    return Everything()


class Stray(nn.Module):
    """Adds the number of its process to a parameter: no two replicas agree."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.mark = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mark.data += os.getpid()
        output: Tensor = self.linear(x)
        return output


class Poisonable(nn.Module):
    """A row above 1000 turns a parameter that the loss does not see into NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.hidden = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1000:
            self.hidden.data[1] = torch.nan
        output: Tensor = self.linear(x.clamp(-10, 10))
        return output


class Failing(nn.Module):
    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.num_calls, self.at_call = 0, at_call

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == self.at_call:
            raise KeyError("no such layer")
        output: Tensor = self.linear(x)
        return output


class Exploding(Failing):
    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        output: Tensor = self.linear(x) * (torch.inf if self.num_calls == self.at_call else 1.0)
        return output


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        print(f"the user sees {len(x)} rows")
        output: Tensor = self.linear(x)
        return output


# ---- losses ----


def two_heads(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    left, right = output
    return nn.functional.cross_entropy(left, target) + 0.5 * right.square().mean()


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("labels are upside down")


# ---- data ----


def rows_of(num_rows: int, seed: int = 5) -> Rows:
    x = torch.randn(num_rows, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :NUM_CLASSES].argmax(1)


def classes(num_rows: int = 50, num_test_rows: int = 23) -> dict[str, Rows]:
    return {"train": rows_of(num_rows), "test": rows_of(num_test_rows, seed=6)}


def poisoned(
    client_id: int = 0, num_clients: int = 1, poisoned_client: int = -1
) -> dict[str, Rows]:
    x, y = rows_of(48)
    x, y = x[client_id::num_clients].clone(), y[client_id::num_clients]
    if client_id == poisoned_client:
        x[0, 0] = 2000.0
    return {"train": (x, y)}


class Gated:
    """Rows whose n-th batch waits for the gate `<name>-<n>` of a folder, where there is one.

    A gate `<worker>-<name>-<n>` holds one worker only.
    """

    def __init__(self, rows: Rows, folder: str, name: str) -> None:
        self.x, self.y = rows
        self.folder, self.name = Path(folder), name
        self.num_taken = 0

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: Tensor) -> Rows:
        self.num_taken += 1
        gate = f"{self.name}-{self.num_taken}"
        for path in (self.folder / gate, self.folder / f"{WORKER}-{gate}"):
            if path.exists():
                path.with_name(f"{path.name}.reached").touch()
                with path.open() as file:
                    fcntl.flock(file, fcntl.LOCK_SH)
        return self.x[indices], self.y[indices]


def gated(folder: str, num_rows: int = 48) -> dict[str, Any]:
    return {"train": Gated(rows_of(num_rows), folder, "batch"), "test": rows_of(23, seed=6)}


class AugmentedRows:
    """A torch `Dataset`: rows one by one, changed at random, which may wait at a gate."""

    def __init__(self, rows: Gated) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Rows:
        x, y = self.rows.take(torch.tensor([row]))
        return (1 + 0.1 * random.random()) * x[0] + 0.1 * torch.randn(NUM_FEATURES), y[0]


def augmented(folder: str = "nowhere", num_rows: int = 50) -> dict[str, Any]:
    """Each row of the training data is counted by the gates."""
    return {"train": AugmentedRows(Gated(rows_of(num_rows), folder, "row"))}


def jittered(rows: list[Rows]) -> Rows:
    """A collate that draws as well."""
    x, y = (torch.stack(each) for each in zip(*rows, strict=True))
    return x + 0.01 * torch.randn(()), y


def gated_clients(folder: str, client_id: int = 0, num_clients: int = 1) -> dict[str, Any]:
    x, y = rows_of(46)
    own = x[client_id::num_clients], y[client_id::num_clients]
    return {"train": Gated(own, folder, f"client{client_id}")}


class FailingRows(Gated):
    """The rows of a client that fails in some rounds: it takes one batch in each.

    Takes are counted in a file, as a process that ends forgets them; a round that is tried again
    counts anew.
    """

    def __init__(self, rows: Rows, folder: str, name: str, how: str, rounds: list[int]) -> None:
        super().__init__(rows, folder, name)
        self.how, self.rounds = how, rounds

    def take(self, indices: Tensor) -> Rows:
        x, y = super().take(indices)
        done = self.folder / f"{self.name}.done"
        round_num = 1 + (len(done.read_text()) if done.exists() else 0)
        if round_num not in self.rounds:
            done.write_text("x" * round_num)
            return x, y
        if self.how != "exit":  # it is asked no more in this round
            done.write_text("x" * round_num)
        match self.how:
            case "exit":
                os._exit(3)
            case "raise":
                raise KeyError("label")
            case "memory":
                raise MemoryError
            case "torch memory":
                torch.empty(1 << 50)
            case "not finite":
                return torch.full_like(x, torch.nan), y
        raise AssertionError(self.how)


def failing_clients(
    folder: str,
    how: str = "raise",
    failing: list[int] | None = None,
    rounds: list[int] | None = None,
    client_id: int = 0,
    num_clients: int = 1,
) -> dict[str, Any]:
    """46 rows, dealt to the clients; those named fail in these rounds, the others are gated."""
    x, y = rows_of(46)
    own = x[client_id::num_clients], y[client_id::num_clients]
    if client_id not in (failing or []):
        return {"train": Gated(own, folder, f"client{client_id}")}
    return {"train": FailingRows(own, folder, f"client{client_id}", how, rounds or [])}
