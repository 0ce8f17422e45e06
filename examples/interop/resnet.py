"""A ResNet of transformers on image files, cropped and mirrored at random as they are read.

Nothing here knows Stratagem; resnet.yaml is the job. `train` is what it replaces.
"""

import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate
from transformers import ResNetConfig, ResNetForImageClassification

from examples.interop import plain_loop


class Images(Dataset[dict[str, torch.Tensor]]):
    """JPEG files; the label is in the name."""

    def __init__(self, files: list[Path], augments: bool) -> None:
        self.files, self.augments = files, augments

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(np.array(Image.open(self.files[row]), np.float32) / 255)
        x, y = (random.randrange(5), random.randrange(5)) if self.augments else (2, 2)
        pixels = pixels[x : x + 16, y : y + 16].permute(2, 0, 1)
        pixels = pixels.flip(-1) if self.augments and random.random() < 0.5 else pixels
        return {"pixel_values": pixels, "labels": torch.tensor(int(self.files[row].stem[0]))}


def load(augments: bool = True) -> dict[str, Images]:
    """Noise with a bright stripe, as files that are written on the spot."""
    draw, folder = np.random.default_rng(0), Path(tempfile.mkdtemp())
    files = [folder / f"{number % 4}-{number}.jpg" for number in range(128)]
    for number, file in enumerate(files):
        noise = draw.integers(128, size=(20, 20, 3), dtype=np.uint8)
        noise[number % 4 * 5 :][:5] += 96
        Image.fromarray(noise).save(file)
    return {"train": Images(files[:96], augments), "test": Images(files[96:], False)}


def build_model() -> ResNetForImageClassification:
    """Two stages of one block, with batch norm."""
    made = ResNetConfig(hidden_sizes=[8, 16], depths=[1, 1], num_labels=4)  # type: ignore[call-arg]
    return ResNetForImageClassification(made)


def train() -> dict[str, torch.Tensor]:
    """The state after the job's steps on one shard, without augmentation."""
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = plain_loop.batches(load(augments=False)["train"], default_collate, 2)
    return plain_loop.train(model, batches, optimizer)
