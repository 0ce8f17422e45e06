"""What a user would write: data sets that jobs of the tests name.

Gated data sets wait inside `take` until the test opens a gate (a file lock), so that a test decides
who is late without any clock.
"""

import fcntl
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from tests.userland.models import NUM_CLASSES, NUM_FEATURES, NUM_WORDS

WORKER = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else ""

Rows = tuple[Tensor, Tensor]


def rows_of(num_rows: int, seed: int = 5) -> Rows:
    x = torch.randn(num_rows, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :NUM_CLASSES].argmax(1)


def classes(num_rows: int = 50, num_test_rows: int = 23) -> dict[str, Rows]:
    return {"train": rows_of(num_rows), "test": rows_of(num_test_rows, seed=6)}


def test_only() -> dict[str, Rows]:
    """A data set that nothing can be trained on."""
    return {"test": rows_of(23)}


def tokens(num_rows: int = 20) -> dict[str, Rows]:
    """Sequences of six words, 40 % of whose targets are left out."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, NUM_WORDS, (num_rows, 6), generator=generator)
    y = x.roll(-1, 1)
    y[torch.rand(y.shape, generator=generator) < 0.4] = -100
    return {"train": (x, y), "test": (x[:5], y[:5])}


class Noisy:
    """A data set of the user's class, with augmentation and nested tensors."""

    def __init__(self, num_rows: int) -> None:
        self.x, self.y = classes(num_rows)["train"]

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        rows = self.x[indices]
        return rows + 0.1 * torch.randn(rows.shape), self.y[indices]


def noisy(num_rows: int = 30) -> dict[str, Any]:
    return {"train": Noisy(num_rows)}


class NoisyRows:
    """A torch `Dataset` of (input, label), augmented with all three generators."""

    def __init__(self, num_rows: int) -> None:
        self.x, self.y = classes(num_rows)["train"]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        scale = 1.0 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return scale * self.x[row] + 0.1 * torch.randn(NUM_FEATURES), int(self.y[row])


def noisy_rows(num_rows: int = 50) -> dict[str, Any]:
    return {"train": NoisyRows(num_rows), "test": NoisyRows(23)}


class ImpureRows(NoisyRows):
    """Draws from a generator that nobody seeds."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(row)
        return x + float(np.random.default_rng().random()), y


def impure_rows() -> dict[str, Any]:
    return {"train": ImpureRows(50)}


class TornRows(NoisyRows):
    """A row in the middle cannot be read."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == 24:
            raise ValueError("row 24 is torn")
        return super().__getitem__(row)


def torn_rows() -> dict[str, Any]:
    return {"train": TornRows(50)}


def unseeded() -> dict[str, Rows]:
    """Rows that are others whenever they are made."""
    x = torch.from_numpy(np.random.default_rng().standard_normal((50, NUM_FEATURES))).float()
    return {"train": (x, x[:, :NUM_CLASSES].argmax(1))}


def noisy_batch(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A collate that draws as well, and answers a dict whose first leaf counts no rows."""
    return {
        "jitter": 0.1 * torch.randn(()),
        "x": torch.stack([x for x, _ in rows]),
        "y": torch.tensor([y for _, y in rows]),
    }


def per_client(client_id: int, num_clients: int) -> dict[str, Any]:
    x, y = classes(40)["train"]
    return {"train": (x[client_id::num_clients], y[client_id::num_clients])}


def of_sizes(
    sizes: list[int], client_id: int, num_clients: int, test: bool = False
) -> dict[str, Any]:
    """As many rows as stand there for each client; one below 0 has data that cannot be read."""
    if sizes[client_id] < 0:
        raise FileNotFoundError(f"client {client_id}")
    return {
        "train": rows_of(sizes[client_id], seed=client_id),
        **({"test": rows_of(7, seed=100 + client_id)} if test else {}),
    }


def empty_for_client_1(client_id: int = 0, num_clients: int = 1) -> dict[str, Any]:
    x, y = classes(10)["train"]
    return {"train": (x[:0], y[:0]) if client_id == 1 else (x, y)}


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


class Flawed(Gated):
    """Rows that one machine reads wrongly in their last bits: `<worker>.flawed` in the folder has
    an `x` for each batch that is wrong, and a dot for each that is right, of those to come."""

    def take(self, indices: Tensor) -> Rows:
        x, y = super().take(indices)
        flaws = self.folder / f"{WORKER}.flawed"
        left = flaws.read_text() if flaws.exists() else ""
        if left:
            flaws.write_text(left[1:])
        return torch.nextafter(x, torch.tensor(torch.inf)) if left[:1] == "x" else x, y


def flawed(folder: str, num_rows: int = 48) -> dict[str, Any]:
    return {**gated(folder), "train": Flawed(rows_of(num_rows), folder, "batch")}


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
    x, y = default_collate(rows)
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
