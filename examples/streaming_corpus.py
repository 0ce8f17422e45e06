"""A language model of bytes, trained on text files that are written here and read as streams."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

LENGTH, NUM_FILES = 8, 7
WORDS = ["the cat", "a dog", "one bird"], ["sees", "hears", "finds"], ["a tree", "no one"]


class Lines:
    """Pieces of one file as (bytes, next byte); its state is the place in the file."""

    def __init__(self, file: Path) -> None:
        self.file, self.place = file, 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        with self.file.open("rb") as file:
            file.seek(self.place)
            while len(read := file.read(LENGTH + 1)) == LENGTH + 1:
                self.place = file.tell()
                yield torch.tensor(list(read[:-1])), read[-1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Corpus:
    """Text files; `streams` says in which order an epoch reads all but the last."""

    def __init__(self, num_lines: int) -> None:
        self.folder, draw = tempfile.TemporaryDirectory(prefix="corpus-"), random.Random(1)
        self.files = [Path(self.folder.name, f"{number}.txt") for number in range(NUM_FILES)]
        for file in self.files:
            lines = (" ".join(map(draw.choice, WORDS)) for _ in range(num_lines))
            file.write_text("\n".join(lines))

    def streams(self, epoch: int) -> list[Lines]:
        return [Lines(file) for file in random.Random(epoch).sample(self.files[:-1], NUM_FILES - 1)]


def load(num_lines: int = 400) -> dict[str, object]:
    """What is trained on is a stream; what is evaluated has a length."""
    corpus = Corpus(num_lines)
    return {"train": corpus, "test": list(Lines(corpus.files[-1]))}


def build_model(width: int = 16) -> nn.Module:
    """Eight bytes to scores of the next one."""
    head = nn.Linear(LENGTH * width, 128), nn.ReLU(), nn.Linear(128, 256)
    return nn.Sequential(nn.Embedding(256, width), nn.Flatten(), *head)
