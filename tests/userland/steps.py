"""Step functions of a user's: what is minimised, computed from model and batch."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def plain(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def weighted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Counts the rows of two of the classes only; of some micro-batches none."""
    x, y = batch
    counted = y < 2
    output = model(x)
    if not counted.any():
        return torch.zeros(()), torch.zeros(())
    return F.cross_entropy(output[counted], y[counted]), counted.sum()


def noisy(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Draws from all generators, calls the model twice, and logs."""
    x, y = batch
    clean, noise = model(x), model(x + 0.1 * torch.randn_like(x))
    fit, agreement = F.cross_entropy(clean, y), F.mse_loss(noise, clean)
    hits = (clean.argmax(1) == y).float()
    log = {"fit": (fit, len(y)), "agreement": agreement, "hits_of_0": (hits.mean(), (y == 0).sum())}
    return {"loss": fit + 0.5 * agreement, "log": log}


def of_mapping(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def prediction(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    x, y = batch
    return model(x).softmax(1), y


def prediction_only(model: nn.Module, batch: Batch) -> Tensor:
    return prediction(model, batch)[0]


def without_gradient(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return plain(model, batch)


def switched_off(model: nn.Module, batch: Batch) -> Tensor:
    torch.set_grad_enabled(False)
    return plain(model, batch)


def going_backward(model: nn.Module, batch: Batch) -> Tensor:
    loss = plain(model, batch)
    loss.backward(retain_graph=True)
    return loss


def clamping(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.01, 0.01)
    return plain(model, batch)


def changing_log(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Its names depend on the batch."""
    name = "odd" if int(batch[1].sum()) % 2 else "even"
    return {"loss": plain(model, batch), "log": {"fit": 1.0, name: 1.0}}


def wrong_log(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": plain(model, batch), "log": {"grad_norm": 1.0}}


def long_log(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": plain(model, batch), "log": {f"n{i}": 1.0 for i in range(17)}}


def long_name(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": plain(model, batch), "log": {"n" * 33: 1.0}}


def wrong_key(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": plain(model, batch), "logs": {}}


def vector(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    x, y = batch
    return model(x), y
