"""Handwritten digits: a small data set and two models for the quickstart.

Nothing here knows Stratagem: these are plain functions of the user's, named in job files as
"examples.digits:build_model" and so on.
"""

import torch
from torch import Tensor, nn

NUM_PIXELS = 64
NUM_CLASSES = 10


def build_model(hidden: int = 64) -> nn.Module:
    """Two layers over the 8 × 8 pixels."""
    return nn.Sequential(nn.Linear(NUM_PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, NUM_CLASSES))


def build_cnn(channels: int = 16, dropout: float = 0.1) -> nn.Module:
    """A small convolutional network with batch norm and dropout."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * channels, NUM_CLASSES),
    )


def load(seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """1437 training and 360 test images, scaled to [0, 1]."""
    from sklearn.datasets import load_digits  # who has rows of its own needs none of it

    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    num_train = len(x) * 4 // 5
    train, test = order[:num_train], order[num_train:]
    return {"train": (x[train], y[train]), "test": (x[test], y[test])}
