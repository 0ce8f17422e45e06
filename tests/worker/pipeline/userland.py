"""Models, data and losses that the pipeline's jobs name."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_FEATURES, NUM_CLASSES, WIDTH = 12, 5, 16


def deep(dropout: float = 0.3) -> nn.Module:
    """Eight nodes: linear, in-place, dropout, batch norm."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(dropout),
        nn.Tanh(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, NUM_CLASSES),
    )


class Checkpointed(nn.Module):
    """Computes its forward again inside backward, and must draw the same numbers then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Dropout(0.4)

    def body(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.linear(self.drop(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def checkpointed() -> nn.Module:
    return nn.Sequential(Checkpointed(), Checkpointed(), nn.Linear(NUM_FEATURES, NUM_CLASSES))


class Unembed(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def tied(copies: int = 2) -> nn.Module:
    """An embedding whose weight is used again, once or twice."""
    embed = nn.Embedding(NUM_FEATURES, WIDTH)
    middle = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    if copies == 3:
        middle += [Unembed(embed), nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh()]
    return nn.Sequential(embed, *middle, Unembed(embed))


class InARow(nn.Module):
    """Not an nn.Sequential, but its children are called in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.body = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh())
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.last = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.first(x))


class Both(nn.Module):
    """Answers a dict with another layout, an integer and a bool inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.linear(x)
        return {"wide": hidden.view(-1, 4, 4).transpose(1, 2), "mask": hidden > 0, "n": (len(x),)}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, given: dict[str, Any]) -> Tensor:
        wide = self.linear(given["wide"]).flatten(1)
        return self.head(wide * given["mask"]) / given["n"][0]


def structured() -> nn.Module:
    return nn.Sequential(Both(), Join())


def shared_block() -> nn.Module:
    block = nn.Linear(NUM_FEATURES, NUM_FEATURES)
    return nn.Sequential(block, nn.Tanh(), block, nn.Linear(NUM_FEATURES, NUM_CLASSES))


def frozen_start() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, WIDTH).requires_grad_(False),
        nn.Tanh(),
        nn.Linear(WIDTH, NUM_CLASSES),
    )


def classes(num_rows: int = 22) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_rows, NUM_FEATURES, generator=generator)
    return {
        "train": (x, x[:, :NUM_CLASSES].argmax(1)),
        "test": (x[:9], x[:9, :NUM_CLASSES].argmax(1)),
    }


def tokens(num_rows: int = 22) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, NUM_FEATURES, (num_rows, 4), generator=generator)
    y = x.roll(-1, 1)
    y[torch.rand(y.shape, generator=generator) < 0.4] = -100
    return {"train": (x, y), "test": (x[:5], y[:5])}


class Noisy:
    def __init__(self) -> None:
        self.x, self.y = classes()["train"]

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.x[indices]
        return rows + 0.1 * torch.randn(rows.shape), self.y[indices]


def noisy() -> dict[str, Any]:
    return {"train": Noisy()}


def two_heads(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    left, right = output
    return nn.functional.cross_entropy(left, target) + 0.5 * right.square().mean()


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("labels are upside down")


def infinite_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() * torch.inf


def infinite_if_short(output: Tensor, target: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(output, target)
    return loss if len(target) > 6 else loss * torch.inf


def huge_loss(output: Tensor, target: Tensor) -> Tensor:
    """Finite, but its gradient is not."""
    return (output * 0).abs().sqrt().sum()
