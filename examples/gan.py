"""A GAN on digits in two turns: each step trains the discriminator, then the generator."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_NOISE = 16


class Gan(nn.Module):
    """Both networks; which of them is trained, the turn says."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NUM_NOISE, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def fake(self, num_images: int) -> Tensor:
        """Return images of the generator."""
        images: Tensor = self.generator(torch.randn(num_images, NUM_NOISE))
        return images


def discriminator_step(model: Gan, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Tell digits from images of the generator."""
    images, _ = batch
    real, fake = model.discriminator(images), model.discriminator(model.fake(len(images)))
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    return {"loss": loss, "log": {"told_apart": ((real > 0) & (fake < 0)).float().mean()}}


def generator_step(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Have the discriminator take the generator's images for digits."""
    return F.softplus(-model.discriminator(model.fake(len(batch[0])))).mean()
