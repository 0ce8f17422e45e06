"""The parts of `train.py` that are left for a job to name: its model and its data."""

import random

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset


class Digits(Dataset[tuple[Tensor, int]]):
    def __init__(self, rows: slice, *, shift: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[rows] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels, self.shift = labels[rows].tolist(), shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = self.images[row]
        if self.shift:
            image = torch.roll(image, (random.randint(-1, 1), random.randint(-1, 1)), (1, 2))
        return image, self.labels[row]


def make_model() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(16 * 36, 10))


def make_data() -> dict[str, Digits]:
    train, test = slice(0, 1400), slice(1400, None)
    return {"train": Digits(train, shift=True), "test": Digits(test, shift=False)}
