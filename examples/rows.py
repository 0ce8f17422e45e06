"""Sequences of unequal length from a torch `Dataset`, augmented at random and padded by a collate.

Nothing here knows Stratagem.
"""

import random

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_SYMBOLS, NUM_CLASSES = 12, 4


class Words(Dataset[tuple[Tensor, int]]):
    """Random words; a word's class is the symbol it has most often, of the first few."""

    def __init__(self, num_rows: int, seed: int, *, drops: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(5, 20, (num_rows,), generator=generator).tolist()
        self.words = [torch.randint(1, NUM_SYMBOLS, (n,), generator=generator) for n in lengths]
        self.drops = drops

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        word = self.words[row]
        label = int(torch.bincount(word, minlength=NUM_SYMBOLS)[1 : NUM_CLASSES + 1].argmax())
        if self.drops:  # augmentation: some symbols are left out
            word = word[[random.random() < 0.9 for _ in word]]
        return word, label


def load(num_rows: int = 600) -> dict[str, Words]:
    """Splits of words; those of training are augmented."""
    return {"train": Words(num_rows, 1, drops=True), "test": Words(200, 2, drops=False)}


def pad(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """(symbols, padded with 0 to the longest word, (B, L); labels (B,))."""
    words = nn.utils.rnn.pad_sequence([word for word, _ in rows], batch_first=True)
    return words, torch.tensor([label for _, label in rows])


class Counts(nn.Module):
    """The sum of embeddings, and two layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_SYMBOLS, width, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES))

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(words).sum(1))
        return logits


build_model = Counts
