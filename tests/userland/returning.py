"""What a user would write: models that return their own loss, as those of transformers do, and
batches that are dicts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.userland.models import NUM_FEATURES, NUM_WORDS

IGNORED = -100


@dataclass
class Returned:
    """What the models below return."""

    loss: Tensor | None
    logits: Tensor


class Words(nn.Module):
    """Predicts a label at each place."""

    def __init__(self, width: int = 8, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, width)
        self.dropout = dropout
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Returned:
        hidden = F.dropout(self.embedding(ids).cumsum(1), self.dropout, self.training)
        logits = self.head(hidden)
        return Returned(None if labels is None else self.compared(logits, labels), logits)

    def compared(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class WordsForCausalLM(Words):
    """Predicts the next word at each place: labels are shifted by the model."""

    def compared(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().compared(logits[:, :-1], labels[:, 1:])


class Regression(nn.Module):
    """Returns a dict, and a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(NUM_FEATURES, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(x).squeeze(1)
        return {"loss": F.mse_loss(logits, labels), "logits": logits}


def words(num_rows: int = 20, num_empty: int = 3, keys: str = "ids labels") -> dict[str, Any]:
    """Rows of six words and labels, some of which are left out; of the last rows, all are."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(0, NUM_WORDS, (num_rows, 6), generator=draw)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=draw) < 0.4] = IGNORED
    labels[num_rows - num_empty :] = IGNORED
    both = {"ids": ids, "labels": labels}
    rows = [{key: both[key][i] for key in keys.split()} for i in range(num_rows)]
    return {"train": rows, "test": rows[:7]}


def numbers() -> dict[str, Any]:
    """A dict of whole tensors; labels are numbers."""
    x = torch.randn(20, NUM_FEATURES, generator=torch.Generator().manual_seed(8))
    batch = {"x": x, "labels": x.sum(1)}
    return {"train": (batch, None), "test": (batch,)}


def correct(outputs: Tensor, targets: Tensor) -> int:
    """A metric of whole splits."""
    counted = targets != IGNORED
    return int((outputs.argmax(-1) == targets)[counted].sum())
