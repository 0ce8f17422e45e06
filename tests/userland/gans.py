"""A small GAN of a user's: one model of two parts, and a step for each."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.userland.models import NUM_FEATURES


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_FEATURES)
        )
        self.disc = nn.Sequential(
            nn.Linear(NUM_FEATURES, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.disc(x)

    def fake(self, num_rows: int) -> Tensor:
        return self.gen(torch.randn(num_rows, 3))


def step_disc(model: Gan, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    real, fake = model.disc(batch[0]), model.disc(model.fake(len(batch[0])))
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    return {"loss": loss, "log": {"real": real.mean()}}


def huge_disc(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 5.0 * F.softplus(-model(batch[0])).mean()


def infinite_disc(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model.disc(batch[0]).mean() / 0.0


def step_gen(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.softplus(-model.disc(model.fake(len(batch[0])))).mean()


def prediction(model: Gan, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model.disc(batch[0]).squeeze(1), (batch[1] > 0).float()
