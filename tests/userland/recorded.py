"""The model and the data that recorded messages of released versions name: never change them.

See `tests/golden/record_messages.py`; what was recorded is replayed by later versions for years.
"""

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    """Two layers, so that a pipeline has two stages: 26 parameters."""
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def data() -> dict[str, tuple[Tensor, Tensor]]:
    """16 rows to train on and 8 to test with, of two classes that a line divides."""
    rows = torch.linspace(-1, 1, 72).reshape(24, 3)
    labels = (rows.sum(1) > 0).long()
    return {"train": (rows[:16], labels[:16]), "test": (rows[16:], labels[16:])}
