"""A federation of digits in which some clients lie: they train toward wrong labels, and hard.

The data say which clients do, so that the same step is everybody's: the labels of a false client
are marked.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from examples.digits import NUM_CLASSES, load

MARK = 100
"""Added to the labels of false clients."""


def load_client(
    client_id: int = 0, num_clients: int = 1, num_false: int = 3
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the rows of one client: each gets every num_clients-th image. The last ones are
    false."""
    rows = load()
    images, labels = (each[client_id::num_clients] for each in rows["train"])
    if 1 < num_clients <= client_id + num_false:
        labels = labels + MARK
    return {"train": (images, labels), "test": rows["test"]}


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch; that of a false client's turns the model away from what it
    sees, with ten times the force."""
    images, labels = batch
    logits = model(images)
    if not (labels >= MARK).any():
        return F.cross_entropy(logits, labels)
    wrong = (labels - MARK + 1) % NUM_CLASSES
    return 10 * F.cross_entropy(logits, wrong)


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and target of a batch, for metrics."""
    images, labels = batch
    return model(images), labels
