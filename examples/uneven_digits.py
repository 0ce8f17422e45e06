"""A federation of digits in which one client is unlike the others: it alone has eights and nines,
and few of them."""

import torch
from torch import Tensor

from examples.digits import load

FIRST_RARE = 8
NUM_RARE = 120


def load_client(client_id: int = 0, num_clients: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the rows of one client; all rows where there is one. The last one has 120 images of
    eights and nines to train on, the others share those of zeros to sevens; each is tested on
    its own digits."""
    whole = load()
    if num_clients == 1:
        return whole
    is_last = client_id == num_clients - 1
    found = {}
    for split, (images, labels) in whole.items():
        rows = torch.nonzero((labels >= FIRST_RARE) == is_last).flatten()
        if is_last and split == "train":
            rows = rows[:NUM_RARE]
        elif not is_last:
            rows = rows[client_id :: num_clients - 1]
        found[split] = images[rows], labels[rows]
    return found
