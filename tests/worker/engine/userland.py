"""What a user would write: models, data, losses and metrics that job files of the tests name."""

import os.path as borrowed_module
import random
from os import getcwd as borrowed
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_FEATURES, NUM_CLASSES = 12, 5

__all__ = ["borrowed", "borrowed_module"]


def mlp(hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, NUM_CLASSES))


def dropout_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, NUM_CLASSES)
    )


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)
    )


class Everything(nn.Module):
    """Frozen, unused and tied parameters, noise of its own, constant buffers with infinities."""

    mask: Tensor
    seen: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.last = nn.Linear(8, NUM_CLASSES)
        self.register_buffer("mask", torch.full((8,), -torch.inf).clamp(max=0.0))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.mean()
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        hidden = self.frozen(hidden) * self.scratch + self.mask.exp()
        return self.last(self.b(torch.relu(self.a(hidden))))


def everything() -> nn.Module:
    return Everything()


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.linear(self.drop(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


def deep(checkpointed: bool) -> nn.Module:
    shared = Block(checkpointed)
    return nn.Sequential(shared, shared, nn.Linear(NUM_FEATURES, NUM_CLASSES))


class HiddenTable(nn.Module):
    """Keeps a tensor that is no part of its state: it cannot be built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.table = torch.linspace(0.5, 1.5, NUM_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.table)


def reads_values() -> nn.Module:
    model = mlp()
    assert float(next(model.parameters()).detach().abs().sum()) > 0
    return model


class LastOfSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(len(x), 4, 3))[0][:, -1])


class Rare(nn.Module):
    """Computes nothing in float16 or under autocast, and has no way back in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        is_low = torch.is_autocast_enabled("cpu") or x.dtype == torch.float16
        if is_low or (x.dtype == torch.bfloat16 and torch.is_grad_enabled()):
            raise RuntimeError("no primitive for Rare. Set VERBOSE=all to hear more.")
        return x * 1


def rare() -> nn.Module:
    return nn.Sequential(Rare(), nn.Linear(NUM_FEATURES, NUM_CLASSES), Rare())


class BigBuffer(nn.Module):
    table: Tensor

    def __init__(self, change: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.change = change
        self.register_buffer("table", torch.zeros(1 << 19))

    def forward(self, x: Tensor) -> Tensor:
        if self.change:
            self.table += 1
        return self.linear(x)


class CountingLayers(nn.Module):
    """A forward of its own over repeated layers, which count their calls in what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(NUM_FEATURES, 8)
        self.layers = nn.ModuleList(Counting() for _ in range(3))
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            hidden = hidden + layer(nn.functional.dropout(hidden, 0.1, self.training), scale=index)
        return self.head(hidden)


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: int) -> Tensor:
        if self.training:
            self.calls += 1
        return self.body(x) * (scale + 1 / (1 + self.calls))


def counting_layers() -> nn.Module:
    return CountingLayers()


def tall() -> nn.Module:
    """32 nodes of the same size, and a small one."""
    layers = [nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Tanh()) for _ in range(32)]
    return nn.Sequential(*layers, nn.Linear(NUM_FEATURES, NUM_CLASSES))


def heavy() -> nn.Module:
    """Eight layers of 256 KiB each."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(nn.Linear(NUM_FEATURES, 256), *layers, nn.Linear(256, NUM_CLASSES))


class Overwrite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


def overwriting() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), Overwrite(), nn.Linear(8, NUM_CLASSES))


def broken_model() -> nn.Module:
    raise KeyError("no such layer")


def exploding_mlp() -> nn.Module:
    model = mlp()
    model.register_forward_hook(lambda *_: None)
    return nn.Sequential(model, Explode())


class Explode(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * torch.inf if int(self.calls) == 3 else x


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.nan


class Told(nn.Module):
    """Counts its forward passes and does as it is told at one of them."""

    def __init__(self, at: int = 0, what: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.extra = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.at, self.what, self.num_calls = at, what, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        what = self.what if self.num_calls == self.at else ""
        if what == "raise":
            raise ArithmeticError("as told")
        out: Tensor = self.linear(self.norm(x))
        if what != "leave out":
            out = out + self.extra(x)
        if what == "nan gradient":
            out = _BadGradient.apply(out)  # type: ignore[no-untyped-call]
        return out * torch.nan if what == "nan" else out


def classes(num_rows: int = 50, num_test_rows: int = 23) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)

    def split(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, NUM_FEATURES, generator=generator)
        return x, x[:, :NUM_CLASSES].argmax(1)

    return {"train": split(num_rows), "test": split(num_test_rows)}


class Noisy:
    """A data set of the user's class, with augmentation and nested tensors."""

    def __init__(self, num_rows: int) -> None:
        self.x, self.y = classes(num_rows)["train"]

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        rows = self.x[indices]
        return rows + 0.1 * torch.randn(rows.shape), self.y[indices]


def noisy(num_rows: int = 30) -> dict[str, Any]:
    return {"train": Noisy(num_rows)}


class NoisyRows:
    """A torch `Dataset` of (input, label), augmented with all three generators."""

    def __init__(self, num_rows: int) -> None:
        self.x, self.y = classes(num_rows)["train"]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        scale = 1.0 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return scale * self.x[row] + 0.1 * torch.randn(NUM_FEATURES), int(self.y[row])


def noisy_rows(num_rows: int = 50) -> dict[str, Any]:
    return {"train": NoisyRows(num_rows), "test": NoisyRows(23)}


def noisy_batch(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A collate that draws as well, and answers a dict whose first leaf counts no rows."""
    return {
        "jitter": 0.1 * torch.randn(()),
        "x": torch.stack([x for x, _ in rows]),
        "y": torch.tensor([y for _, y in rows]),
    }


class FunctionalDropout(nn.Module):
    """Draws in its own forward, so from the key that is in force when the batch has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, batch: Any) -> Tensor:
        x = batch["x"] + batch["jitter"] if isinstance(batch, dict) else batch
        out: Tensor = self.inner(nn.functional.dropout(x, 0.3, self.training))
        return out


def loss_of_batch(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


def per_client(client_id: int, num_clients: int) -> dict[str, Any]:
    x, y = classes(40)["train"]
    return {"train": (x[client_id::num_clients], y[client_id::num_clients])}


def empty_for_client_1(client_id: int = 0, num_clients: int = 1) -> dict[str, Any]:
    x, y = classes(10)["train"]
    return {"train": (x[:0], y[:0]) if client_id == 1 else (x, y)}


def tokens(num_rows: int = 20) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, 11, (num_rows, 6), generator=generator)
    y = x.roll(-1, 1)
    y[torch.rand(y.shape, generator=generator) < 0.4] = -100
    return {"train": (x, y)}


def token_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11))


