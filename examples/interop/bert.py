"""A BERT classifier of transformers, random-initialised, and its metrics by torchmetrics.

Nothing here knows Stratagem; bert.yaml is the job. `train` is what it replaces.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from transformers import BertConfig, BertForSequenceClassification

from examples.interop import plain_loop

NUM_CODES, NUM_LABELS, EPOCHS = 48, 3, 3

Rows = list[dict[str, Tensor]]


def build_model(dropout: float = 0.0) -> BertForSequenceClassification:
    """Two layers of width 32."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": NUM_CODES, "num_labels": NUM_LABELS, "intermediate_size": 64}
    sizes |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(**sizes))


def load(num_rows: int = 256, num_test_rows: int = 60) -> dict[str, Rows]:
    """Sequences of twelve codes; the label is the third of all codes that they are mostly from."""
    draw, shape = torch.Generator().manual_seed(1), (num_rows + num_test_rows, 12)
    labels = torch.randint(NUM_LABELS, shape[:1], generator=draw)
    strays = torch.randint(2 * NUM_LABELS, shape, generator=draw)
    thirds = torch.where(strays < NUM_LABELS, strays, labels[:, None])
    codes = thirds * 16 + torch.randint(16, shape, generator=draw)
    rows = [{"input_ids": x, "labels": y} for x, y in zip(codes, labels, strict=True)]
    return {"train": rows[:num_rows], "test": rows[num_rows:]}


def f1() -> MulticlassF1Score:
    """F1 of all rows, as a mean over classes."""
    return MulticlassF1Score(num_classes=NUM_LABELS, average="macro")


def auroc() -> MulticlassAUROC:
    """The area under the ROC curve, as a mean over classes."""
    return MulticlassAUROC(num_classes=NUM_LABELS)


def train() -> dict[str, Tensor]:
    """The state after the job's steps, as one process computes it."""
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-6)
    batches = plain_loop.batches(load()["train"], default_collate, EPOCHS)
    return plain_loop.train(model, batches, optimizer)
