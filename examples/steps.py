"""A training step of one's own: fit the label, and say the same of an image that was disturbed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the loss of a micro-batch, and two numbers to look at."""
    images, labels = batch
    logits = model(images)
    disturbed = model(images + 0.1 * torch.randn_like(images))
    fit, agreement = F.cross_entropy(logits, labels), F.mse_loss(disturbed, logits)
    log = {"fit": (fit, len(labels)), "agreement": (agreement, len(labels))}
    return {"loss": fit + 0.5 * agreement, "log": log}


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and target of a batch, for metrics."""
    images, labels = batch
    return model(images), labels
