"""Five kinds of model and their data, at any size."""

from typing import Any

import torch
from torch import Tensor, nn

NUM_ROWS = 256


def mlp(width: int = 128, depth: int = 4) -> nn.Module:
    hidden = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def mlp_data(width: int = 128) -> dict[str, Any]:
    return {"train": (torch.randn(NUM_ROWS, width), torch.arange(NUM_ROWS) % 10)}


def cnn(channels: int = 16) -> nn.Module:
    def block(before: int, after: int) -> nn.Module:
        convolution = nn.Conv2d(before, after, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))

    blocks = [block(3, channels), block(channels, 2 * channels)]
    return nn.Sequential(*blocks, nn.Flatten(), _head(channels))


def _head(channels: int) -> nn.Module:
    return nn.Linear(2 * channels * 8 * 8, 10)


def cnn_data() -> dict[str, Any]:
    return {"train": (torch.randn(NUM_ROWS, 3, 32, 32), torch.arange(NUM_ROWS) % 10)}


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
                for _ in range(depth)
            )
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def transformer(width: int = 64, depth: int = 2, vocabulary: int = 100) -> nn.Module:
    return Transformer(width, depth, vocabulary)


def transformer_data(length: int = 32, vocabulary: int = 100) -> dict[str, Any]:
    tokens = torch.randint(vocabulary, (NUM_ROWS, length))
    return {"train": (tokens, tokens.roll(-1, 1))}


class Recurrent(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def rnn(width: int = 16, hidden: int = 64) -> nn.Module:
    return Recurrent(width, hidden)


def rnn_data(length: int = 24, width: int = 16) -> dict[str, Any]:
    return {"train": (torch.randn(NUM_ROWS, length, width), torch.arange(NUM_ROWS) % 10)}


class Recommender(nn.Module):
    def __init__(self, num_items: int, width: int) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, width)
        self.head = nn.Linear(width, 10)

    def forward(self, items: Tensor) -> Tensor:
        return self.head(self.items(items).mean(1))


def embedding(num_items: int = 20_000, width: int = 32) -> nn.Module:
    return Recommender(num_items, width)


def embedding_data(num_items: int = 20_000) -> dict[str, Any]:
    items = torch.randint(num_items, (NUM_ROWS, 16))
    return {"train": (items, torch.arange(NUM_ROWS) % 10)}
