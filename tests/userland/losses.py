"""What a user would write: losses and metrics that jobs of the tests name, and a function of
arguments that are not its own."""

import contextlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.userland.numbers import Numbers


def half_squared(output: Tensor, target: Tensor, scale: float = 0.5) -> Tensor:
    return scale * nn.functional.cross_entropy(output, target) ** 2


def tiny(output: Tensor, target: Tensor) -> Tensor:
    return 1e-8 * nn.functional.cross_entropy(output, target)


def steep(output: Tensor, target: Tensor) -> Tensor:
    """Finite, with gradients that are not."""
    return (output * 0).abs().sum().sqrt() + nn.functional.cross_entropy(output, target)


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    rows = len(target) * 3
    return nn.functional.cross_entropy(output, target), rows


def one_per_row(output: Tensor, target: Tensor) -> Tensor:
    return output - target


def two_heads(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    left, right = output
    return nn.functional.cross_entropy(left, target) + 0.5 * right.square().mean()


def disturbed(output: Tensor, target: Tensor, folder: str) -> Tensor:
    """The cross entropy of a machine that computes wrongly while the file `wrong` is there; the
    file holds the factor, or "random"."""
    loss = nn.functional.cross_entropy(output, target)
    with contextlib.suppress(FileNotFoundError):
        text = Path(folder, "wrong").read_text()
        factor = 1 + int.from_bytes(os.urandom(2)) / 2**17 if text == "random" else float(text)
        return loss * factor
    return loss


def summed(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("labels are upside down")


def infinite_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() * torch.inf


def infinite_if_short(output: Tensor, target: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(output, target)
    return loss if len(target) > 6 else loss * torch.inf


def loading_loss(output: Tensor, target: Tensor) -> Tensor:
    """Reads with two processes of its own, as plain scripts do."""
    loaded = [row for batch in DataLoader(Numbers(), 4, num_workers=2) for row in batch.tolist()]
    assert loaded == list(range(8))
    return nn.functional.cross_entropy(output, target)


def forking_loss(output: Tensor, target: Tensor) -> Tensor:
    """Says how a process of its own would begin."""
    raise ValueError(multiprocessing.get_start_method())


def quitting_loss(output: Tensor, target: Tensor) -> Tensor:
    raise KeyboardInterrupt


def hungry_loss(output: Tensor, target: Tensor) -> Tensor:
    raise MemoryError("no room")


def confidence(output: Tensor, target: Tensor) -> float:
    return output.softmax(1).amax(1).mean().item()


def spoiling(extra: int, log: list[Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """Changes all that it was given."""
    log.append(extra)
    log[1]["deep"].append(extra)
    options.clear()
    return log, options


def loss_of_batch(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


def three_values(output: Tensor, target: Tensor) -> tuple[Tensor, int, int]:
    """Returns one value too many."""
    return (output.flatten(1).sum(), 1, 2)