def half_squared(output: Tensor, target: Tensor, scale: float = 0.5) -> Tensor:
    return scale * nn.functional.cross_entropy(output, target) ** 2


def tiny(output: Tensor, target: Tensor) -> Tensor:
    return 1e-8 * nn.functional.cross_entropy(output, target)


def steep(output: Tensor, target: Tensor) -> Tensor:
    """Finite, with gradients that are not."""
    return (output * 0).abs().sum().sqrt() + nn.functional.cross_entropy(output, target)


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    rows = len(target) * 3
    return nn.functional.cross_entropy(output, target), rows


def one_per_row(output: Tensor, target: Tensor) -> Tensor:
    return output - target


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("labels are upside down")


def confidence(output: Tensor, target: Tensor) -> float:
    return output.softmax(1).amax(1).mean().item()


def spoiling(extra: int, log: list[Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """Changes all that it was given."""
    log.append(extra)
    log[1]["deep"].append(extra)
    options.clear()
    return log, options


def shaped(
    width: int = 4,
    depth: int = 1,
    dropout: float = 0.0,
    activation: str = "tanh",
    is_frozen: bool = False,
    is_tied: bool = False,
    has_buffer: bool = False,
    reads_values: bool = False,
) -> nn.Module:
    """Some arguments decide what the state is made of."""
    if reads_values:
        dropout = float(torch.linspace(0, dropout, 3).tolist()[-1])
    if not isinstance(depth, int):
        raise ValueError(f"depth {depth!r} is no number")
    layers: list[nn.Module] = [nn.Linear(NUM_FEATURES, width)]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU() if activation == "relu" else nn.Tanh()]
    twin = nn.Linear(width, width)
    if is_tied:
        assert isinstance(layers[1], nn.Linear)
        twin.weight = layers[1].weight
    layers[0].requires_grad_(not is_frozen)
    model = nn.Sequential(*layers, twin, nn.Dropout(dropout), nn.Linear(width, NUM_CLASSES))
    if has_buffer:
        model.register_buffer("seen", torch.zeros(()))
    return model


class _Misshapen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, torch.ones(3, 3)


class Misshapen(nn.Module):
    """A gradient of a wrong shape, for the weight itself or for what it is made into."""

    def __init__(self, is_direct: bool) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.weight = nn.Parameter(torch.ones(NUM_CLASSES, NUM_FEATURES))
        self._is_direct = is_direct

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self._is_direct else self.weight * 2
        out: Tensor = _Misshapen.apply(self.first(x), weight)  # type: ignore[no-untyped-call]
        return out
