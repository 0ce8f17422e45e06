"""GPT-2 of transformers, random-initialised: its largest weights are tied, and it returns its loss.

Nothing here knows Stratagem; gpt2.yaml is the job. `train` is what it replaces.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from examples.interop import plain_loop

NUM_CODES, NUM_TRAIN, EPOCHS, BATCH_SIZE = 64, 128, 3, 16

Rows = list[dict[str, Tensor]]


def build_model(dropout: float = 0.0, **sizes: int) -> GPT2LMHeadModel:
    """Two layers of width 32, unless `sizes` say otherwise."""
    small: dict[str, Any] = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, **sizes}
    small |= {"vocab_size": NUM_CODES, "bos_token_id": 1, "eos_token_id": 1}
    small |= {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**small))


def load(num_rows: int = NUM_TRAIN, num_test_rows: int = 32) -> dict[str, Rows]:
    """Sequences of unequal length that count up, each from a place of its own."""
    draw = torch.Generator().manual_seed(0)
    shape = (num_rows + num_test_rows,)
    starts = torch.randint(NUM_CODES, shape, generator=draw).tolist()
    lengths = torch.randint(4, 28, shape, generator=draw).tolist()
    counted = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    rows = [{"input_ids": 2 + codes % (NUM_CODES - 2)} for codes in counted]
    return {"train": rows[:num_rows], "test": rows[num_rows:]}


def pad(rows: Rows) -> dict[str, Tensor]:
    """A batch as long as its longest row; what is padded counts in no loss."""
    ids = [row["input_ids"] for row in rows]
    labels = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    mask = labels != -100
    return {"input_ids": labels.where(mask, 0), "attention_mask": mask.long(), "labels": labels}


def train() -> dict[str, Tensor]:
    """The state after the job's steps, as one process computes it."""
    torch.manual_seed(0)
    model = build_model()
    small = [param for param in model.parameters() if param.dim() == 1]
    large = [param for param in model.parameters() if param.dim() > 1]
    groups: list[dict[str, Any]] = [{"params": large}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.003, eps=1e-6, weight_decay=0.1)
    steps = EPOCHS * NUM_TRAIN // BATCH_SIZE
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, steps, cycle_momentum=False)
    batches = plain_loop.batches(load()["train"], pad, EPOCHS, BATCH_SIZE)
    return plain_loop.train(model, batches, optimizer, cycle, clip_norm=1.0)
