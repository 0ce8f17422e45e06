"""The optimizer Lion, by lion-pytorch, on the GPT-2 of gpt2.py.

Nothing here knows Stratagem; lion.yaml is the job. `train` is what it replaces.
"""

import torch
from lion_pytorch import Lion
from torch import Tensor

from examples.interop import gpt2, plain_loop

EPOCHS = 2


def train() -> dict[str, Tensor]:
    """The state after the job's steps, as one process computes it."""
    torch.manual_seed(0)
    model = gpt2.build_model()
    optimizer = Lion(model.parameters(), lr=0.001, weight_decay=0.1)
    batches = plain_loop.batches(gpt2.load()["train"], gpt2.pad, EPOCHS)
    return plain_loop.train(model, batches, optimizer)
